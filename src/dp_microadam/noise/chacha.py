"""ChaCha20 and normal numbers from its stream, in NumPy: the readable twin of the kernel in ``chacha_kernel.py``.

The block function is that of RFC 8439 ("ChaCha20 and Poly1305 for IETF Protocols", section 2.3): a 256-bit key, a counter and a
nonce give 64 bytes, which for anyone without the key are indistinguishable from random bits, independent for different counters
and nonces. Here the nonce's first word continues the counter to 64 bits and the others are zero: every draw has its own key.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

NORMALS_PER_BLOCK = 8
"""A block is eight words of 64 bits, and Box–Muller makes two normal numbers of two of them."""

_CONSTANTS = np.frombuffer(b"expand 32-byte k", dtype="<u4").astype(np.uint32)


def chacha_blocks(key: bytes, counters: NDArray[np.uint64], nonce: tuple[int, int] = (0, 0)) -> NDArray[np.uint32]:
    """The sixteen 32-bit words of each block: ``counters`` count blocks, ``nonce`` is the last two words of the RFC's nonce."""
    count = len(counters)
    low, high = (counters & np.uint64(0xFFFFFFFF)).astype(np.uint32), (counters >> np.uint64(32)).astype(np.uint32)
    fixed = np.concatenate([_CONSTANTS, np.frombuffer(key, dtype="<u4").astype(np.uint32)])
    last = np.array(nonce, dtype=np.uint32)
    begin = [np.full(count, word) for word in fixed] + [low, high] + [np.full(count, word) for word in last]
    state = [words.copy() for words in begin]
    for _ in range(10):
        for column in range(4):
            _quarter_round(state, column, 4 + column, 8 + column, 12 + column)
        for diagonal in range(4):
            _quarter_round(state, diagonal, 4 + (diagonal + 1) % 4, 8 + (diagonal + 2) % 4, 12 + (diagonal + 3) % 4)
    return np.stack([words + first for words, first in zip(state, begin, strict=True)], axis=1)


def chacha_normals(key: bytes, count: int, lanes: int) -> NDArray[np.float64]:
    """``count`` independent standard normal numbers, by Box–Muller from 53-bit uniforms, bounded by 8.57 deviations.

    Coordinates come in groups of 8·``lanes``, and block number b of a group makes its coordinates b, b + ``lanes``,
    b + 2·``lanes``, …: neighbouring lanes of the kernel write neighbouring numbers.
    """
    groups = math.ceil(count / (NORMALS_PER_BLOCK * lanes))
    words = chacha_blocks(key, np.arange(groups * lanes, dtype=np.uint64))
    uniforms = (words.view(np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log(1.0 - uniforms[:, 0::2]))
    angle = uniforms[:, 1::2] * (2 * math.pi)
    normals = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=2).reshape(groups, lanes, NORMALS_PER_BLOCK)
    return normals.transpose(0, 2, 1).reshape(-1)[:count]


def _quarter_round(state: list[NDArray[np.uint32]], a: int, b: int, c: int, d: int) -> None:
    """Section 2.1 of the RFC, on words a, b, c and d of all blocks at once."""
    for one, other, target, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[one] = state[one] + state[other]
        mixed = state[target] ^ state[one]
        state[target] = (mixed << np.uint32(bits)) | (mixed >> np.uint32(32 - bits))
