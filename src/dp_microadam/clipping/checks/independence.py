"""The independence check before the first step: what an example gives must not depend on the examples beside it.

This is a randomized numerical check, not a mathematical proof. It runs the model on synthetic input of the batch's shape.

Formal guarantees: after :meth:`IndependenceCheck.check` has returned, on this input,

- two examples gave beside a third what they gave alone: the same loss, the same norm of the gradient in every layer, and the
  same random projection of the output gradient at every use of a parameter. So did, for the loss alone, an example

  - beside just one other;
  - beside one that is a thousand times, and one that is a million times as large;
  - beside its copy, near copies, these with another target, and itself with any one leaf of another example;
  - with numbers that are NaN in one of its leaves, beside others (on the CPU only, where code may raise on them).

  These passes run in double precision on a copy of the model, which autocast leaves alone. In the copy, parameters that are
  all zero (a new head, a gain) are small random numbers instead. Differences of up to 1e-9 of the largest loss and 1e-7 of
  the largest gradient are allowed. A model that does not run in double precision throughout is checked as it is: to 1e-5
  and 1e-3 in float32, and to four roundings of the products under autocast (3e-2 in bfloat16). If it has parameters in half
  precision, frozen ones too, its copy is in float32. A warning says so if there was no copy for another reason;
- for models that draw random numbers, with 6 further seeds the losses of others did not change when three of six
  examples were replaced;
- no parameter, buffer or extra state was changed by a pass, and neither the loss of a batch nor any plain attribute of a
  module depended on the batch that had passed before it;
- no pass set the seed of torch's generators, and none set that of Python's or NumPy's to the same value every time;
- gradient norms, sums and clipped sums were those of autograd, example by example (``autograd.py``).

After :meth:`IndependenceCheck.check_at_size` the losses of others did not change either when the first example, the last
and up to four between were replaced in a batch of exactly that size, three quarters of which were copies of one example.

Then clipping the rows of each example bounds the change that adding or removing one example makes.

What the check can miss is outside the guarantee; docs/clipping.md lists it. It tries no values beyond a million times the
usual, no sizes between three and the largest, no later calls, and the backward pass on three examples between 0 and 1 only.

Randomness: all compared passes start from one seed (of torch, ``random`` and NumPy). Every check takes a new one from the
operating system and also draws its examples from it; a refusal names the seed, so that the check can be repeated. Alone and
in company, examples have the same random numbers (``randomness.EqualDraws``). A random generator that the model owns is not
reset: examples then seem to change, and the model is refused. The random numbers that are drawn for examples are assumed to be
secret: someone who knows the seed of dropout sees the masks of all other examples change when one example is removed.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dp_microadam.clipping.batches import PerExampleLoss, batch_size, in_precision, losses_of, replace_rows, select
from dp_microadam.clipping.checks.examples import CHECK_SIZE, SyntheticExamples, company, copies_replaced, half_replaced
from dp_microadam.clipping.checks.randomness import SeedAll, SeededPasses, no_side_effects
from dp_microadam.clipping.checks.state import (
    StateSnapshot,
    copy_of,
    pickled_attributes,
    put_back_attributes,
    values_unchanged,
)
from dp_microadam.clipping.passes import gradient_shares, recompute_uncertain
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.recording import LEARNING_SIZES, Observed, Recording, RestartLearning, Use
from dp_microadam.clipping.rules.families import observe
from dp_microadam.clipping.rules.rule import at_least_float32
from dp_microadam.errors import InputError, PrivacyWarning

# Models that draw random numbers are tried with this many further seeds.
_SEEDS_OF_DRAWS = 6

# A block may be skipped at random in training (stochastic depth): a parameter counts as unused after this many passes.
_PASSES_UNTIL_UNUSED = 16

LOSSES = "losses"

Shown = dict[str, Tensor]
"""What a pass shows of each example: row i of every tensor belongs to example i. Of a model these are the losses, and on
request the norm of each example's gradient by layer and a random projection of its output gradient by use of a parameter."""


class InteractionError(InputError):
    """Examples were seen to interact, on random examples and draws that follow from the seed of the check."""


