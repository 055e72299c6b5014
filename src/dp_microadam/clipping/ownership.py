"""The independence check, before the first step: every row belongs to one example, and every gradient is accounted for.

A randomized numerical check, not a proof in the sense of mathematics. Formal guarantees: after :func:`prove` has returned,
on synthetic input of the batch's shape,

- replacing one example by another, or taking it or two of them out, left every other example as it was: its loss, the
  norm of its gradient in every layer, and a random projection of its output gradient at every use of a parameter. Tried
  with three examples, for each of them; and with examples multiplied by 1000, 1 and 30 or by -30, 1 and -1000, where
  each was the same alone as beside the others; with one example three times; and with one beside others a million and
  ten thousand times as large. So neither the place in the batch, nor its size, nor the range of its values decides.
  Whole numbers go up to what they index (classes, tokens) or to 255, and are the same in some examples and of another
  range in others. It runs in double precision on a copy of the model, which autocast leaves alone and in which
  parameters that are all zero (a new head, a gain) are small random numbers instead; what may differ is at most 1e-9 of
  the largest loss and 1e-7 of the largest gradient; a model that does not run in double throughout is checked as it is:
  to 1e-5 and 1e-3 in float32, to four roundings of the products under autocast (3e-2 in bfloat16), and to hardly
  anything if its parameters are in half precision;
- for models that draw random numbers, 16 more seeds left the losses of others as they were when one example was replaced;
- nothing a checkpoint holds (parameters, buffers, extra state) was changed by a forward and backward pass, and neither the
  loss of a batch nor any plain attribute of a module depended on the batch that had passed before it;
- the loss of one example alone had an output gradient in its own rows of every observed use of a parameter and in no
  other row, so these rows are the gradient of that example;
- each example's gradient norm and the unclipped sum that the engine forms equal those of autograd, for every trainable
  parameter, so no parameter is used where it is not observed.

After :func:`prove_size` the first holds for the first and last example of a batch of that very size and one between, all
three replaced or taken out at once, at scale 1 and in the model's own precision.

Clipping rows then bounds what adding or removing one example changes.

Not seen, and outside the guarantee if it happens (docs/clipping.md lists it for users):

- mixing on some inputs only: values beyond those tried (a threshold above a million; one class, token or pixel among many;
  whole numbers below 0, such as labels to ignore), sizes between three and the largest tried (a model that mixes batches
  of exactly 17), other lengths of the dimensions that are not the batch's;
- mixing that begins later, after a number of calls or by a switch from outside: the engine repeats the check at calls
  16, 32, 64, …, so that it is refused, but steps taken until then were not bounded;
- mixing weaker than the tolerances above;
- mixing by random draws that none of about 20 seeds gives, in the forward pass, or that none of four gives, in the backward
  pass only; every repetition has new seeds;
- files, global variables and attributes of objects other than the model in which examples are stored without being used.

Randomness: all compared passes start from one seed (of torch, ``random`` and NumPy), which is a new one from the operating
system for every check, and examples are drawn from it too; refusals name it, so that they can be repeated. A replaced
example leaves all shapes as they are, so dropout and stochastic depth draw what they drew before. Taking an example out
would shift the stream; there, models that draw at all are compared with one draw for all rows (``one_draw.py``). A
generator of the model's own is not rewound: examples then seem to change, and the model is refused. What examples draw is
taken to be secret: whoever knows the seed of dropout sees the masks of all examples move when one of them is gone.
"""

from __future__ import annotations

import copy
import random
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dp_microadam.clipping import attention, recurrent
from dp_microadam.clipping.batches import (
    alike,
    at_bounds,
    batch_size,
    in_double,
    repeated,
    scaled,
    select,
    synthetic,
    with_other_rows,
)
from dp_microadam.clipping.families import observe
from dp_microadam.clipping.integer_ranges import WatchIndices
from dp_microadam.clipping.kept_attributes import copied, differing, plain_attributes
from dp_microadam.clipping.kept_state import KeptState
from dp_microadam.clipping.one_draw import one_draw_for_all_rows
from dp_microadam.clipping.passes import parts_of
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.recording import Observed, Recording, Use
from dp_microadam.clipping.rows import LEARNING_SIZES, Relearn
from dp_microadam.clipping.rule import at_least_float32
from dp_microadam.clipping.undisturbed import Rewind, undisturbed
from dp_microadam.errors import InputError

