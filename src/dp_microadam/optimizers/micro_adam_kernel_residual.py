"""Lines 6, 10 and 11 of Algorithm 1 in MicroAdam's CPU kernel: the residual of a block, decoded and encoded in 4 bits.

Whole buckets of a multiple of 128 coordinates take vector instructions; others, and the few of which a code could differ from
that of ``quantization.quantize``, take a loop that computes as it does.
"""

# mypy: disable-error-code="no-untyped-def, misc"

from __future__ import annotations

import numpy as np
from numba import njit

from dp_microadam.optimizers.micro_adam_kernel_selection import mark
from dp_microadam.optimizers.micro_adam_vectors import (
    LANES,
    LINE,
    count_bits,
    decode,
    encode_nearest,
    encode_randomly,
    extremes,
    prefetch,
)
from dp_microadam.optimizers.quantization import _GOLDEN, _MIX_1, _MIX_2, LEVELS

HALF, ONE, ZERO, TOP = np.float32(0.5), np.float32(1.0), np.float32(0.0), np.float32(LEVELS)
GOLDEN, MIX_1, MIX_2 = np.uint64(_GOLDEN), np.uint64(_MIX_1), np.uint64(_MIX_2)
UNIT_24 = np.float32(2.0**-24)
SMALLEST_UNIT = np.float32(1e-30)
TOGETHER = 16

# Minimum and maximum do not depend on order, and there are no NaNs here: these two flags let the compiler vectorize them.
ORDER_FREE = {"nnan", "nsz"}


@njit(nogil=True, cache=True, error_model="numpy")
def accumulate(values, gradient, codes, bounds, bucket_size, floor, scratch):
    """Line 6: gradient plus decoded residual. Marks magnitudes of at least ``floor`` as ``mark`` does; returns how many."""
    half = bucket_size // 2
    to, source, packed = np.int64(values.ctypes.data), np.int64(gradient.ctypes.data), np.int64(codes.ctypes.data)
    buckets = (len(values) + bucket_size - 1) // bucket_size
    whole = len(values) // bucket_size if half % LANES == 0 else 0
    units, lowers = scratch.units[:buckets], bounds[0]
    for bucket in range(buckets):
        units[bucket] = (bounds[1, bucket] - lowers[bucket]) / TOP
    count = 0
    for bucket in range(whole):
        for begin in range(bucket * bucket_size, bucket * bucket_size + half, LANES):
            at = 4 * begin
            low, high = decode(
                packed + begin - bucket * half, source + at, to + at, 4 * half, units[bucket], lowers[bucket], floor
            )
            scratch.masks[begin // LANES] = low
            scratch.masks[(begin + half) // LANES] = high
            count += count_bits(low) + count_bits(high)
    for bucket in range(whole, buckets):
        begin = bucket * bucket_size
        end = min(begin + bucket_size, len(values))
        _accumulate_bucket(values[begin:end], gradient[begin:end], codes[begin // 2 :], units[bucket], lowers[bucket])
    return count + mark(values.view(np.uint32), floor, scratch.masks, whole * bucket_size // LANES)


@njit(nogil=True, cache=True, error_model="numpy")
def _accumulate_bucket(values, gradient, codes, unit, lower):
    half = (len(values) + 1) // 2
    for j in range(len(values)):
        code = codes[j] & 15 if j < half else codes[j - half] >> 4
        values[j] = gradient[j] + (np.float32(code) * unit + lower)


@njit(nogil=True, cache=True, error_model="numpy")
def quantize(values, codes, bounds, bucket_size, key, start, ahead, scratch):
    """Lines 10–11: bounds and 4-bit codes of every bucket, rounded stochastically if there is a key.

    Brings the block's parameters at address ``ahead`` into cache.
    """
    half = bucket_size // 2
    source, packed = np.int64(values.ctypes.data), np.int64(codes.ctypes.data)
    offsets, units, inverses = scratch.offsets, scratch.units, scratch.inverses
    rounding = np.int64(offsets.ctypes.data)
    buckets = (len(values) + bucket_size - 1) // bucket_size
    whole = len(values) // bucket_size if half % LANES == 0 else 0
    # Several buckets at a time, so that the divisions of one do not wait for the comparisons of another.
    for first in range(0, buckets, TOGETHER):
        end = min(first + TOGETHER, buckets)
        for bucket in range(first, end):
            begin = bucket * bucket_size
            if bucket < whole:
                lower, upper = extremes(source + 4 * begin)
                for more in range(begin + 2 * LANES, begin + bucket_size, 2 * LANES):
                    other_lower, other_upper = extremes(source + 4 * more)
                    lower, upper = min(lower, other_lower), max(upper, other_upper)
            else:
                lower, upper = _bounds(values[begin : begin + bucket_size])
            bounds[0, bucket], bounds[1, bucket] = lower, upper
        for bucket in range(first, end):
            units[bucket] = (bounds[1, bucket] - bounds[0, bucket]) / TOP
            inverses[bucket] = ONE / units[bucket]
        for bucket in range(first, end):
            begin = bucket * bucket_size
            size = min(bucket_size, len(values) - begin)
            for line in range(4 * begin, 4 * (begin + size), LINE):
                prefetch(ahead + line)
            if key:
                _rounding_offsets(key, start + begin, offsets[:size])
            lower, unit, inverse = bounds[0, bucket], units[bucket], inverses[bucket]
            doubt = np.uint64(1)
            if bucket < whole and unit >= SMALLEST_UNIT and lower <= ZERO <= bounds[1, bucket]:
                doubt = np.uint64(0)
                for at in range(0, half, LANES):
                    where, to = source + 4 * (begin + at), packed + begin // 2 + at
                    if key:
                        doubt |= encode_randomly(where, rounding + 4 * at, to, 4 * half, inverse, -lower * inverse)
                    else:
                        doubt |= encode_nearest(where, to, 4 * half, inverse, HALF - lower * inverse)
            if doubt:
                _quantize_bucket(values[begin : begin + size], codes[begin // 2 :], lower, unit, offsets)


@njit(nogil=True, cache=True, fastmath=ORDER_FREE)
def _bounds(values):
    # Two halves at once, which halves the chain of dependent comparisons.
    half = len(values) // 2
    left, right = values[:half], values[half : 2 * half]
    lower = upper = values[-1]
    for j in range(half):
        lower = min(lower, min(left[j], right[j]))
        upper = max(upper, max(left[j], right[j]))
    return lower, upper


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize_bucket(values, codes, lower, unit, offsets):
    half = (len(values) + 1) // 2
    if unit == ZERO:
        codes[:half] = 0
        return
    for j in range(len(values)):
        code = np.uint8(np.int32(min((values[j] - lower) / unit + offsets[j], TOP)))
        if j < half:
            codes[j] = code
        else:
            codes[j - half] |= code << np.uint8(4)


@njit(nogil=True, cache=True)
def _rounding_offsets(key, start, offsets):
    """The same numbers as ``quantization.rounding_offsets``."""
    for j in range(len(offsets)):
        word = np.uint64(start + j + 1) * GOLDEN + np.uint64(key)
        word = (word ^ (word >> np.uint64(30))) * MIX_1
        word = (word ^ (word >> np.uint64(27))) * MIX_2
        word = word ^ (word >> np.uint64(31))
        offsets[j] = np.float32(word >> np.uint64(40)) * UNIT_24