class Probe(ABC):
    """Something that batches pass through, of which the check compares what it shows of single examples.

    Attributes:
        passes: all of them start from one seed.
        seed: that seed; may be set between passes.
        removes: whether batches of different sizes can be compared.
    """

    seed = 0
    removes = True

    def __init__(self, model: nn.Module, seed_all: SeedAll, what: str) -> None:
        self.passes = SeededPasses(model, seed_all, what)

    @abstractmethod
    def run(self, batch: Any, *, equal_draws: bool = False, thorough: bool = False) -> Shown:
        """What a pass shows; with ``thorough`` all that can be shown."""

    @abstractmethod
    def compare(self, before: Shown, after: Shown, place: Any, at: Any = 0) -> None:
        """Raise :class:`InputError` unless rows ``place`` of ``after`` are rows ``at`` of ``before``, up to rounding."""

    def tried(self, batch: Any, **options: bool) -> Shown | None:
        """What a pass shows; None if it raises an exception on these examples, such as that of an index out of range."""
        try:
            return self.run(batch, **options)
        except InputError:
            raise
        except Exception as error:
            if is_out_of_memory(error):  # which says nothing about the model, and must not weaken the check unnoticed
                raise
            return None

    def accepts(self, batch: Any) -> bool:
        """Whether everything that is shown of these examples is finite."""
        return is_finite(self.tried(batch))

    def check_company(self, source: SyntheticExamples, cast: Callable[[Any], Any] = lambda batch: batch) -> None:
        """Examples give in company what they give alone; or, unless the probe ``removes``, beside any others."""
        shown_alone: dict[int, tuple[Any, Shown | None]] = {}
        for number, tries in enumerate(company(source, cast)):
            for one in tries:
                options = {"equal_draws": self.passes.draws, "thorough": number == 0}
                together = self.tried(one.batch, **options)
                if together is None or not (one is tries[-1] or is_finite(together)):
                    continue
                for place, example in zip(one.places, one.alone, strict=True):
                    if not self.removes:
                        count = batch_size(one.batch)
                        others, rest = source.reseeded(1).draw(count)[0], [row for row in range(count) if row != place]
                        other = self.tried(replace_rows(one.batch, cast(others), torch.tensor(rest)))
                        before = self.tried(one.batch)
                        if before is not None and other is not None:
                            self.compare(before, other, place, place)
                        continue
                    if id(example) not in shown_alone:
                        shown_alone[id(example)] = example, self.tried(example, **options)
                    before = shown_alone[id(example)][1]
                    if before is not None:
                        self.compare(before, together, place)
                    elif number < 2:
                        raise InteractionError(
                            "per_example_loss mixes examples: it accepts several, but raises an exception for one alone; "
                            "remove batch statistics and losses between examples (use GroupNorm or LayerNorm)"
                        )
                break

    def check_replacements(self, source: SyntheticExamples, seeds: range) -> None:
        """With further seeds, replacing half of the examples changes nothing of the others."""
        for step in seeds:
            further = source.reseeded(step)
            self.seed = further.seed
            batch, changed, kept = half_replaced(further)
            before, after = self.tried(batch), self.tried(changed)
            if before is not None and after is not None:
                self.compare(before, after, kept, kept)
        self.seed = source.seed