PerExampleLoss = Callable[[nn.Module, Any], Tensor]
Gradients = tuple[Tensor | None, ...]

# As many examples as most of the proof runs on: a first, a middle and a last one.
PROVED_AT_FIRST = 3

_FEWEST_GIVEN = 4

# One example stays as it is: its loss is not saturated, and shows what the large ones do to it.
_OTHER_SCALES = ((1e3, 1.0, 30.0), (-30.0, 1.0, -1e3))
_FAR = (1e6, 1.0, -1e4)

# Seeds that models which draw random numbers are tried with, beside those of the other passes.
_SEEDS_OF_DRAWS = 16

_SEEDS = 2**31
_BETWEEN_SEEDS = 1_000_003

# The place of losses among attributes; no attribute is called so.
_LOSSES = ""

# A block may be skipped at random in training (stochastic depth): a layer counts as unused after this many passes.
_PASSES_TO_BE_SEEN = 16


def losses_of(model: nn.Module, per_example_loss: PerExampleLoss, batch: Any) -> Tensor:
    """The loss of each example, refused unless it is one value per example."""
    count = batch_size(batch)
    losses = per_example_loss(model, batch)
    if not isinstance(losses, Tensor) or losses.shape != (count,):
        what = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise InputError(
            f"per_example_loss returned {what} for a batch of {count}; it must return one value per example, shape "
            f"({count},), for instance with reduction='none' and a mean over everything but the batch"
        )
    return losses


@dataclass(frozen=True)
class Trial:
    """What synthetic examples are made from: bounds of whole numbers by leaf, and the seed of examples and random draws.

    ``magnitude`` is the largest whole number that the model calculates with.
    """

    seed: int
    bounds: Sequence[int] | None = None
    magnitude: float = 1.0

    def examples(self, batch: Any, count: int, given: Any, *, spread: bool = False) -> tuple[Any, Any]:
        """``count`` examples, and as many that differ from them."""
        if given is None:
            return synthetic(batch, count, seed=self.seed, bounds=self.bounds, spread=spread)
        if batch_size(given) < _FEWEST_GIVEN:
            raise InputError(f"synthetic_batch holds {batch_size(given)} examples; it must hold at least {_FEWEST_GIVEN}")
        return repeated(given, count)

    def again(self, step: int) -> Trial:
        """The same with another seed."""
        return replace(self, seed=(self.seed + _BETWEEN_SEEDS * step) % _SEEDS)


def new_seed() -> int:
    """A seed from the operating system's entropy."""
    return secrets.randbelow(_SEEDS)


def prove(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    observed: Observed,
    batch: Any,
    given: Any = None,
    precision: float = 0.0,
    seed: int | None = None,
) -> Trial:
    """Raise :class:`InputError` unless examples are independent and every trainable parameter is observed.

    A randomized numerical check; the head of this file says what it can miss. Runs on three synthetic examples of the
    batch's shape, or on those ``given``: 29 forward and backward passes of one to three examples, 34 if the model draws
    random numbers; four forward passes of three examples, 32 more if the model draws, and one or a few more to find out
    which whole numbers it accepts; and two of 13 and 11 examples, from which ``observed.table`` learns what has rows for
    each example; up to 30 more for layers that are skipped at random.
    ``precision`` is the relative error of the products in the model, if it is coarser than that of its parameters.
    ``seed`` repeats a check that was made with it; by default it is a new one from the operating system.
    Leaves random streams, parameters, their gradients, buffers and modes as they were.

    Returns what the synthetic examples were made from, for :func:`prove_size`.
    """
    start = Trial(new_seed() if seed is None else seed)
    simple, _ = Trial(0).examples(batch, PROVED_AT_FIRST, given)
    with undisturbed(model) as rewind, _named_seed(start.seed):
        own = _Proof(model, per_example_loss, observed, rewind, precision)
        watched = own.every_parameter_is_seen(simple)
        trial = own.accepted(start, watched if given is None else None, batch, given)
        examples, others = trial.examples(batch, PROVED_AT_FIRST, given)
        exact, cast = _in_double(own, examples)
        exact.nothing_is_remembered(*map(cast, (examples, others, trial.again(1).examples(batch, PROVED_AT_FIRST, given)[0])))
        exact.seed = trial.seed
        drew = exact.examples_do_not_mix(cast(examples), cast(others), _ONE_OR_TWO, trial.magnitude)
        exact.same_examples_do_not_mix(cast(alike(examples, 0, PROVED_AT_FIRST)), trial.magnitude)
        for step, factors in enumerate(_OTHER_SCALES, start=2):
            further = trial.again(step)
            exact.seed = further.seed
            some, _ = further.examples(batch, PROVED_AT_FIRST, given, spread=step == 2)
            scale = max(map(abs, factors)) * trial.magnitude
            exact.examples_do_not_mix(scaled(cast(some), factors), None, _ALONE, scale, required=False)
        if exact is not own:
            far = scaled(cast(examples), _FAR)
            exact.examples_do_not_mix(far, None, _SECOND_ALONE, max(_FAR) * trial.magnitude, required=False)
        if drew:
            exact.draws_do_not_mix(trial, lambda one: map(cast, one.examples(batch, PROVED_AT_FIRST, given)))
        for row in range(PROVED_AT_FIRST):
            own.rows_are_owned(simple, row)
        own.gradients_are_exact(simple)
    return trial


