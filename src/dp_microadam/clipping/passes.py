"""One forward and backward pass over a batch that yields squared per-example gradient norms and the means to sum them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from dp_microadam.clipping.joint import JointCall, PendingUse, group_by_parameter, merge_uses
from dp_microadam.clipping.outer_product import Doubt
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.recording import Observed, OutputGradientHook, Recording, Use
from dp_microadam.clipping.tied import tied_call
from dp_microadam.errors import InputError


class Clippable(Protocol):
    """Gradients of some parameters, of which clipped sums can be taken."""

    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]: ...

    def remove(self, rows: Tensor) -> None: ...

    def doubt(self) -> Doubt | None: ...

    def settle(self, flags: Tensor, count: int) -> Tensor: ...


@dataclass
class Part:
    """Some parameters' share of every example's gradient: squared norms, and the call that sums it.

    ``names`` maps the keys of ``call.clipped_sums`` to parameter names. ``squared`` is right after ``settling.settle``.
    """

    call: Clippable
    names: Mapping[str, str]
    squared: Tensor


def parts_of(
    observed: Observed,
    losses_of_batch: Callable[[], Tensor],
    count: int,
    scales: Mapping[str, Tensor] = MappingProxyType({}),
    row_masks: Mapping[str, Tensor] = MappingProxyType({}),
    on_output_gradient: OutputGradientHook | None = None,
    padding: int = 0,
    weights: Tensor | None = None,
) -> tuple[list[Part], Tensor]:
    """Run a forward and backward pass; returns the parts of the gradients, and the losses of the ``count`` examples.

    The parts have no parameter in common, so that squared norms add up. Gradients are multiplied by ``scales``, and rows
    that ``row_masks`` leaves out are zero. ``on_output_gradient`` is called with every use and its output gradient. With
    ``weights``, (units, examples per unit), parts are those of units: the gradient of a unit is the weighted sum over its
    examples, which are consecutive. The last ``padding`` examples, or units, have weight zero. The gradients of an example of
    weight zero are zero, unless they are not finite.

    Formal guarantees: each trainable parameter's gradient, summed over all its uses and scaled, is in at most one part,
    and a parameter in none has had no output gradient. Row i of a part comes from unit i alone, if examples do not interact.
    """
    units, per_unit = (count, 1) if weights is None else weights.shape
    parts: list[Part] = []
    pending: list[PendingUse] = []
    factors = _combined(observed, scales, row_masks)

    def collect(use: Use, gradient: Tensor) -> None:
        names = set(use.names.values())
        with torch.no_grad(), full_precision(gradient.device):
            if on_output_gradient is not None:
                on_output_gradient(use, gradient)
            if any(recording.uses[name] > 1 for name in names):
                pending.append(PendingUse(use, gradient))
            elif not names.isdisjoint(scales) or not (use.call.masks_rows or names.isdisjoint(row_masks)):
                parts.append(_joint_part([PendingUse(use, gradient)], factors, units))
            else:
                use.call.row_masks = {key: row_masks[name] for key, name in use.names.items() if name in row_masks}
                parts.append(Part(use.call, use.names, _one_each(use, use.call.squared_norms(gradient), units)))

    with Recording(observed, count, collect, per_unit=per_unit) as recording:
        losses = losses_of_batch()
        if losses.requires_grad:  # every trainable layer may have been skipped at random
            of_losses = torch.ones_like(losses) if weights is None else weights.to(losses, copy=True).flatten()
            of_losses[count - padding * per_unit :] = 0
            recording.backward(losses, of_losses)
        with torch.no_grad(), full_precision(losses.device):
            parts.extend(_joint_part(members, factors, units) for members in group_by_parameter(pending))
        pending.clear()  # the closure above would keep activations alive until the next garbage collection
    return parts, losses.detach()


def _combined(observed: Observed, scales: Mapping[str, Tensor], row_masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scale and row mask of each parameter that has one, as one factor."""
    factors = dict(scales)
    for name, mask in row_masks.items():
        rows = mask.view(-1, *[1] * (observed.parameters[name].dim() - 1))
        factors[name] = factors[name] * rows if name in factors else rows
    return factors


def _one_each(use: Use, squared: Tensor, count: int) -> Tensor:
    if squared.shape != (count,):
        raise InputError(
            f"the rule of {use.label} returns {squared.numel()} norms for {count} examples or users with "
            f"{use.call.rows_per_example} rows each; a rule must add up the gradients of rows_per_example consecutive rows"
        )
    return squared


def _joint_part(members: list[PendingUse], scales: Mapping[str, Tensor], count: int) -> Part:
    members = merge_uses(members)
    names: dict[str, Any] = {name: name for member in members for name in member.use.names.values()}
    if len(members) == 1 and scales.keys().isdisjoint(names):
        use = members[0].use
        return Part(use.call, use.names, _one_each(use, use.call.squared_norms(members[0].gradient), count))
    tied = tied_call(members) if scales.keys().isdisjoint(names) else None
    if tied is not None:
        call, use = tied
        return Part(call, use.names, _one_each(use, call.squared_norms(), count))
    joint = JointCall(members, scales, count)
    return Part(joint, names, joint.squared_norms())
