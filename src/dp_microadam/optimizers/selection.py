"""Top-k by magnitude: T_k of Algorithm 1, line 7, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_LARGE = 1 << 20
"""Longer rows use radix selection, because ``torch.topk`` on the CPU copies every value together with a 64-bit index."""


def largest_magnitudes(rows: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` largest |values| of every row of a float32 matrix; ties are broken arbitrarily.

    >>> largest_magnitudes(torch.tensor([[1.0, -3.0, 2.0]]), 2).sort().values
    tensor([[1, 2]])
    """
    if rows.shape[1] <= _LARGE or rows.device.type != "cpu":
        return rows.abs().topk(count, dim=1, sorted=False).indices
    return torch.stack([_radix_select(row, count) for row in rows])


def _radix_select(values: Tensor, count: int) -> Tensor:
    """The same for one long row, with scratch memory that does not grow with its length.

    Without the sign bit, float32 numbers have the order of their bits as integers. Two histograms give the bits of the
    ``count``-th largest magnitude exactly: one of the high 15 bits, and one of the low 16 bits among ties in the high ones.
    """
    chunks = values.view(torch.int32).split(_LARGE)
    high, above = _bin_of(chunks, count, lambda bits: bits >> 16)
    low, equal_above = _bin_of(chunks, count - above, lambda bits: (bits & 0xFFFF)[(bits >> 16) == high])
    threshold = (high << 16) | low
    ties = count - above - equal_above
    found = []
    for number, chunk in enumerate(chunks):
        bits = chunk & 0x7FFFFFFF
        tied = (bits == threshold).nonzero().view(-1)[:ties]
        ties -= len(tied)
        found.append(torch.cat([(bits > threshold).nonzero().view(-1), tied]) + number * _LARGE)
    return torch.cat(found)


def _bin_of(chunks: tuple[Tensor, ...], count: int, digit: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """The digit of the ``count``-th largest value, and how many values have a larger digit."""
    histogram = chunks[0].new_zeros(1 << 16, dtype=torch.int64)
    for chunk in chunks:
        histogram += torch.bincount(digit(chunk & 0x7FFFFFFF), minlength=1 << 16)
    at_least = histogram.flip(0).cumsum(0).flip(0)
    position = int((at_least >= count).nonzero()[-1])
    return position, int(at_least[position] - histogram[position])