class CheckedModel(Probe):
    """A model and its loss, which must not change while examples pass through it.

    Attributes:
        precision: relative error of the products in the model, if it is coarser than that of its parameters.
        finely: batches of one size hardly differ by rounding, and can be compared to a few roundings.
    """

    finely = False

    def __init__(
        self, model: nn.Module, per_example_loss: PerExampleLoss, observed: Observed, seed_all: SeedAll, precision: float
    ) -> None:
        super().__init__(model, seed_all, "the model or per_example_loss")
        self.model = model
        self.loss = per_example_loss
        self.observed = observed
        self.seed_all = seed_all
        self.precision = precision
        self._state = StateSnapshot(model)
        self._directions: dict[Any, Tensor] = {}

    @contextmanager
    def one_pass(self, seed: int | None = None, *, equal_draws: bool = False) -> Iterator[None]:
        """Seeds all random streams; raises :class:`InputError` if the pass changes the model's state or sets a seed."""
        with self._state.unchanged(), self.passes.one(self.seed if seed is None else seed, equal_draws=equal_draws):
            yield

    def run(self, batch: Any, *, equal_draws: bool = False, thorough: bool = False) -> Shown:
        with self.one_pass(equal_draws=equal_draws):
            if not thorough:
                return {LOSSES: losses_of(self.model, self.loss, batch).detach().cpu()}
            projections: Shown = {}

            def project(use: Use, gradient: Tensor) -> None:
                rows = at_least_float32(gradient).reshape(batch_size(batch), -1)
                projections[f"{use.label}, use {len(projections) + 1}"] = rows @ self._direction(rows)

            losses = partial(losses_of, self.model, self.loss, batch)
            shares, values = gradient_shares(self.observed, losses, batch_size(batch), on_output_gradient=project)
            if shares:
                with torch.no_grad(), full_precision(values.device):
                    recompute_uncertain(shares, torch.tensor(False))
        norms = {f"parameter {', '.join(sorted(share.names.values()))!r}": share.squared.sqrt() for share in shares}
        shown = {LOSSES: values, **norms, **projections}
        read = torch.stack([value.double() for value in shown.values()]).cpu()  # together, as the host waits for a GPU
        shown = {name: row.to(value.dtype) for (name, value), row in zip(shown.items(), read, strict=True)}
        if not is_finite(shown):
            raise InputError(
                "per_example_loss or its gradient is not finite on synthetic examples (floating-point numbers uniform in "
                "[0, 1), integers 0 or 1), so that independence cannot be checked; pass synthetic_batch= with examples that "
                "the model accepts"
            )
        return shown

    def compare(self, before: Shown, after: Shown, place: Any, at: Any = 0) -> None:
        eps = torch.finfo(before[LOSSES].dtype).eps
        of_losses = 4 * self.precision or (1e-9 if eps < 1e-10 else 100 * eps)
        of_losses = 10 * eps if self.finely else of_losses
        of_gradients = 4 * self.precision or 100 * of_losses
        largest = max((_largest(value) for name, value in before.items() if name != LOSSES), default=0.0)
        for name in before.keys() & after.keys() if after.keys() == {LOSSES} else before.keys() | after.keys():
            limit = of_losses * _largest(before[LOSSES]) if name == LOSSES else of_gradients * largest
            gone = name not in before or name not in after
            if not gone and not _differ(before[name][at], after[name][place], limit + (10 if self.finely else 100) * eps):
                continue
            if name == LOSSES:
                raise InteractionError(
                    "per_example_loss mixes examples: other examples of a batch changed the loss of one; remove batch "
                    "statistics and losses between examples (use GroupNorm or LayerNorm, fill in missing numbers from "
                    "constants, and compute each example's loss from that example alone, not divided by the number of examples)"
                )
            raise InteractionError(
                f"{name} mixes examples: other examples of a batch changed the gradient of one; several rows of one example "
                "must be next to each other, and no operation, forward or backward, may combine examples"
            )

    def _direction(self, rows: Tensor) -> Tensor:
        kind = rows.shape[1], rows.dtype, rows.device
        if kind not in self._directions:
            generator = torch.Generator().manual_seed(0)
            self._directions[kind] = torch.randn(rows.shape[1], generator=generator, dtype=torch.float64).to(rows)
        return self._directions[kind]


_MADE_UP = (
    "This is the check before the first step, on made-up examples: floating-point numbers in [0, 1), integers 0 or 1. If the "
    "model does not accept such, pass some that it accepts as PrivacySettings(synthetic_batch=...)."
)


