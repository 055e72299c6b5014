"""How much computing equal accuracy takes: where the line of one setting reaches the value of another.

A study has a setting over which the value rises, such as the batch size, and a key with two values, such as one band and
several. What the second reaches at some batch size, the first reaches at a larger one; their ratio is the computing saved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from research.experiments.results import Sweep, key_of


@dataclass(frozen=True)
class Saving:
    """The medians of a cell and of its counterpart, and where the counterpart's line reaches the cell's median.

    ``reached_at`` is 0 if the line begins above it, and infinite if the line ends below it.
    """

    cell: Mapping[str, Any]
    reference: float
    value: float
    reached_at: float
    smallest: float
    largest: float


def savings(sweep: Sweep, x: str, beside: str) -> Iterator[Saving]:
    """By cell: the last value of ``beside`` compared with the line of its first value over ``x``."""
    first, *_, last = sweep.values_of(beside)
    sign = -1.0 if sweep.better == "lower" else 1.0
    for cell in sweep.cells:
        found = sweep.summary(cell)
        if cell[beside] != last or found is None:
            continue
        counterparts = {
            other[x]: other for other in sweep.cells if key_of({**other, x: 0}) == key_of({**cell, beside: first, x: 0})
        }
        line = [(float(place), one.middle) for place, other in sorted(counterparts.items()) if (one := sweep.summary(other))]
        own = dict(line).get(float(cell[x]))
        if own is not None:
            place = reached_at([(where, sign * value) for where, value in line], sign * found.middle)
            yield Saving(cell, own, found.middle, place, line[0][0], line[-1][0])


def reached_at(line: Sequence[tuple[float, float]], value: float) -> float:
    """The first place where the line reaches ``value``, interpolated over the logarithm of the place.

    >>> round(reached_at([(64, 80.0), (128, 82.0), (256, 83.0)], 81.0), 2)  # halfway between 64 and 128
    90.51
    >>> reached_at([(64, 80.0), (128, 82.0)], 79.0), reached_at([(64, 80.0), (128, 82.0)], 82.5)
    (0.0, inf)
    """
    if not line or line[0][1] >= value:
        return 0.0 if line else math.inf
    for (before, low), (after, high) in itertools.pairwise(line):
        if high >= value:
            share = (value - low) / (high - low)
            return before * (after / before) ** share
    return math.inf
