"""The proof, before the first step, that every row belongs to one example and that every gradient is accounted for.

Formal guarantees: after :func:`prove` has returned, on synthetic input of the batch's shape,

- replacing one example by another, or taking it or two of them out, left every other example as it was: its loss, the
  norm of its gradient in every layer, and a random projection of its output gradient in every layer. Tried with three
  examples, for each of them; and with examples multiplied by 1000, 1 and 30 or by -30, 1 and -1000, where each was the
  same alone as beside the others. So neither the place in the batch, nor its size, nor the range of its values decides.
  It runs in double precision on a copy of the model, and what may differ is at most 1e-9 of the largest loss and 1e-7
  of the largest gradient; a model that does not run in double throughout is proved as it is, to 1e-5 and 1e-3 in
  float32, and to hardly anything in half precision;
- nothing a checkpoint holds (parameters, buffers, extra state) was changed by a forward and backward pass;
- the loss of one example alone had an output gradient in its own row of every observed layer and in no other row, so
  row i of what a layer reports is the gradient of example i;
- the unclipped sum that the engine forms equals the gradient that autograd computes, for every trainable parameter,
  so no parameter is used outside the layer calls that are observed.

After :func:`prove_size` the first holds for the first, middle and last example of a batch of that very size too, all
three replaced or taken out at once, at scale 1 and in the model's own precision.

Clipping rows then bounds what adding or removing one example changes.

Not proved, and outside the guarantee if it happens:

- mixing on some inputs only: values beyond those tried (a threshold that no scale reaches; a class, token or integer
  pixel other than 0 and 1), sizes between three and the largest proved (a model that mixes batches of exactly 17),
  other lengths of the dimensions that are not the batch's;
- mixing that begins later, after a number of calls or by a switch from outside: the engine repeats the proof at calls
  16, 32, 64, …, so that it is refused, but steps taken until then were not bounded;
- mixing weaker than the tolerances above;
- mixing by random draws only, where these draws happen to mix nothing with the seed of the proof;
- plain attributes, files and global variables in which a model stores examples without using them.

Randomness: all compared passes start from one seed (of torch, ``random`` and NumPy). A replaced example leaves all
shapes as they are, so dropout and stochastic depth draw what they drew before. Taking an example out would shift the
stream; there, models that draw at all are compared with one draw for all rows (``one_draw.py``). A generator of the
model's own is not rewound: examples then seem to change, and the model is refused. What examples draw is taken to be
secret: whoever knows the seed of dropout sees the masks of all examples move when one of them is gone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dp_microadam.clipping.batches import (
    batch_size,
    in_double,
    repeated,
    scaled,
    select,
    synthetic,
    with_other_rows,
)
from dp_microadam.clipping.kept_state import KeptState
from dp_microadam.clipping.one_draw import one_draw_for_all_rows
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.recording import Recording
from dp_microadam.clipping.rule import LayerCall, LayerRule, at_least_float32
from dp_microadam.clipping.undisturbed import Rewind, undisturbed
from dp_microadam.errors import InputError

PerExampleLoss = Callable[[nn.Module, Any], Tensor]

# As many examples as most of the proof runs on: a first, a middle and a last one.
PROVED_AT_FIRST = 3

_FEWEST_GIVEN = 4

# One example stays as it is: its loss is not saturated, and shows what the large ones do to it.
_OTHER_SCALES = ((1e3, 1.0, 30.0), (-30.0, 1.0, -1e3))

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


def prove(
    model: nn.Module, per_example_loss: PerExampleLoss, rules: Mapping[str, LayerRule], batch: Any, given: Any = None
) -> None:
    """Raise :class:`InputError` unless examples are independent and every trainable parameter is observed.

    Runs on three synthetic examples of the batch's shape, or on those ``given``: 25 forward passes of one to three
    examples, 24 of them with a backward one; 28 and 27 if the model draws random numbers, and up to 15 forward passes
    more for layers that are skipped at random. Leaves random streams, parameters, their gradients, buffers and modes
    as they were.
    """
    examples, others = _examples(batch, PROVED_AT_FIRST, given)
    with undisturbed(model) as rewind:
        own = _Proof(model, per_example_loss, rules, rewind)
        own.every_parameter_is_seen(examples)
        exact, cast = _in_double(own, examples)
        exact.examples_do_not_mix(cast(examples), cast(others), _ONE_OR_TWO, 1.0)
        for factors in _OTHER_SCALES:
            exact.examples_do_not_mix(scaled(cast(examples), factors), None, _ALONE, max(map(abs, factors)))
        for row in range(PROVED_AT_FIRST):
            own.rows_are_owned(examples, row)
        own.sums_are_gradients(examples)


def prove_size(
    model: nn.Module, per_example_loss: PerExampleLoss, rules: Mapping[str, LayerRule], batch: Any, given: Any = None
) -> None:
    """Raise :class:`InputError` unless examples are independent in batches as large as this one too.

    Three forward and backward passes of the batch's size, four if the model draws random numbers. The engine asks for
    it when a batch is larger than all before: of T batches of random sizes about ln T are.
    """
    count = batch_size(batch)
    rows = torch.tensor([0, count // 2, count - 1])
    examples, others = _examples(batch, count, given)
    with undisturbed(model) as rewind:
        proof = _Proof(model, per_example_loss, rules, rewind)
        proof.examples_do_not_mix(examples, others, _Neighbours(replaced=[rows], removed=[rows]), 1.0)


def _examples(batch: Any, count: int, given: Any) -> tuple[Any, Any]:
    if given is None:
        return synthetic(batch, count)
    if batch_size(given) < _FEWEST_GIVEN:
        raise InputError(f"synthetic_batch holds {batch_size(given)} examples; it must hold at least {_FEWEST_GIVEN}")
    return repeated(given, count)


@dataclass(frozen=True)
class _Neighbours:
    """Rows that are replaced together, and rows that are taken out together."""

    replaced: list[Tensor]
    removed: list[Tensor]


_ALL_BUT_ONE = [torch.tensor(rows) for rows in ([1, 2], [0, 2], [0, 1])]
_EACH = [torch.tensor([row]) for row in range(PROVED_AT_FIRST)]
_ONE_OR_TWO = _Neighbours(replaced=_EACH, removed=_EACH + _ALL_BUT_ONE)
_ALONE = _Neighbours(replaced=[], removed=_ALL_BUT_ONE)


def _in_double(own: _Proof, examples: Any) -> tuple[_Proof, Callable[[Any], Any]]:
    """The same proof on a copy in double precision, and what casts batches for it.

    A model that cannot be copied, or does not run in double precision throughout, is proved as it is.
    """
    try:
        model = copy.deepcopy(own.model).double()
        rules = {
            name: type(rule)(name, model.get_submodule(name), rule.trainable, rule.forced_way)
            for name, rule in own.rules.items()
        }
        twin = _Proof(model, own.loss, rules, own.rewind)
        with _WatchForRounding() as rounding:
            losses = twin.look(in_double(examples)).losses
    except InputError:
        raise
    except Exception:  # whatever a model does that was not made for this
        return own, lambda batch: batch
    exact = losses.dtype == torch.float64 and not rounding.seen
    return (twin, in_double) if exact else (own, lambda batch: batch)


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
                isinstance(leaf, Tensor) and leaf.is_floating_point() and not _is_double(leaf)
                for leaf in tree_leaves(result)
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

    def is_finite(self) -> bool:
        values = (self.losses, *self.norms.values(), *self.projections.values())
        return all(bool(torch.isfinite(value).all()) for value in values)


class _Proof:
    def __init__(
        self,
        model: nn.Module,
        per_example_loss: PerExampleLoss,
        rules: Mapping[str, LayerRule],
        rewind: Rewind,
    ) -> None:
        self.model = model
        self.loss = per_example_loss
        self.rules = rules
        self.rewind = rewind
        self._state = KeptState(model, copy_large=True)

    @contextmanager
    def _pass(self, seed: int = 0) -> Iterator[None]:
        """From the same random streams and state; refuses what is left behind in the model."""
        self.rewind(seed)
        with self._state.unchanged():
            yield

    def examples_do_not_mix(self, batch: Any, others: Any, neighbours: _Neighbours, scale: float) -> None:
        """Replace some examples, and take some out: the rest stay as they are."""
        count = batch_size(batch)
        before = self._first_look(batch, scale)
        if before is None:
            return
        for rows in neighbours.replaced:
            after = self.look(with_other_rows(batch, others, rows))
            kept = _without(rows, count)
            self._refuse_difference(before, after, kept, kept, scale, "replacing")
        drew = before.drew
        if drew:
            before = self.look(batch, one_draw=True)
        for rows in neighbours.removed:
            kept = _without(rows, count)
            after = self.look(select(batch, kept), one_draw=drew)
            self._refuse_difference(before, after, kept, torch.arange(len(kept)), scale, "taking out")

    def _first_look(self, batch: Any, scale: float) -> _Seen | None:
        """None where the model does not accept this scale."""
        try:
            seen = self.look(batch)
        except InputError:
            raise
        except Exception:
            if scale == 1:
                raise
            return None
        if seen.is_finite():
            return seen
        if scale == 1:
            raise InputError(
                "per_example_loss or its gradient is not finite on synthetic examples (uniform in [0, 1), whole "
                "numbers 0 or 1), so that independence cannot be proved; pass synthetic_batch= with examples the model "
                "accepts"
            )
        return None

    def look(self, batch: Any, *, one_draw: bool = False) -> _Seen:
        """One forward and backward pass."""
        norms: dict[str, Tensor] = {}
        projections: dict[str, Tensor] = {}

        def arrived(rule: LayerRule, call: LayerCall, gradient: Tensor) -> None:
            with torch.no_grad(), full_precision(gradient.device):
                norms[rule.name] = call.squared_norms(gradient).sqrt()
                rows = at_least_float32(gradient).reshape(len(gradient), -1)
                projections[rule.name] = rows @ _direction(rows)

        with self._pass(), one_draw_for_all_rows() if one_draw else nullcontext():
            start = _random_state(self.model)
            with Recording(self.rules, batch_size(batch), arrived) as recording:
                losses = losses_of(self.model, self.loss, batch)
                if losses.requires_grad:  # every trainable layer may have been skipped at random
                    recording.backward(losses, torch.ones_like(losses))
            return _Seen(losses.detach(), norms, projections, drew=_random_state(self.model) != start)

    def _refuse_difference(
        self, before: _Seen, after: _Seen, rows: Tensor, rows_after: Tensor, scale: float, what: str
    ) -> None:
        eps = torch.finfo(before.losses.dtype).eps
        tolerance = 1e-9 if before.losses.dtype == torch.float64 else 100 * eps
        floor = 100 * eps * max(1.0, abs(scale))  # cancellation in losses near zero
        limit = tolerance * float(before.losses.abs().max()) + floor
        if _differ(before.losses[rows], after.losses[rows_after], limit):
            raise InputError(
                f"per_example_loss mixes examples: {what} one example of a batch changed the loss of others; "
                "remove batch statistics and losses between examples (use GroupNorm or LayerNorm, and a loss of "
                "each example alone, not divided by the number of examples)"
            )
        for part, part_after in ((before.norms, after.norms), (before.projections, after.projections)):
            limit = 100 * tolerance * max((float(value.abs().max()) for value in part.values()), default=0.0) + floor
            for name in part.keys() | part_after.keys():
                gone = name not in part or name not in part_after
                if gone or _differ(part[name][rows], part_after[name][rows_after], limit):
                    raise InputError(
                        f"layer {name!r} mixes examples: {what} one example of a batch changed the gradient of others; "
                        "no operation, forward or backward, may combine examples"
                    )

    def every_parameter_is_seen(self, batch: Any) -> None:
        seen: set[str] = set()
        for seed in range(_PASSES_TO_BE_SEEN):
            with self._pass(seed), Recording(self.rules, batch_size(batch), _ignore) as recording:
                losses_of(self.model, self.loss, batch)
            seen |= recording.seen
            if len(seen) == len(self.rules):
                return
        name = next(name for name in self.rules if name not in seen)
        rule = self.rules[name]
        parameter = f"{name}.{rule.trainable[0]}" if name else rule.trainable[0]
        raise InputError(
            f"parameter {parameter!r} is trainable, but its module was never called; call the module itself (not "
            "its weight through a function), or freeze it with requires_grad_(False)"
        )

    def rows_are_owned(self, batch: Any, row: int) -> None:
        def check(rule: LayerRule, call: LayerCall, gradient: Tensor) -> None:
            others = torch.arange(len(gradient), device=gradient.device) != row
            if bool((gradient[others] != 0).any()):
                raise InputError(
                    f"layer {rule.name!r} ({type(rule.module).__name__}) mixes examples: the loss of one example has a "
                    "gradient in rows of others; its first dimension must be the batch, and no operation after it may "
                    "combine examples"
                )

        with self._pass(), Recording(self.rules, batch_size(batch), check) as recording:
            losses = self._differentiable(losses_of(self.model, self.loss, batch))
            one = torch.zeros_like(losses)
            one[row] = 1
            recording.backward(losses, one)

    def sums_are_gradients(self, batch: Any) -> None:
        sums: dict[str, Tensor] = {}

        def unclipped(rule: LayerRule, call: LayerCall, gradient: Tensor) -> None:
            with torch.no_grad(), full_precision(gradient.device):
                ones = torch.ones_like(call.squared_norms(gradient))
                for key, total in call.clipped_sums(ones).items():
                    sums[f"{rule.name}.{key}" if rule.name else key] = total

        with self._pass(), Recording(self.rules, batch_size(batch), unclipped) as recording:
            losses = self._differentiable(losses_of(self.model, self.loss, batch))
            recording.backward(losses, torch.ones_like(losses))
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        with self._pass():
            total_loss = losses_of(self.model, self.loss, batch).sum()
            gradients = torch.autograd.grad(total_loss, list(trainable.values()), allow_unused=True)
        expected = dict(zip(trainable, gradients, strict=True))
        scale = sum(float(g.float().square().sum()) for g in gradients if g is not None) ** 0.5
        rounding = 100 * torch.finfo(losses.dtype).eps * float(losses.detach().abs().sum())
        for name, parameter in trainable.items():
            reference = expected[name]
            reference = torch.zeros_like(parameter) if reference is None else reference
            found = sums.get(name, torch.zeros_like(parameter))
            error = float((found.to(reference.dtype) - reference).float().norm())
            if not error <= 1e-2 * float(reference.float().norm()) + 1e-4 * scale + rounding:
                raise InputError(
                    f"parameter {name!r} is used outside the call of its own layer (tied to another layer, or "
                    "passed to a function), so its gradient would be clipped in part only; give each use a layer of "
                    "its own, or freeze it with requires_grad_(False)"
                )

    def _differentiable(self, losses: Tensor) -> Tensor:
        if not losses.requires_grad:
            raise InputError(
                "per_example_loss does not depend on any trainable parameter; check that it calls the model it is "
                "given and neither detaches nor disables gradients"
            )
        return losses


def _ignore(rule: LayerRule, call: LayerCall, gradient: Tensor) -> None:
    """A forward pass without a backward one."""


def _without(rows: Tensor, count: int) -> Tensor:
    everything = torch.arange(count)
    return everything[~torch.isin(everything, rows)]


def _differ(before: Tensor, after: Tensor, limit: float) -> bool:
    """Whether a value moved by more than the limit, or is no number any more."""
    return not bool(((before - after).abs() <= limit).all())


def _direction(rows: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows.shape[1], generator=generator, dtype=torch.float64).to(rows)


def _random_state(model: nn.Module) -> list[Any]:
    """Whether it moves tells whether a pass draws random numbers."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return [state.tolist() for state in states]