class IndependenceCheck:
    """The randomized numerical check of one model; the docstring of this module says what it can miss.

    It leaves random streams, parameters, their gradients, buffers, attributes and modes as they were. Most passes are of one
    to six examples. Two forward passes of 7 and 5 examples, and up to 30 more for layers that are skipped at random, teach
    ``observed.table`` which tensors have rows for each example.

    Args:
        model: is copied for most passes.
        per_example_loss: as in :class:`~dp_microadam.clipping.engine.ClippedGradients`.
        observed: the layers and parameters of the model that are clipped.
        source: how to draw examples; its seed is that of the check. After ``check`` it draws integers as large as the model
            accepts.
        precision: the relative error of the products in the model, if it is coarser than that of its parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        per_example_loss: PerExampleLoss,
        observed: Observed,
        source: SyntheticExamples,
        precision: float = 0.0,
    ) -> None:
        self.observed = observed
        self.source = source
        self._model, self._loss, self._precision = model, per_example_loss, precision

    def check(self) -> None:
        """Raise :class:`InputError` unless examples are independent and every trainable parameter is observed."""
        simple, _ = self.source.simple().draw(CHECK_SIZE)
        with self._unobtrusive() as own, values_unchanged(self._model):
            _check_every_parameter_is_used(own, simple)
            _check_nothing_is_kept(own, self.source)
            self.source = self.source.with_large_integers(own.accepts)
            own.seed = self.source.seed
            if not own.accepts(self.source.draw(CHECK_SIZE)[0]):  # losses of random examples need not be finite
                self.source = self.source.simple()
                own.seed = self.source.seed
            exact, cast = _precise_copy(own, simple)
            exact.check_company(self.source, cast)
            if exact.passes.draws:
                own.check_replacements(self.source, range(1, 1 + _SEEDS_OF_DRAWS))

    def check_at_size(self, count: int) -> None:
        """Raise :class:`InputError` unless examples are also independent in batches of ``count``, after ``check``.

        It takes two forward passes of the batch's size. The engine makes it when a batch is larger than all before: of T
        batches of random sizes about ln T are.
        """
        with self._unobtrusive() as own:
            # Losses of random examples may not be finite; those of seed 0 come last.
            for source in (self.source, self.source.simple()):
                own.seed = source.seed
                batch, changed, kept = copies_replaced(source, count)
                before = own.tried(batch)
                if before is None or not is_finite(before):
                    continue
                after = own.tried(changed)
                try:
                    own.finely = True
                    if after is not None:
                        own.compare(before, after, kept, kept)
                except InteractionError:  # or rounding, of which double precision has less
                    exact, cast = _precise_copy(own, batch)
                    exact.compare(exact.run(cast(batch)), exact.run(cast(changed)), kept, kept)
                return

    @contextmanager
    def _unobtrusive(self) -> Iterator[CheckedModel]:
        """Passes within the block leave no trace in the model: realised sizes of batches are private."""
        device = next(self._model.parameters()).device
        try:
            with put_back_attributes(self._model), full_precision(device), no_side_effects(self._model) as seed_all:
                yield CheckedModel(self._model, self._loss, self.observed, seed_all, self._precision)
        except InteractionError as error:
            raise InputError(f"{error} (to repeat this check: check_independence(batch, seed={self.source.seed}))") from error
        except InputError:
            raise
        except Exception as error:
            error.add_note(_MADE_UP)
            raise


def _check_every_parameter_is_used(own: CheckedModel, simple: Any) -> None:
    """Raise :class:`InputError` if a trainable parameter is not used; the passes also fill ``observed.table``."""
    table = own.observed.table
    table.learning = True
    try:
        while True:
            try:
                unused = _unused_parameters(own, simple)
                break
            except RestartLearning:  # each time one coincidence fewer
                continue
    finally:
        table.learning = False
    if unused:
        raise InputError(
            f"parameter {unused[0]!r} is trainable, but no operation uses it; use it, or freeze it with requires_grad_(False)"
        )


def _unused_parameters(own: CheckedModel, simple: Any) -> list[str]:
    unused = list(own.observed.parameters)
    for seed in range(_PASSES_UNTIL_UNUSED):
        for size in LEARNING_SIZES:
            examples = select(simple, torch.arange(size) % batch_size(simple))
            with own.one_pass(seed), Recording(own.observed, size, lambda use, gradient: None) as recording:
                losses_of(own.model, own.loss, examples)
            unused = [name for name in unused if not recording.uses[name]]
        if not unused:
            break
    return unused


def _check_nothing_is_kept(own: CheckedModel, source: SyntheticExamples) -> None:
    """Neither the losses of a batch nor plain attributes of modules may depend on the batch that came before it."""
    first, other = source.draw(CHECK_SIZE)
    later, _ = source.reseeded(1).draw(CHECK_SIZE - 1)

    def left(before: Any) -> dict[str, Any]:
        """Attributes, and the losses of the later batch, in a copy of the model after these examples."""
        model = copy_of(own.model, share_state=True)
        for batch in (before, later):
            with own.one_pass():
                losses = losses_of(model, own.loss, batch)
        return {**pickled_attributes(model), LOSSES: losses.tolist()}

    try:
        kept = left(first)
        suspects = _differing(kept, left(other))
        if suspects:  # unless it differs by itself, as a clock does
            suspects -= _differing(kept, left(first))
    except InputError:
        raise
    except Exception as error:  # a model that cannot be copied, or does not accept these examples
        if is_out_of_memory(error):
            raise
        return
    if suspects:
        name = min(suspects)
        what = "a loss" if name == LOSSES else f"attribute {name!r} of the model"
        raise InteractionError(
            f"{what} depends on examples of an earlier batch, so that an example influences the gradients of steps it is not "
            "part of; do not keep features, sums or counts of examples in attributes from one batch to the next"
        )


def _differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def _precise_copy(own: CheckedModel, examples: Any) -> tuple[CheckedModel, Callable[[Any], Any]]:
    """A copy of the model in double precision, and the function that casts batches for it.

    A model that does not run in double precision throughout is returned as it is; if it has weights in half precision, a copy
    in float32 is returned, unless autocast would round there too. If a copy fails for another reason, as for want of memory,
    a :class:`PrivacyWarning` says that the check is weaker.
    """
    halves = any(p.is_floating_point() and p.element_size() < 4 for p in own.model.parameters()) and not own.precision
    for dtype in (torch.float64, torch.float32) if halves else (torch.float64,):
        cast = partial(in_precision, dtype=dtype)
        try:
            model = _without_zeros(copy_of(own.model).to(dtype))
            observed = replace(observe(model, own.observed.strategy), table=own.observed.table)
            twin = CheckedModel(model, own.loss, observed, own.seed_all, precision=0.0)  # autocast leaves double alone
            with _RoundingDetector(dtype) as rounding:
                losses = twin.run(cast(examples))[LOSSES]
        except InputError:
            raise
        except Exception as error:
            words = ("double", "float64", "dtype", "datatype", "scalar type")
            if not is_out_of_memory(error) and any(word in str(error).lower() for word in words):
                continue  # an operation does not take double precision, or not together with another type
            warnings.warn(_weakened(error), PrivacyWarning, stacklevel=2)
            break
        if losses.dtype == dtype and not rounding.seen:
            twin.seed = own.seed
            twin.passes.draws |= own.passes.draws
            return twin, cast
    own.finely = False
    return own, lambda batch: batch


def _weakened(error: Exception) -> str:
    what = "there is not enough memory" if is_out_of_memory(error) else f"that raises {type(error).__name__}"
    return (
        "the independence check could not run on a copy of the model in double precision, because "
        f"{what}, so that it only finds mixing stronger than the rounding of the model's own precision (1e-5 of the losses and "
        "1e-3 of the gradients in float32); check the same model on a machine with more memory, or make it one that can be "
        "copied and called in double precision"
    )


def _without_zeros(model: nn.Module) -> nn.Module:
    """A head or a gain that starts at zero would hide what happens in the layers before it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


class _RoundingDetector(TorchFunctionMode):
    """Notices operations that leave a precision for a coarser one, such as a softmax that is always taken in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.seen = False
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and result.element_size() < self._dtype.itemsize:
            given = tree_leaves((args, kwargs))
            self.seen |= any(isinstance(leaf, Tensor) and leaf.dtype == self._dtype for leaf in given)
        return result


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the host, where torch raises a plain :class:`RuntimeError`."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def is_finite(shown: Shown | None) -> bool:
    return shown is not None and all(bool(torch.isfinite(value).all()) for value in shown.values())


def _differ(before: Tensor, after: Tensor, limit: float) -> bool:
    """Whether a value changed by more than the limit, or became NaN."""
    same = (before == after) | ((before != before) & (after != after))
    return not bool((same | ((before - after).abs() <= limit)).all())


def _largest(values: Tensor) -> float:
    """The largest finite magnitude."""
    return float(values.abs().nan_to_num(posinf=0.0).max()) if values.numel() else 0.0
