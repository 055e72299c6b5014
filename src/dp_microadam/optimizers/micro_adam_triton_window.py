"""MicroAdam's GPU kernel for lines 12–14 of Algorithm 1: the step that follows from the window, written in Triton.

Operations and their order are those of the CPU kernel in ``micro_adam_kernel.py``; see ``micro_adam_triton_blocks.py``.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

import triton
import triton.language as tl

from dp_microadam.optimizers import micro_adam_triton_memory as memory
from dp_microadam.optimizers.micro_adam_triton_memory import (
    BLOCK_COLUMNS,
    EPS,
    INDICES,
    KEPT,
    KEPT_BEFORE,
    LENGTH,
    LR,
    POWERS,
    SCALE_1,
    SCALE_2,
    SETTING,
    START,
    STEP,
    VALUES,
    WINDOW_ROW,
)


@triton.jit(do_not_specialize=["count"])
def apply_window(
    blocks,
    params,
    now,
    settings,
    moments,
    count,
    WINDOW: tl.constexpr,
    LONGEST: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDE: tl.constexpr,
    DTYPE: tl.constexpr,
    STRIDED: tl.constexpr,
):
    """Lines 12–14 for the coordinates in the window; a program takes one block after the other.

    ``moments`` holds both sums for the coordinates of one block per program, zero before and after. Within a row of the window
    coordinates differ, so threads do not meet; barriers keep the rows in order, which decides how sums are rounded.
    """
    firsts = moments + tl.program_id(0).to(tl.int64) * (2 * LONGEST)
    seconds = firsts + 1
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        block = blocks + number * BLOCK_COLUMNS
        start, length = tl.load(block + START), tl.load(block + LENGTH).to(tl.int32)
        kept, kept_before = tl.load(block + KEPT).to(tl.int32), tl.load(block + KEPT_BEFORE)
        param, current = memory.rows_of(block, params, now)
        setting = settings + tl.load(param + SETTING) * (POWERS + 2 * WINDOW)
        lr, eps = tl.load(setting + LR).to(tl.float32), tl.load(setting + EPS).to(tl.float32)
        scale_1 = tl.load(current + SCALE_1).to(tl.int32).to(tl.float32, bitcast=True)
        scale_2 = tl.load(current + SCALE_2).to(tl.int32).to(tl.float32, bitcast=True)
        step, row = tl.load(current + STEP), tl.load(param + WINDOW_ROW)
        newest, filled = ((step - 1) % WINDOW).to(tl.int32), tl.minimum(step, WINDOW).to(tl.int32)
        for line in range(filled):
            age = (newest - line + WINDOW) % WINDOW
            power_1 = tl.load(setting + POWERS + age).to(tl.float32)
            power_2 = tl.load(setting + POWERS + WINDOW + age).to(tl.float32)
            for begin in range(0, kept, ENTRIES):
                entry = begin + tl.arange(0, ENTRIES)
                place = line * row + kept_before + entry
                position, inside = _window_position(param, place, entry < kept, length)
                value = _window_value(param, place, inside, WIDE)
                first = tl.load(firsts + 2 * position, mask=inside, other=0.0) + value * power_1
                second = tl.load(seconds + 2 * position, mask=inside, other=0.0) + (value * value) * power_2
                tl.debug_barrier()
                tl.store(firsts + 2 * position, first, mask=inside)
                tl.store(seconds + 2 * position, second, mask=inside)
            tl.debug_barrier()
        for line in range(filled):
            for begin in range(0, kept, ENTRIES):
                entry = begin + tl.arange(0, ENTRIES)
                position, inside = _window_position(param, line * row + kept_before + entry, entry < kept, length)
                first = tl.load(firsts + 2 * position, mask=inside, other=0.0)
                second = tl.load(seconds + 2 * position, mask=inside, other=0.0)
                # A coordinate can be in several rows; after the first of them its sums are zero.
                moved = inside & (first != 0.0)
                places = memory.targets_at(param, start, position, DTYPE, STRIDED)
                old = memory.read(places, moved, DTYPE)
                tl.debug_barrier()
                change = tl.math.div_rn(first * scale_1, tl.math.sqrt_rn(second * scale_2) + eps) * lr
                memory.write(places, old - change, moved, DTYPE)
                tl.store(firsts + 2 * position, tl.zeros_like(first), mask=inside)
                tl.store(seconds + 2 * position, tl.zeros_like(first), mask=inside)
            tl.debug_barrier()


@triton.jit
def _window_position(param, place, there, length):
    """Coordinates in a row of the window, and which to use: memory can be written by others, so those outside are skipped."""
    position = tl.load(tl.load(param + INDICES).to(tl.pointer_type(tl.int16)) + place, mask=there, other=-1).to(tl.int32)
    return position, (position >= 0) & (position < length)


@triton.jit
def _window_value(param, place, inside, WIDE: tl.constexpr):
    address = tl.load(param + VALUES)
    if WIDE:
        found = tl.load(address.to(tl.pointer_type(tl.float32)) + place, mask=inside, other=0.0)
    else:
        found = memory.bfloat16_values(tl.load(address.to(tl.pointer_type(tl.uint16)) + place, mask=inside, other=0))
    return found
