"""The comparison of the engine with autograd, example by example, before the first step.

Formal guarantees: after :func:`check_against_autograd` has returned, on three synthetic examples, or users of several examples
each,

- the norm of each one's gradient, and the sum of gradients, were those of autograd, for every trainable parameter, so no
  parameter is used where it is not observed;
- the sum of clipped gradients was that of autograd's gradients, clipped one by one, at a norm that all of them exceed. So
  coefficients follow from the norms, apply to every part of the gradient, and belong to the right example.

Users need no more than this, and the passes of the independence check (``independence.py``) are not repeated for every number
of examples per user: the loss function is still one of examples, which that check has shown to be independent, at any place.
The weights multiply losses, and so the output gradients in the rows of each example; a user's gradient is the sum over the
rows of r consecutive examples. What is new for each r is only how the rules of the layers add up these rows, which is
arithmetic of r and of shapes. A loss that mixes the examples of one user is refused too: it is not one of examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dp_microadam.clipping.batches import batch_size, losses_of
from dp_microadam.clipping.checks.examples import CHECK_SIZE, SyntheticExamples
from dp_microadam.clipping.checks.independence import CheckedModel
from dp_microadam.clipping.checks.randomness import no_side_effects
from dp_microadam.clipping.checks.state import put_back_attributes
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.rules import attention, recurrent
from dp_microadam.clipping.rules.rule import at_least_float32
from dp_microadam.errors import InputError, PrivacyError

if TYPE_CHECKING:
    from dp_microadam.clipping.engine import ClippedGradients
    from dp_microadam.clipping.recording import Observed

# No gradient is clipped to this norm.
_UNREACHED = 1e15

# Examples whose gradients are smaller than this part of the largest may be clipped or not.
_SMALL = 1e-3

Gradients = dict[str, Tensor]
"""The gradient of one example, or user, by parameter name; without those that are zero because nothing uses them."""


def check_against_autograd(
    engine: ClippedGradients, observed: Observed, source: SyntheticExamples, per_unit: int = 1, room: int = CHECK_SIZE
) -> None:
    """Raise :class:`InputError` or :class:`PrivacyError` unless norms, sums and clipped sums are those of autograd.

    With ``per_unit``, those of users of so many examples each: three of them, or fewer where three would be more than ``room``
    examples, the largest batch.
    """
    weights = None if per_unit == 1 else _weights(max(1, min(CHECK_SIZE, room // per_unit)), per_unit)
    batch, _ = source.draw(CHECK_SIZE if weights is None else weights.numel())
    model = engine._model
    with full_precision(engine._device), put_back_attributes(model), no_side_effects(model) as seed_all:
        checked = CheckedModel(model, engine._loss, observed, seed_all, engine._precision)
        # The same operations as under observation draw the same random numbers.
        with checked.one_pass(0), recurrent.step_by_step(observed.recurrent), attention.Unfused():
            losses, gradients = _by_autograd(checked, batch, weights)
        for one in gradients:
            for name in one.keys() & (engine._scale.keys() | engine._row_masks.keys()):
                one[name] = one[name] * engine._factor(name)
        lengths = torch.stack([_norm(one.values()) for one in gradients])
        relative = max(1e-2, 4 * engine._precision)
        rounding = 100 * torch.finfo(losses.dtype).eps * float(losses.detach().abs().sum())
        largest = float(lengths.max())
        something = 0 < largest < torch.inf
        bound = 0.5 * float(lengths[lengths > _SMALL * largest].min()) if something else _UNREACHED

        def compared(bound: float) -> tuple[Tensor, str | None]:
            """The engine's norms, and the first parameter whose sum is wrong if gradients are clipped to this norm."""
            trial = engine._with_bound(bound)
            with checked.one_pass(0):
                norms = trial._add(observed, batch, batch_size(batch), weights)
            floor = 1e-2 * relative * float(lengths.clamp(max=bound).sum()) + rounding
            for name, total in _sums(trial, gradients).items():
                if not float((trial.sums[name] - total).norm()) <= relative * float(total.norm()) + floor:
                    return norms, name
            return norms, None

        norms, wrong = compared(bound)
        same = (norms - lengths).abs() <= relative * lengths + rounding
        if wrong is None and bool(same.all()):
            return
        _, wrong = compared(_UNREACHED)
        if wrong is not None:
            raise InputError(
                f"parameter {wrong!r} is used where it is not observed (through a reference kept elsewhere, in an "
                "autograd function of your own, or in a block checkpointed with use_reentrant=True), so only a part of its "
                "gradient would be clipped; read it from its module, use it in operations of torch, "
                "pass use_reentrant=False, or freeze it with requires_grad_(False)"
            )
        if not bool(same.all()):
            row = int((~same).nonzero()[0])
            raise InputError(
                f"the gradient norm of a synthetic example is {float(lengths[row]):.6g} by autograd, but "
                f"{float(norms[row]):.6g} by the rules of the layers, so that the model cannot be clipped exactly; use layers "
                "that dp_microadam supports, or freeze the others"
            )
        raise PrivacyError(
            f"the sum of {len(lengths)} synthetic gradients clipped to {bound:.6g} is not that of gradients that autograd "
            "computes one by one; this is a fault of the clipping engine or of a registered rule, do not train with it"
        )


def _weights(units: int, per_unit: int) -> Tensor:
    """Means over all of a user's examples, over the first one, and over half of them."""
    present = torch.tensor([per_unit, 1, max(1, per_unit // 2)])[:units]
    return (torch.arange(per_unit) < present.unsqueeze(1)) / present.unsqueeze(1)


def _by_autograd(checked: CheckedModel, batch: Any, weights: Tensor | None) -> tuple[Tensor, list[Gradients]]:
    """Losses, and the gradient of the loss of each example, or user."""
    parameters = checked.observed.parameters
    losses = losses_of(checked.model, checked.loss, batch)
    if not losses.requires_grad:
        raise InputError(
            "per_example_loss does not depend on any trainable parameter; check that it calls the model it is "
            "given and neither detaches nor disables gradients"
        )
    if weights is not None:
        losses = (losses.view_as(weights) * weights.to(losses)).sum(1)
    rows: list[Sequence[Tensor | None]] = []
    try:
        for loss in losses:
            rows.append(torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True))
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise InputError(
            "the model checkpoints activations with use_reentrant=True, which hides its layers from the backward "
            "pass; call torch.utils.checkpoint with use_reentrant=False"
        ) from error
    names = list(parameters)
    return losses, [{name: part for name, part in zip(names, row, strict=True) if part is not None} for row in rows]


def _norm(parts: Iterable[Tensor]) -> Tensor:
    """The norm of one gradient over these parameters."""
    squares = [torch.linalg.vector_norm(at_least_float32(part)).square() for part in parts]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def _sums(engine: ClippedGradients, gradients: list[Gradients]) -> Gradients:
    """What the gradients of all examples add to the engine's sums, if each is clipped by its own norm."""
    totals = {name: torch.zeros_like(total) for name, total in engine.sums.items()}
    together = list(engine._clipped_together)
    together += [({name}, engine._bound) for name in totals.keys() - set().union(*(names for names, _ in together))]
    for one in gradients:
        for names, bound in together:
            parts = {name: one[name] for name in names if name in one}
            coefficient = (bound / _norm(parts.values()).clamp(min=bound)).nan_to_num(0)
            for name, part in parts.items():
                totals[name] += engine._contributions(coefficient * part.to(totals[name].dtype).unsqueeze(0)).squeeze(0)
    return totals
