"""Line 7 of Algorithm 1 in MicroAdam's CPU kernel: the largest magnitudes of a block, exactly.

Without the sign bit, float32 numbers have the order of their bits as integers.
"""

# mypy: disable-error-code="no-untyped-def, misc"

from __future__ import annotations

import math

import numpy as np
from numba import njit

from dp_microadam.optimizers.micro_adam_vectors import LANES, MAGNITUDE, count_bits, lowest_bit, reaching

SAMPLE_STRIDE = 16
SMALLEST_MARGIN, LARGEST_MARGIN = 1 << 14, 1 << 21


@njit(nogil=True, cache=True, error_model="numpy")
def select(values, kept, count, floor, margin, scratch):
    """Line 7: positions of the ``kept`` largest magnitudes, ascending, in ``scratch.selected``; ties go to the first.

    ``count`` magnitudes of at least ``floor`` are marked. If these are too few or too many, a sample gives a better floor. The
    threshold among those marked is exact. Returns a floor that should suit a similar block, and how far below the threshold it
    is, in units of the last place of a magnitude.
    """
    bits = values.view(np.uint32)
    if not kept <= count <= 8 * kept + LANES:
        floor = _floor_from_sample(bits, kept, scratch.magnitudes)
        count = mark(bits, floor, scratch.masks, 0)
        if count < kept:
            floor = np.uint32(0)
            count = mark(bits, floor, scratch.masks, 0)
    selected, magnitudes = scratch.selected, scratch.magnitudes
    _collect(scratch.masks, len(bits), selected)
    if count == kept:
        return floor, margin
    for i in range(count):
        magnitudes[i] = bits[np.uint32(selected[i])] & MAGNITUDE
    threshold = _threshold(magnitudes, count, kept, floor)
    ties = kept - _count_reaching(magnitudes, count, np.int64(threshold) + 1)
    found = 0
    for i in range(count):
        tied = magnitudes[i] == threshold
        selected[found] = selected[i]
        found += np.int64(magnitudes[i] > threshold) | (np.int64(tied) & np.int64(ties > 0))
        ties -= np.int64(tied)
    # Counts of similar blocks differ by about √kept: as many more are marked as that needs, because each costs time.
    deviation = np.int64(math.sqrt(kept)) + 1
    if count > kept + 12 * deviation:
        margin = max(margin // 2, SMALLEST_MARGIN)
    elif count < kept + 4 * deviation:
        margin = min(margin * 2, LARGEST_MARGIN)
    return np.uint32(max(np.int64(threshold) - margin, 0)), margin


@njit(nogil=True, cache=True)
def mark(bits, floor, masks, first):
    """Mark magnitudes of at least ``floor``, one bit each, from the ``first`` word of bits on; returns how many."""
    address = np.int64(bits.ctypes.data)
    whole = len(bits) // LANES
    count = 0
    for word in range(first, whole):
        mask = reaching(address + 4 * LANES * word, floor)
        masks[word] = mask
        count += count_bits(mask)
    mask = np.uint64(0)
    for i in range(whole * LANES, len(bits)):
        mask |= np.uint64((bits[i] & MAGNITUDE) >= floor) << np.uint64(i - whole * LANES)
    masks[whole] = mask
    return count + count_bits(mask)


@njit(nogil=True, cache=True)
def _collect(masks, length, selected):
    """The positions of bits, ascending."""
    one = np.uint64(1)
    count = 0
    for word in range(length // LANES + 1):
        mask = masks[word]
        # Mostly there are no more than two: writing them in any case is faster than a wrong guess of how many.
        for _ in range(2):
            selected[count] = LANES * word + lowest_bit(mask)
            count += np.int64(mask != 0)
            mask &= mask - one
        while mask != 0:
            selected[count] = LANES * word + lowest_bit(mask)
            count += 1
            mask &= mask - one


@njit(nogil=True, cache=True)
def _floor_from_sample(bits, kept, magnitudes):
    """A magnitude that very likely at least ``kept`` of ``bits`` reach, and not many more."""
    samples = len(bits) // SAMPLE_STRIDE
    wanted = kept * 3 // (2 * SAMPLE_STRIDE) + 8
    if samples < 2 * wanted:
        return np.uint32(0)
    for i in range(samples):
        magnitudes[i] = bits[i * SAMPLE_STRIDE] & MAGNITUDE
    return _threshold(magnitudes, samples, wanted, np.uint32(0))


@njit(nogil=True, cache=True)
def _threshold(magnitudes, count, kept, floor):
    """A level that exactly ``kept`` of ``count`` magnitudes reach; if ties forbid that, the ``kept``-th largest."""
    low, high = np.int64(floor), np.int64(MAGNITUDE)
    while high - low > 1:
        middle = (low + high) // 2
        reached = _count_reaching(magnitudes, count, middle)
        if reached == kept:
            return np.uint32(middle)
        if reached > kept:
            low = middle
        else:
            high = middle
    return np.uint32(low)


@njit(nogil=True, cache=True)
def _count_reaching(magnitudes, count, level):
    level = np.uint32(level)
    total = np.int32(0)
    for i in range(count):
        total += np.int32(magnitudes[i] >= level)
    return np.int64(total)
