"""The proof, before the first step, that every row belongs to one example and that every gradient is accounted for.

Formal guarantees: after :func:`prove` has returned, on synthetic input of the batch's shape,

- changing one example left every other example's loss as it was, so no layer, loss or statistic mixes examples, and no
  buffer stores what it saw;
- the loss of one example alone had an output gradient in its own rows of every observed use of a parameter and in no
  other row, so these rows are the gradient of that example;
- each example's gradient norm and the unclipped sum that the engine forms equal those of autograd, for every trainable
  parameter, so no parameter is used where it is not observed.

Clipping rows then bounds what adding or removing one example changes. A model that decides by its input's values to mix
examples on some inputs only is outside this proof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.clipping import attention, recurrent
from dp_microadam.clipping.batches import batch_size, rows_of, synthetic, with_another_example
from dp_microadam.clipping.passes import parts_of
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.recording import Observed, Recording, Use
from dp_microadam.clipping.rows import LEARNING_SIZES, Relearn
from dp_microadam.clipping.undisturbed import Rewind, undisturbed
from dp_microadam.errors import InputError

PerExampleLoss = Callable[[nn.Module, Any], Tensor]
Gradients = tuple[Tensor | None, ...]

_FEWEST = 4

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
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    observed: Observed,
    batch: Any,
    given: Any = None,
    precision: float = 0.0,
) -> None:
    """Raise :class:`InputError` unless examples are independent and every trainable parameter is observed.

    Runs on synthetic examples of the batch's shape, or on those ``given``; leaves random streams and buffers as they
    were. Fills ``observed.table``. ``precision`` is the relative error of the products in the model, if it is
    coarser than that of its parameters.
    """
    examples = synthetic(batch, max(_FEWEST, batch_size(batch)), seed=0) if given is None else given
    count = batch_size(examples)
    if count < _FEWEST:
        raise InputError(f"synthetic_batch holds {count} examples; it must hold at least {_FEWEST}")
    proof = _Proof(model, per_example_loss, observed, precision)
    row = (count // 2 - 1) | 1  # odd, so that it differs from the row before it, and with neighbours on both sides
    with undisturbed(model) as rewind:
        proof.examples_do_not_mix(examples, row, rewind)
        proof.every_parameter_is_seen(examples, rewind)
        proof.rows_are_owned(examples, row, rewind)
        # A different batch size: what has one row per example by coincidence in one run has not in the other.
        proof.gradients_are_exact(rows_of(examples, _FEWEST - 1), rewind)


class _Proof:
    def __init__(self, model: nn.Module, per_example_loss: PerExampleLoss, observed: Observed, precision: float) -> None:
        self._model = model
        self._loss = per_example_loss
        self._observed = observed
        self._precision = precision

    def examples_do_not_mix(self, batch: Any, row: int, rewind: Rewind) -> None:
        """Change one example: the other losses stay, and so does every buffer."""
        results = []
        for version in (batch, with_another_example(batch, row)):
            rewind(0)
            with torch.no_grad():
                losses = losses_of(self._model, self._loss, version)
            if not bool(torch.isfinite(losses).all()):
                raise InputError(
                    "per_example_loss is not finite on synthetic examples (uniform in [0, 1), whole numbers 0 or "
                    "1), so that independence cannot be proved; pass synthetic_batch= with examples the model accepts"
                )
            results.append((losses, {name: buffer.clone() for name, buffer in self._model.named_buffers()}))
        (before, buffers), (after, other_buffers) = results
        others = torch.arange(len(before), device=before.device) != row
        tolerance = 1e-5 * float(before.abs().max())
        if bool(((before - after)[others].abs() > tolerance).any()):
            raise InputError(
                "per_example_loss mixes examples: changing one example of a batch changed the loss of others; "
                "remove batch statistics and losses between examples (use GroupNorm or LayerNorm, and a loss of "
                "each example alone)"
            )
        for name, buffer in buffers.items():
            if not torch.equal(buffer, other_buffers[name]):
                raise InputError(
                    f"buffer {name!r} stores what the examples of a batch contain, without noise; use a layer that "
                    "keeps no statistics, or call its eval()"
                )

    def every_parameter_is_seen(self, batch: Any, rewind: Rewind) -> None:
        """Learns at the same time which tensors have rows for each example."""
        table = self._observed.table
        table.learning = True
        try:
            while True:
                try:
                    unseen = self._unseen(batch, rewind)
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

    def _unseen(self, batch: Any, rewind: Rewind) -> list[str]:
        unseen = list(self._observed.parameters)
        for seed in range(_PASSES_TO_BE_SEEN):
            for size in LEARNING_SIZES:
                rewind(seed)
                with Recording(self._observed, size, _ignore) as recording:
                    losses_of(self._model, self._loss, rows_of(batch, size))
                unseen = [name for name in unseen if not recording.uses[name]]
            if not unseen:
                break
        return unseen

    def rows_are_owned(self, batch: Any, row: int, rewind: Rewind) -> None:
        def check(use: Use, gradient: Tensor) -> None:
            rows = gradient.unflatten(0, (-1, use.call.rows_per_example))
            others = torch.arange(len(rows), device=gradient.device) != row
            if bool((rows[others] != 0).any()):
                raise InputError(
                    f"{use.label} mixes examples: the loss of one example has a gradient in rows of others; its first "
                    "dimension must be the batch, several rows of one example must be next to each other, and no "
                    "operation after it may combine examples"
                )

        rewind(0)
        with Recording(self._observed, batch_size(batch), check) as recording:
            losses = self._differentiable(losses_of(self._model, self._loss, batch))
            one = torch.zeros_like(losses)
            one[row] = 1
            recording.backward(losses, one)

    def gradients_are_exact(self, batch: Any, rewind: Rewind) -> None:
        count = batch_size(batch)
        rewind(0)
        parts, detached = parts_of(self._observed, lambda: losses_of(self._model, self._loss, batch), count)
        sums: dict[str, Tensor] = {}
        with torch.no_grad(), full_precision(detached.device):
            squared = sum((part.squared for part in parts), torch.zeros(count, device=detached.device))
            for part in parts:
                for key, total in part.call.clipped_sums(torch.ones_like(part.squared)).items():
                    sums[part.names[key]] = total
        rewind(0)
        # The same operations as under observation draw the same random numbers.
        with recurrent.step_by_step(self._observed.recurrent), attention.Unfused():
            losses = losses_of(self._model, self._loss, batch)
        parameters = list(self._observed.parameters.values())
        try:
            alone = [torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True) for loss in losses]
        except RuntimeError as error:
            if "use_reentrant=True" not in str(error):
                raise
            raise InputError(
                "the model checkpoints activations with use_reentrant=True, which hides its layers from the backward "
                "pass; call torch.utils.checkpoint with use_reentrant=False"
            ) from error
        rounding = 100 * torch.finfo(losses.dtype).eps * float(losses.detach().abs().sum())
        self._compare_sums(sums, alone, rounding)
        self._compare_norms(squared, alone, rounding)

    def _compare_sums(self, sums: Mapping[str, Tensor], alone: Sequence[Gradients], rounding: float) -> None:
        relative = max(1e-2, 4 * self._precision)
        scale = sum(_norm(gradients) for gradients in alone)
        for index, (name, parameter) in enumerate(self._observed.parameters.items()):
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
        relative = max(1e-2, 4 * self._precision)
        for found, gradients in zip(squared.sqrt().tolist(), alone, strict=True):
            if not abs(found - _norm(gradients)) <= relative * _norm(gradients) + rounding:
                raise InputError(
                    f"an example's gradient norm is {_norm(gradients):.6g}, but {found:.6g} was found by layers; the "
                    "model cannot be clipped exactly"
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
