"""The part of the independence check that compares with autograd: is every use of every parameter observed, and exact?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dp_microadam.clipping import attention, recurrent
from dp_microadam.clipping.batches import batch_size, select
from dp_microadam.clipping.checked_model import CheckedModel
from dp_microadam.clipping.integer_ranges import IndexTracker
from dp_microadam.clipping.losses import losses_of
from dp_microadam.clipping.passes import parts_of
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.recording import Recording, Use
from dp_microadam.clipping.rows import LEARNING_SIZES, RestartLearning
from dp_microadam.clipping.settling import settle
from dp_microadam.errors import InputError

Gradients = tuple[Tensor | None, ...]

# A block may be skipped at random in training (stochastic depth): a parameter counts as unused after this many passes.
_PASSES_UNTIL_UNUSED = 16


def check_every_parameter_is_used(checked: CheckedModel, batch: Any) -> IndexTracker:
    """Raise :class:`InputError` if a trainable parameter is not used.

    The passes also fill ``checked.observed.table``, which says which tensors have rows for each example. Returns what the
    integers of the batch index.
    """
    table = checked.observed.table
    table.learning = True
    try:
        while True:
            try:
                unused, tracker = _unused_parameters(checked, batch)
                break
            except RestartLearning:  # each time one coincidence fewer
                continue
    finally:
        table.learning = False
    if unused:
        raise InputError(
            f"parameter {unused[0]!r} is trainable, but no operation uses it; use it, or freeze it with requires_grad_(False)"
        )
    return tracker


def _unused_parameters(checked: CheckedModel, batch: Any) -> tuple[list[str], IndexTracker]:
    unused = list(checked.observed.parameters)
    for seed in range(_PASSES_UNTIL_UNUSED):
        for size in LEARNING_SIZES:
            examples = select(batch, torch.arange(size) % batch_size(batch))
            tracker = IndexTracker(examples)
            with checked.one_pass(seed), Recording(checked.observed, size, _ignore) as recording, tracker:
                losses_of(checked.model, checked.loss, examples)
            unused = [name for name in unused if not recording.uses[name]]
        if not unused:
            break
    return unused, tracker


def check_rows_of_one_example(checked: CheckedModel, batch: Any, row: int) -> None:
    """The loss of one example must have an output gradient in the rows of that example only."""

    def check(use: Use, gradient: Tensor) -> None:
        rows = gradient.unflatten(0, (-1, use.call.rows_per_example))
        others = torch.arange(len(rows), device=gradient.device) != row
        if bool((rows[others] != 0).any()):
            raise InputError(
                f"{use.label} mixes examples: the loss of one example has a gradient in rows of others; its first "
                "dimension must be the batch, several rows of one example must be next to each other, and no "
                "operation after it may combine examples"
            )

    with checked.one_pass(0), Recording(checked.observed, batch_size(batch), check) as recording:
        losses = _differentiable(losses_of(checked.model, checked.loss, batch))
        one = torch.zeros_like(losses)
        one[row] = 1
        recording.backward(losses, one)


def check_gradients_against_autograd(checked: CheckedModel, batch: Any) -> None:
    """Each example's gradient norm and the unclipped sum must equal those that autograd computes, example by example."""
    count = batch_size(batch)
    with checked.one_pass(0):
        parts, detached = parts_of(checked.observed, partial(losses_of, checked.model, checked.loss, batch), count)
    sums: dict[str, Tensor] = {}
    with torch.no_grad(), full_precision(detached.device):
        if parts:
            settle(parts)
        squared = sum((part.squared for part in parts), torch.zeros(count, device=detached.device))
        for part in parts:
            for key, total in part.call.clipped_sums(torch.ones_like(part.squared)).items():
                sums[part.names[key]] = total
    # The same operations as under observation draw the same random numbers.
    with checked.one_pass(0), recurrent.step_by_step(checked.observed.recurrent), attention.Unfused():
        losses, per_example = _autograd_gradients(checked, batch)
    rounding = 100 * torch.finfo(losses.dtype).eps * float(losses.detach().abs().sum())
    _compare_sums(checked, sums, per_example, rounding)
    _compare_norms(checked, squared, per_example, rounding)


def _autograd_gradients(checked: CheckedModel, batch: Any) -> tuple[Tensor, list[Gradients]]:
    """The gradient of each example's loss, by autograd."""
    parameters = list(checked.observed.parameters.values())
    losses = losses_of(checked.model, checked.loss, batch)
    found: list[Gradients] = []
    try:
        for loss in losses:
            found.append(torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True))
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise InputError(
            "the model checkpoints activations with use_reentrant=True, which hides its layers from the backward "
            "pass; call torch.utils.checkpoint with use_reentrant=False"
        ) from error
    return losses, found


def _compare_sums(checked: CheckedModel, sums: Mapping[str, Tensor], per_example: Sequence[Gradients], rounding: float) -> None:
    relative = max(1e-2, 4 * checked.precision)
    scale = sum(_norm(gradients) for gradients in per_example)
    for index, (name, parameter) in enumerate(checked.observed.parameters.items()):
        reference = torch.zeros_like(parameter, dtype=torch.float32)
        for gradients in per_example:
            gradient = gradients[index]
            if gradient is not None:
                reference = reference + gradient.float()
        error = float((sums.get(name, torch.zeros_like(reference)).float() - reference).norm())
        if not error <= relative * float(reference.norm()) + 1e-2 * relative * scale + rounding:
            raise InputError(
                f"parameter {name!r} is used where it is not observed (through a reference kept elsewhere, in an "
                "autograd function of your own, or in a block checkpointed with use_reentrant=True), so only a part of its "
                "gradient would be clipped; read it from its module, use it in operations of torch, "
                "pass use_reentrant=False, or freeze it with requires_grad_(False)"
            )


def _compare_norms(checked: CheckedModel, squared: Tensor, per_example: Sequence[Gradients], rounding: float) -> None:
    relative = max(1e-2, 4 * checked.precision)
    for found, gradients in zip(squared.sqrt().tolist(), per_example, strict=True):
        if not abs(found - _norm(gradients)) <= relative * _norm(gradients) + rounding:
            raise InputError(
                f"the gradient norm of a synthetic example is {_norm(gradients):.6g} by autograd, but {found:.6g} by the rules "
                "of the layers, so that the model cannot be clipped exactly; use layers that dp_microadam supports, or freeze "
                "the others"
            )


def _differentiable(losses: Tensor) -> Tensor:
    if not losses.requires_grad:
        raise InputError(
            "per_example_loss does not depend on any trainable parameter; check that it calls the model it is "
            "given and neither detaches nor disables gradients"
        )
    return losses


def _norm(gradients: Gradients) -> float:
    return sum(float(gradient.float().square().sum()) for gradient in gradients if gradient is not None) ** 0.5


def _ignore(use: Use, gradient: Tensor) -> None:
    """For forward passes without a backward pass."""
