"""MicroAdam's CPU kernel: lines 6–14 of Algorithm 1, one block at a time, compiled by Numba.

The results are those of ``micro_adam_update.plain_update`` to the last bit, except for torch's square root, which is not
always correctly rounded: the compiler is not allowed to reassociate or contract floating-point arithmetic, and where the kernel
computes in another way, it notices the few cases in which that could matter and computes these as written.

A block, its parameters and all scratch memory fit into a core's second-level cache. Parameters and the next gradients are
prefetched into it during earlier lines, as the kernel would otherwise wait for them half of the time.
"""

# mypy: disable-error-code="no-untyped-def, misc"

from __future__ import annotations

from collections import namedtuple

import numpy as np
from numba import carray, njit

from dp_microadam.optimizers.micro_adam_vectors import (
    LANES,
    MAGNITUDE,
    NARROW,
    add_pair,
    any_above,
    count_bits,
    decode,
    encode_nearest,
    encode_randomly,
    extremes,
    lowest_bit,
    pointer,
    prefetch,
    reaching,
    step_sizes,
    weigh_exact,
    weigh_short,
)
from dp_microadam.optimizers.quantization import _GOLDEN, _MIX_1, _MIX_2, LEVELS

FIELDS = (
    "target",  # addresses: of the flat float32 target and gradient,
    "gradient",
    "error",  # of the residual, as packed codes or in dense float32,
    "bounds",
    "indices",
    "values",
    "numel",  # sizes,
    "block_size",
    "kept_full",
    "kept_last",
    "kept",
    "step",  # and values that change every step
    "key",
)
"""The columns of the table of parameters."""

(TARGET, GRADIENT, ERROR, BOUNDS, INDICES, VALUES) = range(6)
(NUMEL, BLOCK_SIZE, KEPT_FULL, KEPT_LAST, KEPT, STEP, KEY) = range(6, len(FIELDS))
ERROR_NONE, ERROR_CODES, ERROR_DENSE = 0, 1, 2

HALF, ONE, ZERO, TOP = np.float32(0.5), np.float32(1.0), np.float32(0.0), np.float32(LEVELS)
GOLDEN, MIX_1, MIX_2 = np.uint64(_GOLDEN), np.uint64(_MIX_1), np.uint64(_MIX_2)
UNIT_24 = np.float32(2.0**-24)
SMALLEST_UNIT = np.float32(1e-30)
SAMPLE_STRIDE = 16
SMALLEST_MARGIN, LARGEST_MARGIN = 1 << 14, 1 << 21
MAX_LENGTH = 32_768
POSITION = np.uint16(MAX_LENGTH - 1)
LINE = 64
TOGETHER = 16

# Minimum and maximum do not depend on order, and there are no NaNs here: these two flags let the compiler vectorize them.
ORDER_FREE = {"nnan", "nsz"}

Scratch = namedtuple(
    "Scratch", "values selected magnitudes masks offsets units inverses exact short entries positions sums products steps"
)
"""Memory that a thread works in; ``entries`` is zero before and after a step."""


