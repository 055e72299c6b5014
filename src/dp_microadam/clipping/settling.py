"""Takes the norms of a pass again where they are in doubt, after one look at flags that the device computed for all layers.

To ask a GPU whether any norm of a layer is in doubt means to wait until it has caught up. So no layer asks: the flags of all
layers, and whatever else has to be known about the pass, are read together at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dp_microadam.clipping.outer_product import flagged_rows
from dp_microadam.clipping.passes import Part
from dp_microadam.clipping.rule import sum_of


class Settled(NamedTuple):
    """The norms of examples over all parts, those to be removed before anything is summed, and whether other flags were set.

    ``removed`` is None if there is nothing to remove. It holds the examples whose norm was not finite. An example whose norm
    is not finite only after it was taken again needs no removal: it is not finite in the gradients that were formed for it,
    which a coefficient of zero leaves out, and finite in everything else.
    """

    norms: Tensor
    removed: Tensor | None
    raised: list[bool]


def settle(parts: Sequence[Part], others: Sequence[Tensor] = ()) -> Settled:
    """Take doubtful norms again; ``part.squared`` of every part, and the norms returned, are right afterwards.

    Waits for the device once, whatever the number of parts, examples and ``others``, which are further flags of one element.

    Formal guarantees: afterwards no norm is smaller than that of what the part would add to the sum, up to the rounding that
    ``outer_product.py`` states.
    """
    squared = sum_of([part.squared for part in parts])
    unusable = ~torch.isfinite(squared)  # and not its root: a square that rounded below zero is in doubt, and taken again
    doubts = [(part, doubt) for part in parts if (doubt := part.call.doubt()) is not None]
    counts = [unusable.sum().view(1), *(flag.to(squared.device, torch.long, non_blocking=True).view(1) for flag in others)]
    if doubts:
        flags = torch.stack([doubt.norms for _, doubt in doubts]) < torch.stack([doubt.least for _, doubt in doubts])
        present = [doubt.present for _, doubt in doubts if doubt.present is not None]
        flags = flags & torch.stack(present) if present else flags
        counts.append(flags.sum(1))
    lost, *found = (torch.cat(counts) if len(counts) > 1 else counts[0]).tolist()
    doubtful = found[len(others) :]
    if any(doubtful):
        for (part, _), row, count in zip(doubts, flags, doubtful, strict=True):
            if count:
                part.squared = part.call.settle(row, count)
        squared = sum_of([part.squared for part in parts])
    removed = flagged_rows(unusable, lost) if lost else None
    return Settled(squared.sqrt(), removed, [bool(flag) for flag in found[: len(others)]])
