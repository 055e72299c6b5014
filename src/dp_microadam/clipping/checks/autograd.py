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

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dp_microadam.clipping.batches import batch_size, losses_of
from dp_microadam.clipping.checks.checked_model import CheckedModel, read_together
from dp_microadam.clipping.checks.examples import CHECK_SIZE, SyntheticExamples
from dp_microadam.clipping.checks.randomness import no_side_effects
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.rules import attention, recurrent
from dp_microadam.errors import InputError, PrivacyError

if TYPE_CHECKING:
    from dp_microadam.clipping.engine import ClippedGradients
    from dp_microadam.clipping.recording import Observed

# No gradient is clipped to this norm.
_UNREACHED = 1e15

# Examples whose gradients are smaller than this part of the largest may be clipped or not.
_SMALL = 1e-3

Gradients = dict[str, Tensor]
"""Of one parameter per name: the gradients of all examples, or users, (count, *shape), in float32 or wider."""


def check_against_autograd(
    engine: ClippedGradients, observed: Observed, source: SyntheticExamples, per_unit: int = 1, room: int = CHECK_SIZE
) -> None:
    """Raise :class:`InputError` or :class:`PrivacyError` unless norms, sums and clipped sums are those of autograd.

    With ``per_unit``, those of users of so many examples each: three of them, or fewer where three would be more than ``room``
    examples, the largest batch.
    """
    weights = None if per_unit == 1 else _weights(max(1, min(CHECK_SIZE, room // per_unit)), per_unit)
    batch, _ = source.draw(CHECK_SIZE if weights is None else weights.numel())
    with full_precision(engine._device), no_side_effects(engine._model) as seed_all:
        checked = CheckedModel(engine._model, engine._loss, observed, seed_all, engine._precision)
        trial = engine._with_bound(_UNREACHED)
        with checked.one_pass(0):
            norms = trial._add(observed, batch, batch_size(batch), weights)
        # The same operations as under observation draw the same random numbers.
        with checked.one_pass(0), recurrent.step_by_step(observed.recurrent), attention.Unfused():
            losses, gradients = _by_autograd(checked, batch, weights)
        gradients = {name: part * trial._factor(name) for name, part in gradients.items()}
        lengths = _norms(gradients.values(), losses)
        rounding = 100 * torch.finfo(losses.dtype).eps * float(losses.detach().abs().sum())
        relative = max(1e-2, 4 * engine._precision)
        _compare_sums(trial, gradients, relative, 1e-2 * relative * float(lengths.sum()) + rounding)
        _compare_norms(norms, lengths, relative, rounding)
        largest = float(lengths.max())
        if not (0 < largest < math.inf):
            return  # nothing to clip
        bound = 0.5 * float(lengths[lengths > _SMALL * largest].min())
        clipping = engine._with_bound(bound)
        with checked.one_pass(0):
            clipping._add(observed, batch, batch_size(batch), weights)
        coefficients = [_coefficients(clipping, name, gradients, lengths) for name in gradients]
        of_one = zip(gradients.items(), coefficients, strict=True)
        expected = {name: _total(trial, part * c.view(-1, *[1] * (part.dim() - 1))) for (name, part), c in of_one}
        difference = _norms([(clipping.sums[name] - part).unsqueeze(0) for name, part in expected.items()], losses)
        if not float(difference) <= relative * bound * len(lengths):
            raise PrivacyError(
                f"the sum of {len(lengths)} synthetic gradients clipped to {bound:.6g} differs by {float(difference):.6g} "
                "from that of gradients that autograd computes one by one; this is a fault of the clipping engine or of a "
                "registered rule, do not train with it"
            )


def _weights(units: int, per_unit: int) -> Tensor:
    """Means over all of a user's examples, over the first one, and over half of them."""
    present = torch.tensor([per_unit, 1, max(1, per_unit // 2)])[:units]
    return (torch.arange(per_unit) < present.unsqueeze(1)) / present.unsqueeze(1)


def _by_autograd(checked: CheckedModel, batch: Any, weights: Tensor | None) -> tuple[Tensor, Gradients]:
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
    found = {}
    for (name, parameter), column in zip(parameters.items(), zip(*rows, strict=True), strict=True):
        wide = torch.promote_types(parameter.dtype, torch.float32)
        zeros = torch.zeros_like(parameter, dtype=wide, requires_grad=False)
        found[name] = torch.stack([zeros if part is None else part.to(wide) for part in column])
    return losses, found


def _norms(gradients: Any, like: Tensor) -> Tensor:
    """The norm of each example's gradient over these parameters."""
    squares = [part.reshape(len(part), -1).float().square().sum(1) for part in gradients]
    return torch.stack(squares).sum(0).sqrt() if squares else torch.zeros(1, device=like.device)


def _total(engine: ClippedGradients, gradients: Tensor) -> Tensor:
    """What the gradients of all examples add to the engine's sums."""
    return engine._contributions(gradients).sum(0)


def _coefficients(engine: ClippedGradients, name: str, gradients: Gradients, lengths: Tensor) -> Tensor:
    """min(1, C/‖g‖) for the parameters that are clipped together with this one."""
    together = ((names, bound) for names, bound in engine._clipped_together if name in names)
    names, bound = next(together, ({name}, engine._bound))  # a layer that was skipped has no gradient
    own = lengths if names == gradients.keys() else _norms([gradients[other] for other in names], lengths)
    return (bound / own.clamp(min=bound)).nan_to_num(0)


def _compare_sums(engine: ClippedGradients, gradients: Gradients, relative: float, floor: float) -> None:
    totals = {name: _total(engine, part) for name, part in gradients.items()}
    errors = [(engine.sums[name] - total).float().norm() for name, total in totals.items()]
    read = read_together(errors + [total.float().norm() for total in totals.values()])
    for name, error, length in zip(totals, read, read[len(totals) :], strict=False):
        if not float(error) <= relative * float(length) + floor:
            raise InputError(
                f"parameter {name!r} is used where it is not observed (through a reference kept elsewhere, in an "
                "autograd function of your own, or in a block checkpointed with use_reentrant=True), so only a part of its "
                "gradient would be clipped; read it from its module, use it in operations of torch, "
                "pass use_reentrant=False, or freeze it with requires_grad_(False)"
            )


def _compare_norms(found: Tensor, expected: Tensor, relative: float, rounding: float) -> None:
    for by_rules, by_autograd in zip(found.tolist(), expected.tolist(), strict=True):
        if not abs(by_rules - by_autograd) <= relative * by_autograd + rounding:
            raise InputError(
                f"the gradient norm of a synthetic example is {by_autograd:.6g} by autograd, but {by_rules:.6g} by the rules "
                "of the layers, so that the model cannot be clipped exactly; use layers that dp_microadam supports, or freeze "
                "the others"
            )
