"""The part of the independence check that compares with autograd: is every use of every parameter observed, and exact?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from dp_microadam.clipping.reading import read_together
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
    elsewhere: list[tuple[str, Tensor]] = []

    def check(use: Use, gradient: Tensor) -> None:
        examples = gradient.reshape(len(gradient) // use.call.rows_per_example, -1)
        elsewhere.append((use.label, examples[:row].any() | examples[row + 1 :].any()))

    with checked.one_pass(0), Recording(checked.observed, batch_size(batch), check) as recording:
        losses = _differentiable(losses_of(checked.model, checked.loss, batch))
        one = torch.zeros_like(losses)
        one[row] = 1
        recording.backward(losses, one)
    for (label, _), found in zip(elsewhere, read_together([flag for _, flag in elsewhere]), strict=True):
        if bool(found):
            raise InputError(
                f"{label} mixes examples: the loss of one example has a gradient in rows of others; its first "
                "dimension must be the batch, several rows of one example must be next to each other, and no "
                "operation after it may combine examples"
            )


def check_gradients_against_autograd(checked: CheckedModel, batch: Any, weights: Tensor | None = None) -> None:
    """Each example's gradient norm and the unclipped sum must equal those that autograd computes, example by example.

    With ``weights``, (units, examples per unit), the same of units of several examples.
    """
    count, parameters = batch_size(batch), checked.observed.parameters
    losses_of_batch = partial(losses_of, checked.model, checked.loss, batch)
    with checked.one_pass(0):
        parts, detached = parts_of(checked.observed, losses_of_batch, count, weights=weights)
    sums: dict[str, Tensor] = {}
    with torch.no_grad(), full_precision(detached.device):
        if parts:
            settle(parts)
        of_none = torch.zeros(count if weights is None else len(weights), device=detached.device)
        squared = sum((part.squared for part in parts), of_none)
        for part in parts:
            for key, total in part.call.clipped_sums(torch.ones_like(part.squared)).items():
                sums[part.names[key]] = total
    # The same operations as under observation draw the same random numbers.
    with checked.one_pass(0), recurrent.step_by_step(checked.observed.recurrent), attention.Unfused():
        losses, per_example = _autograd_gradients(checked, batch, weights)
    of_parameters = zip(*per_example, strict=True)
    references = [_sum(gradients, like) for gradients, like in zip(of_parameters, parameters.values(), strict=True)]
    errors = [
        (sums[name].float() - reference).norm() if name in sums else reference.norm()
        for name, reference in zip(parameters, references, strict=True)
    ]
    total, found, lengths, *pairs = read_together(
        [
            losses.detach().abs().sum(),
            squared.sqrt(),
            torch.stack([_norm(gradients, losses.device) for gradients in per_example]),
        ]
        + errors
        + [reference.norm() for reference in references]
    )
    rounding = 100 * torch.finfo(losses.dtype).eps * float(total)
    relative = max(1e-2, 4 * checked.precision)
    floor = 1e-2 * relative * float(lengths.sum()) + rounding
    _compare_sums(parameters, pairs[: len(errors)], [relative * float(length) + floor for length in pairs[len(errors) :]])
    _compare_norms(found.tolist(), lengths.tolist(), relative, rounding)


def _autograd_gradients(checked: CheckedModel, batch: Any, weights: Tensor | None) -> tuple[Tensor, list[Gradients]]:
    """The gradient of the loss of each example, or unit, by autograd."""
    parameters = list(checked.observed.parameters.values())
    losses = losses_of(checked.model, checked.loss, batch)
    if weights is not None:
        losses = (losses.view_as(weights) * weights.to(losses)).sum(1)
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


def _compare_sums(names: Iterable[str], errors: Sequence[Tensor], limits: Sequence[float]) -> None:
    for name, error, limit in zip(names, errors, limits, strict=True):
        if not float(error) <= limit:
            raise InputError(
                f"parameter {name!r} is used where it is not observed (through a reference kept elsewhere, in an "
                "autograd function of your own, or in a block checkpointed with use_reentrant=True), so only a part of its "
                "gradient would be clipped; read it from its module, use it in operations of torch, "
                "pass use_reentrant=False, or freeze it with requires_grad_(False)"
            )


def _compare_norms(found: Sequence[float], expected: Sequence[float], relative: float, rounding: float) -> None:
    for by_rules, by_autograd in zip(found, expected, strict=True):
        if not abs(by_rules - by_autograd) <= relative * by_autograd + rounding:
            raise InputError(
                f"the gradient norm of a synthetic example is {by_autograd:.6g} by autograd, but {by_rules:.6g} by the rules "
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


def _sum(gradients: Gradients, like: Tensor) -> Tensor:
    """The sum over examples of one parameter's gradients, in float32."""
    return sum((part.float() for part in gradients if part is not None), torch.zeros_like(like, dtype=torch.float32))


def _norm(gradients: Gradients, device: torch.device) -> Tensor:
    """The norm of one example's gradient over all parameters."""
    squares = [part.float().square().sum() for part in gradients if part is not None]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), device=device)


def _ignore(use: Use, gradient: Tensor) -> None:
    """For forward passes without a backward pass."""