def new_scratch():
    """Scratch memory for one thread, each array at the beginning of a cache line."""

    def aligned(count, dtype, width=1):
        size = np.dtype(dtype).itemsize
        memory = np.zeros(count * width + LINE // size, dtype)
        skipped = -memory.ctypes.data % LINE // size
        flat = memory[skipped : skipped + count * width]
        return flat.reshape(count, width) if width > 1 else flat

    room = MAX_LENGTH + LANES
    return Scratch(
        values=aligned(MAX_LENGTH, np.float32),
        selected=aligned(room, np.int32),
        magnitudes=aligned(room, np.uint32),
        masks=aligned(MAX_LENGTH // LANES + 1, np.uint64),
        offsets=aligned(MAX_LENGTH, np.float32),
        units=aligned(MAX_LENGTH, np.float32),
        inverses=aligned(MAX_LENGTH, np.float32),
        exact=aligned(room, np.float32),
        short=aligned(room, np.uint16),
        entries=aligned(MAX_LENGTH, np.uint16),
        positions=aligned(room, np.uint16),
        sums=aligned(room, np.float32, 2),
        products=aligned(room, np.float32, 2),
        steps=aligned(room, np.float32),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def step_blocks(rows, scales, low, high, powers, decay, lr, eps, bucket_size, error, stochastic, wide, scratch):
    """Update the blocks that begin at coordinates ``low`` to ``high``, counted over all parameters in ``rows``.

    ``scales`` holds the two bias corrections of each parameter, ``powers`` the powers of β₁ and β₂ by age, ``decay`` the factor
    of weight decay.
    """
    window = powers.shape[1]
    scratch.offsets[:bucket_size] = HALF
    floor, margin = np.uint32(0), LARGEST_MARGIN
    base = 0
    for number in range(len(rows)):
        row, scale = rows[number], scales[number]
        numel, block_size, step = row[NUMEL], row[BLOCK_SIZE], row[STEP]
        slot, filled = (step - 1) % window, min(step, window)
        target = carray(pointer(row[TARGET]), (numel,), np.float32)
        gradient = carray(pointer(row[GRADIENT]), (numel,), np.float32)
        codes = carray(pointer(row[ERROR]), ((numel + 1) // 2,), np.uint8)
        dense = carray(pointer(row[ERROR]), (numel,), np.float32)
        bounds = carray(pointer(row[BOUNDS]), (2, (numel + bucket_size - 1) // bucket_size), np.float32)
        indices = carray(pointer(row[INDICES]), (window, row[KEPT]), np.int16)
        exact = carray(pointer(row[VALUES]), (window, row[KEPT]), np.float32)
        short = carray(pointer(row[VALUES]), (window, row[KEPT]), np.uint16)
        kept_before = 0
        for begin in range(0, numel, block_size):
            length = min(block_size, numel - begin)
            kept = row[KEPT_FULL] if length == block_size else row[KEPT_LAST]
            end, kept_end = begin + length, kept_before + kept
            if low <= base + begin < high:
                values, selected = scratch.values[:length], scratch.selected
                ranges = codes[begin // 2 :], bounds[:, begin // bucket_size :], bucket_size
                if error == ERROR_CODES:
                    marked = _accumulate(values, gradient[begin:end], *ranges, floor, scratch)
                else:
                    values[:] = gradient[begin:end]
                    if error == ERROR_DENSE:
                        for j in range(length):
                            values[j] += dense[begin + j]
                    marked = _mark(values.view(np.uint32), floor, scratch.masks, 0)
                floor, margin = _select(values, kept, marked, floor, margin, scratch)
                for i in range(kept):
                    indices[slot, kept_before + i] = selected[i]
                if wide:
                    for i in range(kept):
                        exact[slot, kept_before + i] = values[selected[i]]
                else:
                    _write_rounded(values, selected, short[slot, kept_before:kept_end])
                for i in range(kept):
                    values[selected[i]] = ZERO
                if error == ERROR_CODES:
                    key = row[KEY] if stochastic else 0
                    _quantize(values, *ranges, key, begin, row[TARGET] + 4 * begin, scratch)
                elif error == ERROR_DENSE:
                    dense[begin:end] = values
                if decay != ONE:
                    for j in range(begin, end):
                        target[j] *= decay
                columns = indices[:filled, kept_before:kept_end]
                found = 0
                for line in range(filled):
                    age = (slot - line) % window
                    address = row[VALUES] + (4 if wide else 2) * (line * row[KEPT] + kept_before)
                    _weigh(address, kept, wide, powers[0, age], powers[1, age], scratch)
                    found = _gather(columns[line], found, row[GRADIENT] + 4 * end + LINE * kept * line, scratch)
                _apply(target[begin:end], found, scale[0], scale[1], lr, eps, scratch)
            kept_before = kept_end
        base += numel


@njit(nogil=True, cache=True, error_model="numpy")
def _accumulate(values, gradient, codes, bounds, bucket_size, floor, scratch):
    """Line 6: gradient plus decoded residual. Marks magnitudes of at least ``floor`` as ``_mark`` does; returns how many."""
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
    return count + _mark(values.view(np.uint32), floor, scratch.masks, whole * bucket_size // LANES)


@njit(nogil=True, cache=True, error_model="numpy")
def _accumulate_bucket(values, gradient, codes, unit, lower):
    half = (len(values) + 1) // 2
    for j in range(len(values)):
        code = codes[j] & 15 if j < half else codes[j - half] >> 4
        values[j] = gradient[j] + (np.float32(code) * unit + lower)


@njit(nogil=True, cache=True, error_model="numpy")
def _select(values, kept, count, floor, margin, scratch):
    """Line 7: positions of the ``kept`` largest magnitudes, ascending, in ``scratch.selected``; ties go to the first.

    ``count`` magnitudes of at least ``floor`` are marked. If these are too few or too many, a sample gives a better floor. The
    threshold among those marked is exact. Returns a floor that should suit a similar block, and how far below the threshold it
    is, in units of the last place of a magnitude.
    """
    bits = values.view(np.uint32)
    if not kept <= count <= 8 * kept + LANES:
        floor = _floor_from_sample(bits, kept, scratch.magnitudes)
        count = _mark(bits, floor, scratch.masks, 0)
        if count < kept:
            floor = np.uint32(0)
            count = _mark(bits, floor, scratch.masks, 0)
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
    if count > 2 * kept:
        margin = max(margin // 2, SMALLEST_MARGIN)
    elif 4 * count < 5 * kept:
        margin = min(margin * 2, LARGEST_MARGIN)
    return np.uint32(max(np.int64(threshold) - margin, 0)), margin


@njit(nogil=True, cache=True)
def _mark(bits, floor, masks, first):
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


@njit(nogil=True, cache=True)
def _write_rounded(values, selected, short):
    """Line 8: the selected values to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    for i in range(len(short)):
        word = bits[selected[i]]
        short[i] = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize(values, codes, bounds, bucket_size, key, start, ahead, scratch):
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


@njit(nogil=True, cache=True)
def _weigh(address, count, wide, power_1, power_2, scratch):
    """Lines 12–13: what the ``count`` values of one step, at ``address``, contribute to both moments."""
    products = np.int64(scratch.products.ctypes.data)
    whole = count // NARROW * NARROW
    rest = count - whole
    if wide:
        for i in range(0, whole, NARROW):
            weigh_exact(address + 4 * i, products + 8 * i, power_1, power_2)
        scratch.exact[:rest] = carray(pointer(address + 4 * whole), (rest,), np.float32)
        weigh_exact(np.int64(scratch.exact.ctypes.data), products + 8 * whole, power_1, power_2)
    else:
        for i in range(0, whole, NARROW):
            weigh_short(address + 2 * i, products + 8 * i, power_1, power_2)
        scratch.short[:rest] = carray(pointer(address + 2 * whole), (rest,), np.uint16)
        weigh_short(np.int64(scratch.short.ctypes.data), products + 8 * whole, power_1, power_2)


@njit(nogil=True, cache=True)
def _gather(column, found, ahead, scratch):
    """Add the products of one step to the sums of its coordinates; ``found`` of them have an entry, others get a new one.

    Positions come from memory that can be written without our noticing, for example through numpy; without their sign bit they
    are at least positions in a block of the largest size.
    """
    entries, positions = scratch.entries, scratch.positions
    sums, products = np.int64(scratch.sums.ctypes.data), np.int64(scratch.products.ctypes.data)
    scratch.sums[found + 1 : found + 1 + len(column)] = ZERO
    for i in range(len(column)):
        prefetch(ahead + LINE * i)
        position = np.uint16(column[i]) & POSITION
        entry = np.int64(entries[position])
        new = np.int64(entry == 0)
        found += new
        entry = found if new else entry
        entries[position] = np.uint16(entry)
        positions[np.uint32(entry)] = position
        add_pair(sums + 8 * entry, products + 8 * i)
    return found


@njit(nogil=True, cache=True, error_model="numpy")
def _apply(target, found, scale_1, scale_2, lr, eps, scratch):
    """Line 14 for the coordinates that have an entry. Positions outside of the block are skipped."""
    sums, to = np.int64(scratch.sums.ctypes.data), np.int64(scratch.steps.ctypes.data)
    for i in range(0, found + 1, NARROW):
        step_sizes(sums + 8 * i, to + 4 * i, scale_1, scale_2, lr, eps)
    positions, entries, steps = scratch.positions, scratch.entries, scratch.steps
    for i in range(1, found + 1):
        position = positions[i]
        entries[position] = 0
        if position < len(target):
            target[position] -= steps[i]


@njit(nogil=True, cache=True)
def all_within(rows, low, high, limit):
    """Whether gradients are finite and of magnitudes up to ``limit``, given as bits, at coordinates ``low`` to ``high``.

    Four distant places are read at once, because a single stream does not use the memory's bandwidth.
    """
    base = 0
    above = np.uint64(0)
    for number in range(len(rows)):
        begin, end = max(low - base, 0), min(high - base, rows[number, NUMEL])
        base += rows[number, NUMEL]
        if begin < end:
            address = rows[number, GRADIENT] + 4 * begin
            quarter = (end - begin) // (4 * LANES) * LANES
            for at in range(address, address + 4 * quarter, 4 * LANES):
                above |= any_above(at, at + 4 * quarter, at + 8 * quarter, at + 12 * quarter, limit)
            rest = carray(pointer(address + 16 * quarter), (end - begin - 4 * quarter,), np.uint32)
            for i in range(len(rest)):
                above |= np.uint64((rest[i] & MAGNITUDE) > limit)
    return above == 0


@njit(nogil=True, cache=True)
def advance(addresses):
    """Add one to the integers at these addresses, the numbers of steps, and return them."""
    steps = np.empty(len(addresses), np.int64)
    for i in range(len(addresses)):
        step = carray(pointer(addresses[i]), (1,), np.int64)
        step[0] += 1
        steps[i] = step[0]
    return steps