def prove_size(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    observed: Observed,
    batch: Any,
    given: Any = None,
    precision: float = 0.0,
    trial: Trial | None = None,
) -> None:
    """Raise :class:`InputError` unless examples are independent in batches as large as this one too.

    Three forward and backward passes of the batch's size, four if the model draws random numbers. The engine asks for
    it when a batch is larger than all before: of T batches of random sizes about ln T are. Three quarters of the
    batch are one example again and again, so that whatever has room for a part of the batch only runs out of it; the
    first and last of these are replaced or taken out, and others take their place.
    """
    trial = Trial(new_seed()) if trial is None else trial
    count = batch_size(batch)
    quarter = count // 4
    rows = torch.tensor([0, quarter, count - 1])
    with undisturbed(model) as rewind, _named_seed(trial.seed):
        proof = _Proof(model, per_example_loss, observed, rewind, precision)
        # Random examples and draws may give what is not finite; those that were always tried come last.
        for attempt in (trial, Trial(0)):
            examples, others = attempt.examples(batch, count, given)
            proof.seed = attempt.seed
            neighbours = _Neighbours(replaced=[rows], removed=[rows])
            last = attempt.seed == 0
            examples = alike(examples, quarter, count)
            if proof.examples_do_not_mix(examples, others, neighbours, attempt.magnitude, required=last) is not None:
                return


@contextmanager
def _named_seed(seed: int) -> Iterator[None]:
    """Refusals name the seed of the check, so that it can be repeated."""
    try:
        yield
    except Interaction as error:
        raise InputError(f"{error} (to repeat this check: prove(batch, seed={seed}))") from error


class Interaction(InputError):
    """Examples were seen to interact, by random examples and draws that follow from the seed of the check."""


@dataclass(frozen=True)
class _Neighbours:
    """Rows that are replaced together, and rows that are taken out together."""

    replaced: list[Tensor]
    removed: list[Tensor]


_ALL_BUT_ONE = [torch.tensor(rows) for rows in ([1, 2], [0, 2], [0, 1])]
_EACH = [torch.tensor([row]) for row in range(PROVED_AT_FIRST)]
_ONE_OR_TWO = _Neighbours(replaced=_EACH, removed=_EACH + _ALL_BUT_ONE)
_ALONE = _Neighbours(replaced=[], removed=_ALL_BUT_ONE)
_SECOND_ALONE = _Neighbours(replaced=[], removed=_ALL_BUT_ONE[1:2])


def _in_double(own: _Proof, examples: Any) -> tuple[_Proof, Callable[[Any], Any]]:
    """The same proof on a copy in double precision, and what casts batches for it.

    A model that cannot be copied, or does not run in double precision throughout, is proved as it is.
    """
    try:
        model = _without_zeros(copy.deepcopy(own.model).double())
        observed = replace(observe(model, own.observed.way), table=own.observed.table)
        twin = _Proof(model, own.loss, observed, own.rewind, precision=0.0)  # autocast leaves double alone
        with _WatchForRounding() as rounding:
            losses = twin.look(in_double(examples)).losses
    except InputError:
        raise
    except Exception:  # whatever a model does that was not made for this
        return own, lambda batch: batch
    exact = losses.dtype == torch.float64 and not rounding.seen
    return (twin, in_double) if exact else (own, lambda batch: batch)


