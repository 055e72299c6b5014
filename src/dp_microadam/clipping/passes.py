"""One observed pass over a batch: every example's squared gradient norm, and what is needed for the clipped sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dp_microadam.clipping.joint import Held, JointCall, connected, joined
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.recording import Observed, Recording, Use


class Clippable(Protocol):
    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]: ...

    def remove(self, rows: Tensor) -> None: ...


@dataclass
class Part:
    """Some parameters' share of every example's gradient: squared norms, and the call that sums it.

    ``names`` maps the keys of ``call.clipped_sums`` to parameter names.
    """

    call: Clippable
    names: Mapping[str, str]
    squared: Tensor


def parts_of(
    observed: Observed, losses_of_batch: Callable[[], Tensor], count: int, scales: Mapping[str, Tensor]
) -> tuple[list[Part], Tensor]:
    """Forward and backward pass; the parts' parameters do not overlap, so that squared norms add up.

    Formal guarantees: each trainable parameter's gradient, summed over all its uses and scaled, is in at most one part,
    and a parameter in none has had no output gradient.
    """
    parts: list[Part] = []
    held: list[Held] = []

    def arrived(use: Use, gradient: Tensor) -> None:
        names = use.names.values()
        if any(recording.uses[name] > 1 or name in scales for name in names):
            held.append(Held(use, gradient))
            return
        with torch.no_grad(), full_precision(gradient.device):
            parts.append(Part(use.call, use.names, use.call.squared_norms(gradient)))

    with Recording(observed, count, arrived) as recording:
        losses = losses_of_batch()
        if losses.requires_grad:  # every trainable layer may have been skipped at random
            recording.backward(losses, torch.ones_like(losses))
        with torch.no_grad(), full_precision(losses.device):
            parts.extend(_joint_part(members, scales, count) for members in connected(held))
    return parts, losses.detach()


def _joint_part(members: list[Held], scales: Mapping[str, Tensor], count: int) -> Part:
    members = joined(members)
    names: dict[str, Any] = {name: name for held in members for name in held.use.names.values()}
    if len(members) == 1 and scales.keys().isdisjoint(names):
        use = members[0].use
        return Part(use.call, use.names, use.call.squared_norms(members[0].gradient))
    joint = JointCall(members, scales, count)
    return Part(joint, names, joint.squared_norms())
