"""Four-bit quantization with a minimum and a maximum per bucket: Q and Q⁻¹ of Algorithm 2 of the DP-MicroAdam paper.

All functions take a matrix whose rows are buckets. A code is an integer from 0 to 15; two codes share a byte. Byte ``j`` of a
bucket of length ``L`` holds code ``j`` in its low half and code ``j + ⌈L/2⌉`` in its high half, so that packing and unpacking
move contiguous halves instead of interleaving neighbours.

Magnitudes up to 1e38 are supported. Buckets whose step would underflow to zero are treated as constant.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 15
"""Steps between the smallest and the largest value of a bucket: 2⁴ − 1."""

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def bucket_bounds(values: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and largest value δ, Δ of each row (Algorithm 1, line 10)."""
    return values.amin(dim=1), values.amax(dim=1)


def quantize(values: Tensor, lower: Tensor, upper: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Q: the code ⌊(x − δ)/u + ½⌋ of every value, with u = (Δ − δ)/15.

    Guarantees: codes lie in 0…15, and each decoded value differs from its original by at most u/2, apart from float32
    rounding. With ``offsets`` (uniform in [0, 1), one per value) in place of ½, rounding is stochastic: the difference is at
    most u and its expectation is 0.

    >>> x = torch.tensor([[0.0, 1.0, 7.4, 15.0]])
    >>> quantize(x, *bucket_bounds(x))
    tensor([[ 0,  1,  7, 15]], dtype=torch.uint8)
    """
    step = (upper - lower).div_(LEVELS).unsqueeze(1)
    scaled = (values - lower.unsqueeze(1)).div_(step)
    scaled.add_(0.5 if offsets is None else offsets).floor_()
    # A constant bucket divides 0 by 0; its codes are 0. The clamp catches a Δ that rounding has moved above level 15.
    return scaled.nan_to_num_(nan=0.0, posinf=0.0).clamp_(0, LEVELS).to(torch.uint8)


def dequantize(codes: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Q⁻¹: the value x_Q·u + δ of every code."""
    step = (upper - lower).div_(LEVELS).unsqueeze(1)
    return codes.to(torch.float32).mul_(step).add_(lower.unsqueeze(1))


def pack(codes: Tensor) -> Tensor:
    """Pack two codes into each byte, row by row.

    >>> pack(torch.tensor([[1, 2, 3]], dtype=torch.uint8))
    tensor([[49,  2]], dtype=torch.uint8)
    """
    half = (codes.shape[1] + 1) // 2
    packed = codes[:, :half].clone()
    packed[:, : codes.shape[1] - half] |= codes[:, half:] << 4
    return packed


def unpack(packed: Tensor, length: int) -> Tensor:
    """Unpack rows of ``length`` codes; the inverse of :func:`pack`."""
    half = (length + 1) // 2
    return torch.cat([packed & 15, packed[:, : length - half] >> 4], dim=1)


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def derive_key(key: int, number: int) -> int:
    """A key for the ``number``-th stream derived from ``key``; 63 bits, so that it fits a signed integer.

    >>> derive_key(1, 2) == derive_key(1, 2), derive_key(1, 2) == derive_key(2, 1)
    (True, False)
    """
    return _mix((_mix(key & _WORD) + (number + 1) * _GOLDEN) & _WORD) >> 1


def rounding_offsets(key: int, start: int, count: int, device: torch.device | None = None) -> Tensor:
    """Uniform numbers in [0, 1) for coordinates ``start`` to ``start + count``; a function of key and coordinate alone.

    SplitMix64 (Steele, Lea and Flood 2014) as a counter-based generator. It has no state besides its key, so it gives the same
    numbers on every device, in any order and on every rank. The top 24 of 64 bits are used, the precision of a float32.

    >>> torch.equal(rounding_offsets(7, 0, 6)[4:], rounding_offsets(7, 4, 2))
    True
    """
    word = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    word.mul_(_signed(_GOLDEN)).add_(_signed(key))
    word.bitwise_xor_(_shifted(word, 30)).mul_(_signed(_MIX_1))
    word.bitwise_xor_(_shifted(word, 27)).mul_(_signed(_MIX_2))
    word.bitwise_xor_(_shifted(word, 31))
    return _shifted(word, 40).to(torch.float32).mul_(2.0**-24)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _shifted(word: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask makes the shift logical.
    return (word >> bits).bitwise_and_((1 << (64 - bits)) - 1)