def _without_zeros(model: nn.Module) -> nn.Module:
    """A head or a gain that starts at zero would hide what happens behind it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not bool(parameter.any()):
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


class _WatchForRounding(TorchDispatchMode):
    """Notices computations that leave double precision, such as a softmax that is always taken in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.seen and any(_is_double(leaf) for leaf in tree_leaves((args, kwargs))):
            self.seen = any(
                isinstance(leaf, Tensor) and leaf.is_floating_point() and not _is_double(leaf) for leaf in tree_leaves(result)
            )
        return result


def _is_double(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.float64


@dataclass(frozen=True)
class _Seen:
    """What one pass shows of each example: row i of everything belongs to example i."""

    losses: Tensor
    norms: dict[str, Tensor]
    projections: dict[str, Tensor]
    drew: bool
    random: bool

    def is_finite(self) -> bool:
        values = (self.losses, *self.norms.values(), *self.projections.values())
        return all(bool(torch.isfinite(value).all()) for value in values)


class _Proof:
    def __init__(
        self,
        model: nn.Module,
        per_example_loss: PerExampleLoss,
        observed: Observed,
        rewind: Rewind,
        precision: float,
    ) -> None:
        self.model = model
        self.loss = per_example_loss
        self.observed = observed
        self.rewind = rewind
        self.precision = precision
        self.seed = 0
        self._state = KeptState(model, copy_large=True)
        self._directions: dict[Any, Tensor] = {}

    @contextmanager
    def _pass(self, seed: int | None = None) -> Iterator[None]:
        """From the same random streams and state; refuses what is left behind in the model."""
        self.rewind(self.seed if seed is None else seed)
        with self._state.unchanged():
            yield

    def accepted(self, start: Trial, watched: WatchIndices | None, batch: Any, given: Any) -> Trial:
        """Examples that the model accepts, with whole numbers as large as they may be; the simplest ones if there are none."""
        candidates = [] if watched is None else watched.candidates()
        single = [[*[2] * i, bound, *[2] * (len(b) - i - 1)] for b in candidates[:1] for i, bound in enumerate(b) if bound > 2]
        for bounds in candidates:
            if self._is_accepted(trial := _within(start, bounds, watched), batch, given):
                return trial
        found = [2] * len(single[0]) if single else []
        for bounds in single if len(single) > 1 else []:
            if self._is_accepted(_within(start, bounds, watched), batch, given):
                joined = [max(pair) for pair in zip(found, bounds, strict=True)]
                if self._is_accepted(_within(start, joined, watched), batch, given):
                    found = joined
        if found and max(found) > 2:
            return _within(start, found, watched)
        return start if self._is_accepted(start, batch, given) else Trial(0)

    def _is_accepted(self, trial: Trial, batch: Any, given: Any) -> bool:
        examples, _ = trial.examples(batch, PROVED_AT_FIRST, given)
        self.seed = trial.seed
        try:
            if trial.bounds is not None:
                largest = self._losses(at_bounds(examples, trial.bounds), trial.seed).losses[0]
                if not bool(torch.isfinite(largest)):
                    return False
            return self.look(examples).is_finite()
        except Exception:  # an index out of range, most often
            return False
        finally:
            self.seed = 0

    def nothing_is_remembered(self, first: Any, other: Any, later: Any) -> None:
        """Neither the losses of a batch nor plain attributes depend on the batch that came before it."""
        try:
            one, two, control = (copied(self.model) for _ in range(3))
            after_first, after_other = self._one_after_another(one, first, later), self._one_after_another(two, other, later)
            suspects = differing(after_first, after_other)
            if suspects:  # unless it differs by itself, as a clock does
                suspects -= differing(after_first, self._one_after_another(control, first, later))
        except InputError:
            raise
        except Exception:  # a model that cannot be copied, or does not accept these examples
            return
        if suspects:
            name = min(suspects)
            what = "a loss" if name == _LOSSES else f"attribute {name!r} of the model"
            raise Interaction(
                f"{what} depends on examples of a batch that came before, so that an example reaches the gradients of steps it "
                "takes no part in; keep no features, sums or counts of examples in attributes from one batch to the next"
            )

    def _one_after_another(self, model: nn.Module, first: Any, later: Any) -> dict[str, list[Any]]:
        for batch in (first, later):
            with self._pass():
                losses = losses_of(model, self.loss, batch).detach()
        return {**plain_attributes(model), _LOSSES: [losses]}

    def examples_do_not_mix(
        self, batch: Any, others: Any, neighbours: _Neighbours, scale: float, *, required: bool = True
    ) -> bool | None:
        """Replace some examples, and take some out: the rest stay as they are.

        Returns whether random numbers were drawn, or None if the examples were not accepted, which is an error where
        they are ``required``.
        """
        count = batch_size(batch)
        before = self._first_look(batch, required)
        if before is None:
            return None
        for rows in neighbours.replaced:
            after = self.look(with_other_rows(batch, others, rows))
            kept = without(rows, count)
            self._refuse_difference(before, after, kept, kept, scale, "replacing")
        drew, drew_at_all = before.drew, before.random
        if drew:
            before = self.look(batch, one_draw=True)
        for rows in neighbours.removed:
            kept = without(rows, count)
            after = self.look(select(batch, kept), one_draw=drew)
            self._refuse_difference(before, after, kept, torch.arange(len(kept)), scale, "taking out", drew)
        return drew_at_all

    def same_examples_do_not_mix(self, batch: Any, scale: float) -> None:
        """One example three times is as it is alone: nothing has room for some of them only."""
        together = self._first_look(batch, required=False)
        if together is None:
            return
        if together.drew:
            together = self.look(batch, one_draw=True)
        alone = self.look(select(batch, torch.tensor([0])), one_draw=together.drew)
        everyone = torch.arange(batch_size(batch))
        self._refuse_difference(together, alone, everyone, torch.zeros_like(everyone), scale, "taking out", together.drew)

    def draws_do_not_mix(self, trial: Trial, examples_of: Callable[[Trial], Iterable[Any]]) -> None:
        """Whatever is drawn: losses stay as they are when another example is replaced. Without the backward pass."""
        for step in range(_SEEDS_OF_DRAWS):
            further = trial.again(step + 4)
            batch, others = examples_of(further)
            rows = torch.tensor([step % batch_size(batch)])
            kept = without(rows, batch_size(batch))
            try:
                before, after = (self._losses(one, further.seed) for one in (batch, with_other_rows(batch, others, rows)))
            except InputError:
                raise
            except Exception:  # a model that does not accept these examples
                continue
            if bool(torch.isfinite(before.losses).all()):
                self._refuse_difference(before, after, kept, kept, trial.magnitude, "replacing")

    def _losses(self, batch: Any, seed: int) -> _Seen:
        with self._pass(seed):
            losses = losses_of(self.model, self.loss, batch).detach()
        return _Seen(losses, {}, {}, drew=True, random=True)

    def _first_look(self, batch: Any, required: bool) -> _Seen | None:
        """None where the model does not accept these examples, unless it must."""
        try:
            seen = self.look(batch)
        except InputError:
            raise
        except Exception:
            if required:
                raise
            return None
        if seen.is_finite():
            return seen
        if required:
            raise InputError(
                "per_example_loss or its gradient is not finite on synthetic examples (uniform in [0, 1), whole "
                "numbers 0 or 1), so that independence cannot be proved; pass synthetic_batch= with examples the model "
                "accepts"
            )
        return None

    def look(self, batch: Any, *, one_draw: bool = False) -> _Seen:
        """One forward and backward pass."""
        projections: dict[str, Tensor] = {}

        def arrived(use: Use, gradient: Tensor) -> None:
            rows = at_least_float32(gradient).reshape(batch_size(batch), -1)
            projections[f"{use.label}, use {len(projections) + 1}"] = rows @ self._direction(rows)

        with self._pass(), one_draw_for_all_rows() if one_draw else nullcontext():
            start, other_start = random_state(self.model), other_random_state()
            losses = partial(losses_of, self.model, self.loss, batch)
            parts, values = parts_of(self.observed, losses, batch_size(batch), also=arrived)
            norms = {f"parameter {', '.join(sorted(part.names.values()))!r}": part.squared.sqrt() for part in parts}
            drew = random_state(self.model) != start
            return _Seen(values, norms, projections, drew, random=drew or other_random_state() != other_start)

    def _direction(self, rows: Tensor) -> Tensor:
        kind = rows.shape[1], rows.dtype, rows.device
        if kind not in self._directions:
            generator = torch.Generator().manual_seed(0)
            self._directions[kind] = torch.randn(rows.shape[1], generator=generator, dtype=torch.float64).to(rows)
        return self._directions[kind]

    def _refuse_difference(
        self, before: _Seen, after: _Seen, rows: Tensor, rows_after: Tensor, scale: float, what: str, drew: bool = False
    ) -> None:
        eps = torch.finfo(before.losses.dtype).eps
        of_losses = 1e-9 if before.losses.dtype == torch.float64 else 100 * eps
        of_gradients = 100 * of_losses
        if self.precision:  # losses may be wider than the products they come from
            of_losses = of_gradients = 4 * self.precision
        floor = 100 * eps * max(1.0, abs(scale))  # cancellation in losses near zero
        limit = of_losses * _largest([before.losses]) + floor
        if _differ(before.losses[rows], after.losses[rows_after], limit):
            raise Interaction(
                f"per_example_loss mixes examples: {what} one example of a batch changed the loss of others; "
                "remove batch statistics and losses between examples (use GroupNorm or LayerNorm, and a loss of "
                "each example alone, not divided by the number of examples)"
                + (", and drop out only tensors whose first dimension is the batch" if drew else "")
            )
        for part, part_after in ((before.norms, after.norms), (before.projections, after.projections)):
            limit = of_gradients * _largest(part.values()) + floor
            for name in part.keys() | part_after.keys():
                gone = name not in part or name not in part_after
                if gone or _differ(part[name][rows], part_after[name][rows_after], limit):
                    raise Interaction(
                        f"{name} mixes examples: {what} one example of a batch changed the gradient of others; "
                        "several rows of one example must be next to each other, and no operation, forward or "
                        "backward, may combine examples"
                    )

    def every_parameter_is_seen(self, batch: Any) -> WatchIndices:
        """Learns at the same time which tensors have rows for each example, and returns what whole numbers index."""
        table = self.observed.table
        table.learning = True
        try:
            while True:
                try:
                    unseen, watched = self._unseen(batch)
                    break
                except Relearn:  # each time one coincidence fewer
                    continue
        finally:
            table.learning = False
        if unseen:
            raise InputError(
                f"parameter {unseen[0]!r} is trainable, but no operation uses it; use it, or freeze it with "
                "requires_grad_(False)"
            )
        return watched

    def _unseen(self, batch: Any) -> tuple[list[str], WatchIndices]:
        unseen = list(self.observed.parameters)
        for seed in range(_PASSES_TO_BE_SEEN):
            for size in LEARNING_SIZES:
                examples = select(batch, torch.arange(size) % batch_size(batch))
                watched = WatchIndices(examples)
                with self._pass(seed), Recording(self.observed, size, _ignore) as recording, watched:
                    losses_of(self.model, self.loss, examples)
                unseen = [name for name in unseen if not recording.uses[name]]
            if not unseen:
                break
        return unseen, watched

    def rows_are_owned(self, batch: Any, row: int) -> None:
        def check(use: Use, gradient: Tensor) -> None:
            rows = gradient.unflatten(0, (-1, use.call.rows_per_example))
            others = torch.arange(len(rows), device=gradient.device) != row
            if bool((rows[others] != 0).any()):
                raise InputError(
                    f"{use.label} mixes examples: the loss of one example has a gradient in rows of others; its first "
                    "dimension must be the batch, several rows of one example must be next to each other, and no "
                    "operation after it may combine examples"
                )

        with self._pass(0), Recording(self.observed, batch_size(batch), check) as recording:
            losses = self._differentiable(losses_of(self.model, self.loss, batch))
            one = torch.zeros_like(losses)
            one[row] = 1
            recording.backward(losses, one)

    def gradients_are_exact(self, batch: Any) -> None:
        count = batch_size(batch)
        with self._pass(0):
            parts, detached = parts_of(self.observed, partial(losses_of, self.model, self.loss, batch), count)
        sums: dict[str, Tensor] = {}
        with torch.no_grad(), full_precision(detached.device):
            squared = sum((part.squared for part in parts), torch.zeros(count, device=detached.device))
            for part in parts:
                for key, total in part.call.clipped_sums(torch.ones_like(part.squared)).items():
                    sums[part.names[key]] = total
        # The same operations as under observation draw the same random numbers.
        with self._pass(0), recurrent.step_by_step(self.observed.recurrent), attention.Unfused():
            losses, alone = self._one_at_a_time(batch)
        rounding = 100 * torch.finfo(losses.dtype).eps * float(losses.detach().abs().sum())
        self._compare_sums(sums, alone, rounding)
        self._compare_norms(squared, alone, rounding)

    def _one_at_a_time(self, batch: Any) -> tuple[Tensor, list[Gradients]]:
        """The gradient of each example's loss, by autograd."""
        parameters = list(self.observed.parameters.values())
        losses = losses_of(self.model, self.loss, batch)
        alone: list[Gradients] = []
        try:
            for loss in losses:
                alone.append(torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True))
        except RuntimeError as error:
            if "use_reentrant=True" not in str(error):
                raise
            raise InputError(
                "the model checkpoints activations with use_reentrant=True, which hides its layers from the backward "
                "pass; call torch.utils.checkpoint with use_reentrant=False"
            ) from error
        return losses, alone

    def _compare_sums(self, sums: Mapping[str, Tensor], alone: Sequence[Gradients], rounding: float) -> None:
        relative = max(1e-2, 4 * self.precision)
        scale = sum(_norm(gradients) for gradients in alone)
        for index, (name, parameter) in enumerate(self.observed.parameters.items()):
            reference = torch.zeros_like(parameter, dtype=torch.float32)
            for gradients in alone:
                gradient = gradients[index]
                if gradient is not None:
                    reference = reference + gradient.float()
            error = float((sums.get(name, torch.zeros_like(reference)).float() - reference).norm())
            if not error <= relative * float(reference.norm()) + 1e-2 * relative * scale + rounding:
                raise InputError(
                    f"parameter {name!r} is used where it is not observed (through a reference kept elsewhere, in an "
                    "autograd function of your own, or in a block checkpointed with use_reentrant=True), so its "
                    "gradient would be clipped in part only; read it from its module, use it in operations of torch, "
                    "pass use_reentrant=False, or freeze it with requires_grad_(False)"
                )

    def _compare_norms(self, squared: Tensor, alone: Sequence[Gradients], rounding: float) -> None:
        relative = max(1e-2, 4 * self.precision)
        for found, gradients in zip(squared.sqrt().tolist(), alone, strict=True):
            if not abs(found - _norm(gradients)) <= relative * _norm(gradients) + rounding:
                raise InputError(
                    f"an example's gradient norm is {_norm(gradients):.6g}, but {found:.6g} was found by layers; the "
                    "model cannot be clipped exactly, use layers that dp_microadam knows, or freeze the others"
                )

    def _differentiable(self, losses: Tensor) -> Tensor:
        if not losses.requires_grad:
            raise InputError(
                "per_example_loss does not depend on any trainable parameter; check that it calls the model it is "
                "given and neither detaches nor disables gradients"
            )
        return losses


