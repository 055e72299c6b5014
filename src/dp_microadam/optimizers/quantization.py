"""Four-bit quantization with a minimum and a maximum per bucket of 128: Q and Q⁻¹ of Algorithm 2 of the DP-MicroAdam paper.

A code is an integer from 0 to 15; two codes share a byte. Byte j of a bucket holds code j in its low half and code j + 64 in
its high half, so that packing and unpacking move contiguous halves instead of interleaving neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

BUCKET = 128
"""Coordinates that share a minimum and a maximum."""

LEVELS = 15
"""Steps between the smallest and the largest value of a bucket: 2⁴ − 1."""


def quantize(buckets: Tensor) -> tuple[Tensor, Tensor]:
    """Q: the code ⌊(x − δ)/u + ½⌋ of every value, u = (Δ − δ)/15, packed, and the bounds δ, Δ of each row of 128.

    Guarantees: each decoded value differs from its original by at most u/2, apart from float32 rounding.

    >>> values = torch.zeros(1, 128)
    >>> values[0, :4] = torch.tensor([-7.0, 8.0, 0.4, 0.6])
    >>> codes, bounds = quantize(values)
    >>> dequantize(codes, bounds)[:4].tolist(), codes.shape, bounds.tolist()
    ([-7.0, 8.0, 0.0, 1.0], torch.Size([1, 64]), [[-7.0], [8.0]])
    """
    bounds = torch.stack([buckets.amin(1), buckets.amax(1)])
    unit = (bounds[1] - bounds[0]).div_(LEVELS).unsqueeze(1)
    scaled = (buckets - bounds[0].unsqueeze(1)).div_(unit).add_(0.5).floor_()
    # A constant bucket divides 0 by 0; its codes are 0. The clamp catches a Δ that rounding has moved above level 15.
    codes = scaled.nan_to_num_(nan=0.0, posinf=0.0).clamp_(0, LEVELS).to(torch.uint8)
    return codes[:, : BUCKET // 2] | codes[:, BUCKET // 2 :] << 4, bounds


def dequantize(codes: Tensor, bounds: Tensor) -> Tensor:
    """Q⁻¹: the value x_Q·u + δ of every code, flat."""
    unit = (bounds[1] - bounds[0]).div_(LEVELS).unsqueeze(1)
    return torch.cat([codes & 15, codes >> 4], dim=1).float().mul_(unit).add_(bounds[0].unsqueeze(1)).view(-1)
