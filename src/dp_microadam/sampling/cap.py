"""Dropping at random: which units of a sample are kept if it has more than a step may take.

Every sampled unit draws a random priority, and those with the smallest are kept, so that each set of the allowed size is
equally likely. Several processes that sample from parts of the data exchange the priorities of what they drew, so that all of
them know which ones are the smallest, and nobody's chances depend on the part they are in. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Priorities = NDArray[np.float64]
"""Two uniform numbers for each unit, which are compared in this order: 106 random bits, so that no two units are alike."""

Exchange = Callable[[Priorities], tuple[Sequence[Priorities], int]]
"""Takes the priorities of this process, and returns those of all processes and the number of this one."""


def alone(own: Priorities) -> tuple[Sequence[Priorities], int]:
    """The exchange of a single process."""
    return [own], 0


def keep_smallest(own: Priorities, most: int, exchange: Exchange = alone) -> NDArray[np.bool_]:
    """Which units of this process are kept, if all processes together keep ``most`` at most.

    Formal guarantees: if all priorities are independent and uniform, the kept units of all processes together are a uniformly
    random set of min(``most``, their number) of them (but for a probability below 2⁻¹⁰⁶ per pair of units that two priorities
    are the same). What a process learns of the others is their priorities, not whose they are.

    >>> keep_smallest(np.array([[0.5, 0.0], [0.1, 0.0], [0.1, 0.5]]), 2).tolist()
    [False, True, True]
    """
    kept = np.zeros(len(own), dtype=np.bool_)
    candidates = _order(own)[:most]  # others cannot be among the smallest of all
    of_all, number = exchange(own[candidates])
    together = np.concatenate(list(of_all))
    begin = sum(len(part) for part in of_all[:number])
    places = _order(together)[:most] - begin
    kept[candidates[places[(places >= 0) & (places < len(candidates))]]] = True
    return kept


def _order(priorities: Priorities) -> NDArray[np.int64]:
    return np.lexsort((priorities[:, 1], priorities[:, 0]))
