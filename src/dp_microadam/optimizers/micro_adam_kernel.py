"""MicroAdam's CPU kernel: lines 6–14 of Algorithm 1, one block at a time, compiled by Numba.

Operations and their order are those of ``micro_adam_update.plain_update``, and the compiler is not allowed to reassociate or
contract floating-point arithmetic. The two therefore agree to the last bit, except for torch's square root, which is not
always correctly rounded. Loops are written so that the compiler vectorizes them.
"""

# mypy: disable-error-code="no-untyped-def, misc"

from __future__ import annotations

import numpy as np
from numba import carray, njit
from numba.core import cgutils, types
from numba.extending import intrinsic

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

HALF, ZERO, TOP = np.float32(0.5), np.float32(0.0), np.float32(LEVELS)
GOLDEN, MIX_1, MIX_2 = np.uint64(_GOLDEN), np.uint64(_MIX_1), np.uint64(_MIX_2)
UNIT_24 = np.float32(2.0**-24)
MAGNITUDE = np.uint32(0x7FFFFFFF)
SAMPLE_STRIDE = 16
BINS = 2048
MAX_LENGTH = 32_768

# Minimum and maximum do not depend on order, and there are no NaNs here: these two flags let the compiler vectorize them.
ORDER_FREE = {"nnan", "nsz"}


@intrinsic
def _pointer(typing_context, address):
    """An integer address as a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@njit(nogil=True, cache=True)
def step_blocks(rows, scales, low, high, powers, lr, eps, bucket_size, error, stochastic, wide):
    """Update the blocks that begin at coordinates ``low`` to ``high``, counted over all parameters in ``rows``.

    ``scales`` holds the two bias corrections of each parameter, ``powers`` the powers of β₁ and β₂ by age.
    """
    accumulator = np.empty(MAX_LENGTH, np.float32)
    selected = np.empty(MAX_LENGTH, np.int32)
    levels = np.zeros(MAX_LENGTH, np.uint8)
    moments = np.zeros((MAX_LENGTH, 2), np.float32)
    window = powers.shape[1]
    base = 0
    for number in range(len(rows)):
        row, scale = rows[number], scales[number]
        numel, block_size, step = row[NUMEL], row[BLOCK_SIZE], row[STEP]
        slot, filled = (step - 1) % window, min(step, window)
        target = carray(_pointer(row[TARGET]), (numel,), np.float32)
        gradient = carray(_pointer(row[GRADIENT]), (numel,), np.float32)
        codes = carray(_pointer(row[ERROR]), ((numel + 1) // 2,), np.uint8)
        dense = carray(_pointer(row[ERROR]), (numel,), np.float32)
        bounds = carray(_pointer(row[BOUNDS]), (2, (numel + bucket_size - 1) // bucket_size), np.float32)
        indices = carray(_pointer(row[INDICES]), (window, row[KEPT]), np.int16)
        exact = carray(_pointer(row[VALUES]), (window, row[KEPT]), np.float32)
        short = carray(_pointer(row[VALUES]), (window, row[KEPT]), np.uint16)
        kept_before = 0
        for begin in range(0, numel, block_size):
            length = min(block_size, numel - begin)
            kept = row[KEPT_FULL] if length == block_size else row[KEPT_LAST]
            end, kept_end = begin + length, kept_before + kept
            if low <= base + begin < high:
                values = accumulator[:length]
                values[:] = gradient[begin:end]
                if error == ERROR_CODES:
                    _add_decoded(values, codes[begin // 2 :], bounds[:, begin // bucket_size :], bucket_size)
                elif error == ERROR_DENSE:
                    for j in range(length):
                        values[j] += dense[begin + j]
                _select(values, kept, selected, levels)
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
                    _quantize(values, codes[begin // 2 :], bounds[:, begin // bucket_size :], bucket_size, key, begin, levels)
                elif error == ERROR_DENSE:
                    dense[begin:end] = values
                columns = indices[:filled, kept_before:kept_end]
                if wide:
                    _gather_exact(moments, columns, exact[:filled, kept_before:kept_end], slot, powers)
                else:
                    _gather_short(moments, columns, short[:filled, kept_before:kept_end], slot, powers)
                _apply(target[begin:end], moments, columns, scale, lr, eps)
            kept_before = kept_end
        base += numel


@njit(nogil=True, cache=True)
def _add_decoded(values, codes, bounds, bucket_size):
    """Line 6: add the decoded residual to the gradient."""
    for bucket, begin in enumerate(range(0, len(values), bucket_size)):
        size = min(bucket_size, len(values) - begin)
        half = (size + 1) // 2
        lower = bounds[0, bucket]
        unit = (bounds[1, bucket] - lower) / TOP
        packed = codes[begin // 2 : begin // 2 + half]
        low, high = values[begin : begin + half], values[begin + half : begin + size]
        for j in range(half):
            low[j] += np.float32(packed[j] & 15) * unit + lower
        for j in range(size - half):
            high[j] += np.float32(packed[j] >> 4) * unit + lower


@njit(nogil=True, cache=True)
def _select(values, kept, selected, flags):
    """Line 7: positions of the ``kept`` largest magnitudes, ascending; ties go to the first.

    Without the sign bit, float32 numbers have the order of their bits as integers. A sample gives a threshold that a few
    percent of the block exceed; these are collected, and a radix histogram of their bits finds the exact smallest one to keep.
    """
    bits = values.view(np.uint32)
    count = _collect(bits, _floor_from_sample(bits, kept), selected, flags)
    if count < kept:
        count = _collect(bits, np.uint32(0), selected, flags)
    if count == kept:
        return
    threshold, ties = _threshold(bits, selected, count, kept)
    found = 0
    for i in range(count):
        position = selected[i]
        magnitude = bits[position] & MAGNITUDE
        if magnitude > threshold:
            selected[found] = position
            found += 1
        elif magnitude == threshold and ties > 0:
            selected[found] = position
            found += 1
            ties -= 1


@njit(nogil=True, cache=True)
def _floor_from_sample(bits, kept):
    """A magnitude that very likely at least ``kept`` of ``bits`` reach, and not many more."""
    samples = len(bits) // SAMPLE_STRIDE
    wanted = kept * 3 // (2 * SAMPLE_STRIDE) + 8
    if samples < 2 * wanted:
        return np.uint32(0)
    histogram = np.zeros(BINS, np.int32)
    for i in range(samples):
        histogram[(bits[i * SAMPLE_STRIDE] & MAGNITUDE) >> np.uint32(20)] += 1
    reached = 0
    for digit in range(BINS - 1, -1, -1):
        reached += histogram[digit]
        if reached >= wanted:
            return np.uint32(digit) << np.uint32(20)
    return np.uint32(0)


@njit(nogil=True, cache=True)
def _collect(bits, floor, selected, flags):
    """Positions of magnitudes of at least ``floor``; returns how many."""
    for i in range(len(bits)):
        flags[i] = np.uint8((bits[i] & MAGNITUDE) >= floor)
    # Most words of eight flags are zero and are skipped with one comparison.
    words = flags.view(np.uint64)
    whole = len(bits) // 8
    count = 0
    for word in range(whole):
        if words[word] != 0:
            for i in range(8 * word, 8 * word + 8):
                if flags[i]:
                    selected[count] = i
                    count += 1
    for i in range(8 * whole, len(bits)):
        if flags[i]:
            selected[count] = i
            count += 1
    return count


@njit(nogil=True, cache=True)
def _threshold(bits, candidates, count, kept):
    """The bits of the ``kept``-th largest magnitude among the candidates, and how many ties with it to keep."""
    histogram = np.zeros(BINS, np.int32)
    prefix, prefix_mask = np.uint32(0), np.uint32(0)
    wanted = kept
    for shift in (20, 9, 0):
        histogram[:] = 0
        width = np.uint32(BINS - 1) if shift else np.uint32(511)
        for i in range(count):
            magnitude = bits[candidates[i]] & MAGNITUDE
            if (magnitude & prefix_mask) == prefix:
                histogram[(magnitude >> np.uint32(shift)) & width] += 1
        digit = BINS - 1
        while histogram[digit] < wanted:
            wanted -= histogram[digit]
            digit -= 1
        prefix |= np.uint32(digit) << np.uint32(shift)
        prefix_mask |= width << np.uint32(shift)
    return prefix, wanted


@njit(nogil=True, cache=True)
def _write_rounded(values, selected, short):
    """Line 8: the selected values to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    for i in range(len(short)):
        word = bits[selected[i]]
        short[i] = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


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


