"""One forward and backward pass over a batch that yields squared per-example gradient norms and the means to sum them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dp_microadam.clipping.joint import JointCall, PendingUse, group_by_parameter, merge_uses, tied_call
from dp_microadam.clipping.outer_product import UncertainNorms, flagged_rows
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.recording import Observed, OutputGradientHook, Recording, Use
from dp_microadam.clipping.rules.rule import sum_of
from dp_microadam.errors import InputError


class Clippable(Protocol):
    """Gradients of some parameters, of which clipped sums can be taken."""

    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]: ...

    def remove(self, rows: Tensor) -> None: ...

    def uncertain(self) -> UncertainNorms | None: ...

    def recompute(self, flags: Tensor, count: int) -> Tensor: ...


@dataclass
class ParameterShare:
    """Some parameters' share of every example's gradient: squared norms, and the call that sums it.

    ``names`` maps the keys of ``call.clipped_sums`` to parameter names. ``squared`` is right after ``recompute_uncertain``.
    """

    call: Clippable
    names: Mapping[str, str]
    squared: Tensor


def gradient_shares(
    observed: Observed,
    losses_of_batch: Callable[[], Tensor],
    count: int,
    scales: Mapping[str, Tensor] = MappingProxyType({}),
    row_masks: Mapping[str, Tensor] = MappingProxyType({}),
    on_output_gradient: OutputGradientHook | None = None,
    weights: Tensor | None = None,
) -> tuple[list[ParameterShare], Tensor]:
    """Run a forward and backward pass; returns the shares of the gradients, and the losses of the ``count`` examples.

    The shares have no parameter in common, so that squared norms add up. Gradients are multiplied by ``scales``, and rows
    that ``row_masks`` leaves out are zero. ``on_output_gradient`` is called with every use and its output gradient. With
    ``weights``, (units, examples per unit), shares are those of units: the gradient of a unit is the weighted sum over its
    examples, which are consecutive. The gradients of an example of weight zero are zero, unless they are not finite.

    Formal guarantees: each trainable parameter's gradient, summed over all its uses and scaled, is in at most one share,
    and a parameter in none has had no output gradient. Row i of a share comes from unit i alone, if examples do not interact.
    """
    units, per_unit = (count, 1) if weights is None else weights.shape
    shares: list[ParameterShare] = []
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
                shares.append(_joint_share([PendingUse(use, gradient)], factors, units))
            else:
                use.call.row_masks = {key: row_masks[name] for key, name in use.names.items() if name in row_masks}
                shares.append(ParameterShare(use.call, use.names, _one_each(use, use.call.squared_norms(gradient), units)))

    with Recording(observed, count, collect, per_unit=per_unit) as recording:
        losses = losses_of_batch()
        if losses.requires_grad:  # every trainable layer may have been skipped at random
            recording.backward(losses, torch.ones_like(losses) if weights is None else weights.to(losses).flatten())
        with torch.no_grad(), full_precision(losses.device):
            shares.extend(_joint_share(members, factors, units) for members in group_by_parameter(pending))
        pending.clear()  # the closure above would keep activations alive until the next garbage collection
    return shares, losses.detach()


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


def _joint_share(members: list[PendingUse], scales: Mapping[str, Tensor], count: int) -> ParameterShare:
    members = merge_uses(members)
    names: dict[str, Any] = {name: name for member in members for name in member.use.names.values()}
    if len(members) == 1 and scales.keys().isdisjoint(names):
        use = members[0].use
        return ParameterShare(use.call, use.names, _one_each(use, use.call.squared_norms(members[0].gradient), count))
    tied = tied_call(members) if scales.keys().isdisjoint(names) else None
    if tied is not None:
        call, use = tied
        return ParameterShare(call, use.names, _one_each(use, call.squared_norms(), count))
    joint = JointCall(members, scales, count)
    return ParameterShare(joint, names, joint.squared_norms())


class Norms(NamedTuple):
    """The norms of examples over all shares, those to be removed before anything is summed, and whether other flags were set.

    ``removed`` is None if there is nothing to remove. It holds the examples whose norm was not finite. An example whose norm
    is not finite only after it was recomputed needs no removal: it is not finite in the gradients that were formed for it,
    which a coefficient of zero leaves out, and finite in everything else.
    """

    of_examples: Tensor
    removed: Tensor | None
    raised: list[bool]


def recompute_uncertain(shares: Sequence[ParameterShare], others: Sequence[Tensor] = ()) -> Norms:
    """Recompute uncertain norms; ``squared`` of every share, and the norms returned, are right afterwards.

    To ask a GPU whether any norm of a layer is uncertain means to wait until it has caught up. So no layer asks: the flags of
    all layers, and ``others``, which are further flags of one element, are read together. The host waits once.

    Formal guarantees: afterwards no norm is smaller than that of what the share would add to the sum, up to the rounding that
    ``outer_product.py`` states.
    """
    squared = sum_of([share.squared for share in shares])
    unusable = ~torch.isfinite(squared)  # and not its root: a square that rounded below zero is uncertain, and recomputed
    asked = [(share, norms) for share in shares if (norms := share.call.uncertain()) is not None]
    counts = [unusable.sum().view(1), *(_beside(squared, flag) for flag in others)]
    if asked:
        flags = torch.stack([norms.norms for _, norms in asked]) < torch.stack([norms.least for _, norms in asked])
        present = [norms.present for _, norms in asked if norms.present is not None]
        flags = flags & torch.stack(present) if present else flags
        counts.append(flags.sum(1))
    lost, *found = (torch.cat(counts) if len(counts) > 1 else counts[0]).tolist()
    uncertain = found[len(others) :]
    if any(uncertain):
        for (share, _), row, count in zip(asked, flags, uncertain, strict=True):
            if count:
                share.squared = share.call.recompute(row, count)
        squared = sum_of([share.squared for share in shares])
    removed = flagged_rows(unusable, lost) if lost else None
    return Norms(squared.sqrt(), removed, [bool(flag) for flag in found[: len(others)]])


def _beside(squared: Tensor, flag: Tensor) -> Tensor:
    """The flag as a number on the device of the norms; one of the host is written there, since a copy of it would wait."""
    if flag.device.type == "cpu" != squared.device.type:
        return torch.full((1,), int(flag), device=squared.device)
    return flag.to(squared.device, torch.long, non_blocking=True).view(1)