def _norm(gradients: Gradients) -> float:
    return sum(float(gradient.float().square().sum()) for gradient in gradients if gradient is not None) ** 0.5


def _ignore(use: Use, gradient: Tensor) -> None:
    """A forward pass without a backward one."""


def without(rows: Tensor, count: int) -> Tensor:
    """All rows but these."""
    everything = torch.arange(count)
    return everything[~torch.isin(everything, rows)]


def _differ(before: Tensor, after: Tensor, limit: float) -> bool:
    """Whether a value moved by more than the limit, or is no number any more."""
    same = (before == after) | ((before != before) & (after != after))
    return not bool((same | ((before - after).abs() <= limit)).all())


def _largest(values: Iterable[Tensor]) -> float:
    """The largest finite magnitude."""
    return max((float(value.abs().nan_to_num(posinf=0.0).max()) for value in values), default=0.0)


def _within(trial: Trial, bounds: Sequence[int], watched: WatchIndices | None) -> Trial:
    return replace(trial, bounds=bounds, magnitude=1.0 if watched is None else watched.magnitude(bounds))


def random_state(model: nn.Module) -> list[Any]:
    """Whether it moves tells whether a pass draws random numbers."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return [state.tolist() for state in states]


def other_random_state() -> tuple[Any, ...]:
    """The global streams of Python and NumPy."""
    state: dict[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002 - the global stream
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"]