@njit(nogil=True, cache=True)
def _quantize(values, codes, bounds, bucket_size, key, start, levels):
    """Lines 10–11: bounds and 4-bit codes of every bucket, rounded stochastically if there is a key. ``levels`` is scratch."""
    offsets = np.full(bucket_size, HALF, np.float32)
    for bucket, begin in enumerate(range(0, len(values), bucket_size)):
        size = min(bucket_size, len(values) - begin)
        part = values[begin : begin + size]
        lower, upper = _bounds(part)
        bounds[0, bucket], bounds[1, bucket] = lower, upper
        half = (size + 1) // 2
        packed = codes[begin // 2 : begin // 2 + half]
        unit = (upper - lower) / TOP
        if unit == ZERO:
            packed[:] = 0
            continue
        if key:
            _rounding_offsets(key, start + begin, offsets)
        for j in range(size):
            levels[j] = np.uint8(np.int32(min((part[j] - lower) / unit + offsets[j], TOP)))
        high = levels[half:size]
        for j in range(size - half):
            packed[j] = levels[j] | (high[j] << np.uint8(4))
        if half > size - half:
            packed[half - 1] = levels[half - 1]


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
def _gather_exact(moments, columns, values, slot, powers):
    """Lines 12–13: sums over the window for the coordinates in it. ``moments`` is zero on entry."""
    for line in range(len(columns)):
        age = (slot - line) % powers.shape[1]
        power_1, power_2 = powers[0, age], powers[1, age]
        for i in range(columns.shape[1]):
            value, position = values[line, i], columns[line, i]
            moments[position, 0] += value * power_1
            moments[position, 1] += (value * value) * power_2


@njit(nogil=True, cache=True)
def _gather_short(moments, columns, values, slot, powers):
    """The same from bfloat16 values, which are the upper halves of float32 ones."""
    decoded = np.empty((1, columns.shape[1]), np.float32)
    bits = decoded.view(np.uint32)
    for line in range(len(columns)):
        for i in range(columns.shape[1]):
            bits[0, i] = np.uint32(values[line, i]) << np.uint32(16)
        _gather_exact(moments, columns[line : line + 1], decoded, slot - line, powers)


@njit(nogil=True, cache=True)
def _apply(target, moments, columns, scale, lr, eps):
    """Line 14 for the coordinates in the window. ``moments`` is zero again on exit.

    Positions come from memory that can be written without our noticing, for example through numpy, so positions outside of
    the block are skipped. They cannot be outside of ``moments``, which covers the range of an int16.
    """
    for line in range(len(columns)):
        for i in range(columns.shape[1]):
            position = columns[line, i]
            first, second = moments[position, 0], moments[position, 1]
            if first != ZERO and 0 <= position < len(target):
                target[position] -= (first * scale[0]) / (np.sqrt(second * scale[1]) + eps) * lr
            moments[position, 0] = ZERO
            moments[position, 1] = ZERO
