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

from dp_microadam.optimizers.micro_adam_kernel_residual import HALF, ONE, ZERO, accumulate, quantize
from dp_microadam.optimizers.micro_adam_kernel_selection import LARGEST_MARGIN, mark, select
from dp_microadam.optimizers.micro_adam_vectors import (
    LANES,
    LINE,
    MAGNITUDE,
    NARROW,
    add_pair,
    any_above,
    pointer,
    prefetch,
    step_sizes,
    weigh_exact,
    weigh_short,
)

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

MAX_LENGTH = 32_768
POSITION = np.uint16(MAX_LENGTH - 1)
AHEAD = 2048


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
                    marked = accumulate(values, gradient[begin:end], *ranges, floor, scratch)
                else:
                    values[:] = gradient[begin:end]
                    if error == ERROR_DENSE:
                        for j in range(length):
                            values[j] += dense[begin + j]
                    marked = mark(values.view(np.uint32), floor, scratch.masks, 0)
                floor, margin = select(values, kept, marked, floor, margin, scratch)
                for i in range(kept):
                    indices[slot, kept_before + i] = selected[i]
                if wide:
                    for i in range(kept):
                        exact[slot, kept_before + i] = scratch.exact[i] = values[selected[i]]
                else:
                    _write_rounded(values, selected, short[slot, kept_before:kept_end])
                for i in range(kept):
                    values[selected[i]] = ZERO
                if error == ERROR_CODES:
                    key = row[KEY] if stochastic else 0
                    quantize(values, *ranges, key, begin, row[TARGET] + 4 * begin, scratch)
                elif error == ERROR_DENSE:
                    dense[begin:end] = values
                if decay != ONE:
                    for j in range(begin, end):
                        target[j] *= decay
                if window == 1 and scale[1] == ZERO:
                    _move(target[begin:end], row, short[slot, kept_before:kept_end], wide, scale[0], lr, eps, end, scratch)
                    kept_before = kept_end
                    continue
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


@njit(nogil=True, cache=True)
def _write_rounded(values, selected, short):
    """Line 8: the selected values to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    for i in range(len(short)):
        word = bits[selected[i]]
        short[i] = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@njit(nogil=True, cache=True, error_model="numpy")
def _move(target, row, short, wide, scale, lr, eps, end, scratch):
    """Lines 12–14 where the window is this step's selection and one second moment serves the tensor: η·value·scale/ε.

    If values are ``wide``, they are in the scratch memory, otherwise in ``short``.
    """
    steps, exact, words = scratch.steps, scratch.exact, scratch.exact.view(np.uint32)
    if not wide:
        for i in range(len(short)):
            words[i] = np.uint32(short[i]) << np.uint32(16)
    for i in range(len(short)):
        steps[i] = (exact[i] * scale) / eps * lr
    selected = scratch.selected
    for i in range(len(short)):
        prefetch(row[GRADIENT] + 4 * end + LINE * i)
        target[selected[i]] -= steps[i]


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
        if entry == 0:
            found += 1
            entry = found
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
                for stream in range(4):
                    for line in range(0, 4 * LANES, LINE):
                        prefetch(at + 4 * quarter * stream + AHEAD + line)
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
