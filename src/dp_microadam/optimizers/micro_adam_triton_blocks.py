"""MicroAdam's GPU kernels for lines 6–11 of Algorithm 1: the selection of every block, and its residual, written in Triton.

``find_thresholds`` is lines 6–7 and refuses gradients that are not finite, ``store_blocks`` is lines 8–11. Operations and their
order are those of the CPU kernel in ``micro_adam_kernel.py``: divisions are correctly rounded, nothing is contracted, and of
coordinates that tie the first are selected. The two therefore agree to the last bit. ``micro_adam_triton_memory.py`` describes
the tables that the kernels get.

A block is seen as its buckets, and a bucket as the two halves whose codes share bytes.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

import triton
import triton.language as tl

from dp_microadam.optimizers import micro_adam_triton_memory as memory
from dp_microadam.optimizers import quantization
from dp_microadam.optimizers.micro_adam_triton_memory import (
    BLOCK_COLUMNS,
    BOUNDS,
    DECAY,
    INDICES,
    KEPT,
    KEPT_BEFORE,
    KEY,
    LENGTH,
    NUMEL,
    POWERS,
    RESIDUAL,
    SETTING,
    START,
    STEP,
    VALUES,
    WINDOW_ROW,
)

ERROR_NONE, ERROR_CODES, ERROR_DENSE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

GOLDEN, MIX_1, MIX_2 = (tl.constexpr(word) for word in (quantization._GOLDEN, quantization._MIX_1, quantization._MIX_2))
TOP = tl.constexpr(float(quantization.LEVELS))
UNIT_24 = tl.constexpr(2.0**-24)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
REFUSED = tl.constexpr(0x7FFFFFFF)
"""In place of a magnitude: the gradient is not finite or too large. Above the bits of every number."""


@triton.jit(do_not_specialize=["tick"])
def find_thresholds(
    blocks,
    params,
    now,
    thresholds,
    refused,
    tick,
    limit,
    BUCKET: tl.constexpr,
    HALF: tl.constexpr,
    MANY: tl.constexpr,
    FEW: tl.constexpr,
    ERROR: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    GRADIENT_STRIDED: tl.constexpr,
):
    """Lines 6–7, one program per block: the smallest magnitude to keep, and how many that tie with it. Changes no state.

    Writes ``tick`` to ``refused`` if a gradient is not finite or above ``limit``. The longest block has at most ``MANY``
    buckets; short ones, of which a model has many, at most ``FEW``. ``HALF`` is half a bucket. All three are powers of two.
    """
    block = blocks + tl.program_id(0).to(tl.int64) * BLOCK_COLUMNS
    length = tl.load(block + LENGTH).to(tl.int32)
    if length <= FEW * BUCKET:
        threshold, ties = _threshold(block, params, now, limit, FEW, BUCKET, HALF, ERROR, GRADIENT_DTYPE, GRADIENT_STRIDED)
    else:
        threshold, ties = _threshold(block, params, now, limit, MANY, BUCKET, HALF, ERROR, GRADIENT_DTYPE, GRADIENT_STRIDED)
    tl.store(thresholds + 2 * tl.program_id(0), threshold)
    tl.store(thresholds + 2 * tl.program_id(0) + 1, ties)
    if threshold == REFUSED:
        tl.store(refused, tick)


@triton.jit
def _threshold(
    block,
    params,
    now,
    limit,
    BUCKETS: tl.constexpr,
    BUCKET: tl.constexpr,
    HALF: tl.constexpr,
    ERROR: tl.constexpr,
    DTYPE: tl.constexpr,
    STRIDED: tl.constexpr,
):
    """The bits of the smallest magnitude to keep, by bisection, and how many ties with it to keep.

    At least ``kept`` magnitudes reach ``floor`` and fewer reach ``ceiling``. Once exactly ``kept`` reach the floor, it
    separates them as well as the smallest of them. Magnitudes stay in registers. They are read in eight parts, so that what is
    needed only to read a part does not occupy registers for all of them at once.
    """
    PART: tl.constexpr = BUCKETS // 8
    a, largest = _magnitudes(block, params, now, limit, -1, 0 * PART, PART, BUCKET, HALF, ERROR, DTYPE, STRIDED)
    b, largest = _magnitudes(block, params, now, limit, largest, 1 * PART, PART, BUCKET, HALF, ERROR, DTYPE, STRIDED)
    c, largest = _magnitudes(block, params, now, limit, largest, 2 * PART, PART, BUCKET, HALF, ERROR, DTYPE, STRIDED)
    d, largest = _magnitudes(block, params, now, limit, largest, 3 * PART, PART, BUCKET, HALF, ERROR, DTYPE, STRIDED)
    e, largest = _magnitudes(block, params, now, limit, largest, 4 * PART, PART, BUCKET, HALF, ERROR, DTYPE, STRIDED)
    f, largest = _magnitudes(block, params, now, limit, largest, 5 * PART, PART, BUCKET, HALF, ERROR, DTYPE, STRIDED)
    g, largest = _magnitudes(block, params, now, limit, largest, 6 * PART, PART, BUCKET, HALF, ERROR, DTYPE, STRIDED)
    h, largest = _magnitudes(block, params, now, limit, largest, 7 * PART, PART, BUCKET, HALF, ERROR, DTYPE, STRIDED)
    bits = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
    kept = tl.load(block + KEPT).to(tl.int32)
    reached = tl.load(block + LENGTH).to(tl.int32)
    floor = reached * 0
    ceiling = tl.minimum(largest, REFUSED - 1) + 1
    while (ceiling - floor > 1) & (reached != kept) & (largest != REFUSED):
        middle = floor + (ceiling - floor) // 2
        found = tl.sum((bits >= middle).to(tl.int32))
        enough = found >= kept
        floor = tl.where(enough, middle, floor)
        ceiling = tl.where(enough, ceiling, middle)
        reached = tl.where(enough, found, reached)
    return tl.where(largest == REFUSED, REFUSED, floor), kept - tl.sum((bits > floor).to(tl.int32))


@triton.jit
def _magnitudes(
    block,
    params,
    now,
    limit,
    largest,
    first,
    BUCKETS: tl.constexpr,
    BUCKET: tl.constexpr,
    HALF: tl.constexpr,
    ERROR: tl.constexpr,
    DTYPE: tl.constexpr,
    STRIDED: tl.constexpr,
):
    """The bits of |gradient + residual| in some buckets, which have the order of these magnitudes, and the largest so far.

    They are -1 outside of the block and ``REFUSED`` where a gradient is not within ``limit``.
    """
    bits = tl.full([BUCKETS, HALF, 2], -1, tl.int32)
    length = tl.load(block + LENGTH).to(tl.int32)
    if first * BUCKET < length:
        param, current = memory.rows_of(block, params, now)
        start, bucket = tl.load(block + START), first + tl.arange(0, BUCKETS)
        low, high, in_low, in_high = _halves(bucket, length, BUCKET, HALF)
        given_low = memory.gradient_at(param, current, start, low, in_low, DTYPE, STRIDED)
        given_high = memory.gradient_at(param, current, start, high, in_high, DTYPE, STRIDED)
        sum_low, sum_high = _add_residual(given_low, given_high, param, start, length, bucket, BUCKET, HALF, ERROR)
        left = tl.where(tl.abs(given_low) <= limit, _bits(sum_low, in_low), REFUSED)
        right = tl.where(tl.abs(given_high) <= limit, _bits(sum_high, in_high), REFUSED)
        bits = tl.join(left, right)
    return bits, tl.maximum(largest, tl.max(bits))


@triton.jit
def store_blocks(
    blocks,
    params,
    now,
    settings,
    thresholds,
    WINDOW: tl.constexpr,
    BUCKET: tl.constexpr,
    HALF: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ERROR: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WIDE: tl.constexpr,
    DTYPE: tl.constexpr,
    STRIDED: tl.constexpr,
    GRADIENT_DTYPE: tl.constexpr,
    GRADIENT_STRIDED: tl.constexpr,
):
    """Lines 8–11 and weight decay, one program per block, ``AT_ONCE`` of its buckets at a time."""
    block = blocks + tl.program_id(0).to(tl.int64) * BLOCK_COLUMNS
    start, length = tl.load(block + START), tl.load(block + LENGTH).to(tl.int32)
    param, current = memory.rows_of(block, params, now)
    threshold = tl.load(thresholds + 2 * tl.program_id(0))
    ties = tl.load(thresholds + 2 * tl.program_id(0) + 1).to(tl.uint32)
    slot = (tl.load(current + STEP) - 1) % WINDOW * tl.load(param + WINDOW_ROW) + tl.load(block + KEPT_BEFORE)
    decay = tl.load(settings + tl.load(param + SETTING) * (POWERS + 2 * WINDOW) + DECAY)
    key = tl.load(current + KEY).to(tl.uint64)
    before = (length * 0).to(tl.uint32)
    for first in range(0, (length + (BUCKET - 1)) // BUCKET, AT_ONCE):
        bucket = first + tl.arange(0, AT_ONCE)
        low, high, in_low, in_high = _halves(bucket, length, BUCKET, HALF)
        left = memory.gradient_at(param, current, start, low, in_low, GRADIENT_DTYPE, GRADIENT_STRIDED)
        right = memory.gradient_at(param, current, start, high, in_high, GRADIENT_DTYPE, GRADIENT_STRIDED)
        left, right = _add_residual(left, right, param, start, length, bucket, BUCKET, HALF, ERROR)
        # Everything of these buckets is read before any of it is overwritten, also by threads that repeat others' work.
        tl.debug_barrier()

        # Counts of larger magnitudes in the upper half of a word and of ties in the lower; both reach 32,768 at most.
        bits_low, bits_high = _bits(left, in_low), _bits(right, in_high)
        marks_low, marks_high = _marks(bits_low, threshold), _marks(bits_high, threshold)
        in_first_half = tl.sum(marks_low, axis=1)
        in_bucket = in_first_half + tl.sum(marks_high, axis=1)
        ahead = (tl.cumsum(in_bucket, axis=0) - in_bucket + before)[:, None]
        before += tl.sum(in_bucket, axis=0)
        chosen_low, rank_low = _ranks(tl.cumsum(marks_low, axis=1) + ahead, bits_low, threshold, ties)
        ahead += in_first_half[:, None]
        chosen_high, rank_high = _ranks(tl.cumsum(marks_high, axis=1) + ahead, bits_high, threshold, ties)
        _write_window(param, slot + rank_low, low, left, chosen_low, WIDE)
        _write_window(param, slot + rank_high, high, right, chosen_high, WIDE)

        left, right = tl.where(chosen_low, 0.0, left), tl.where(chosen_high, 0.0, right)  # line 9
        if ERROR == ERROR_CODES:
            _quantize(left, right, param, start, length, bucket, key, BUCKET, HALF, STOCHASTIC)
        elif ERROR == ERROR_DENSE:
            dense = tl.load(param + RESIDUAL).to(tl.pointer_type(tl.float32)) + start
            tl.store(dense + low, left, mask=in_low)
            tl.store(dense + high, right, mask=in_high)
        if decay != 1.0:
            _decay(param, start, low, in_low, decay, DTYPE, STRIDED)
            _decay(param, start, high, in_high, decay, DTYPE, STRIDED)


@triton.jit
def _halves(bucket, length, BUCKET: tl.constexpr, HALF: tl.constexpr):
    """Coordinates, within their block, of the two halves of buckets, and which of them exist."""
    inner = tl.arange(0, HALF)[None, :]
    size = tl.minimum(tl.maximum(length - bucket * BUCKET, 0), BUCKET)[:, None]
    half = (size + 1) // 2
    low = bucket[:, None] * BUCKET + inner
    return low, low + half, inner < half, inner < size - half


@triton.jit
def _codes_at(param, start, bucket, HALF: tl.constexpr, BUCKET: tl.constexpr):
    """Pointers to the codes of buckets."""
    codes = tl.load(param + RESIDUAL).to(tl.pointer_type(tl.uint8)) + start // 2
    return codes + (bucket[:, None] * (BUCKET // 2) + tl.arange(0, HALF)[None, :])


@triton.jit
def _bounds_at(param, start, bucket, BUCKET: tl.constexpr):
    """Pointers to the smallest and the largest residual of buckets."""
    lowers = tl.load(param + BOUNDS).to(tl.pointer_type(tl.float32)) + start // BUCKET
    return lowers + bucket, lowers + (tl.load(param + NUMEL) + (BUCKET - 1)) // BUCKET + bucket


@triton.jit
def _add_residual(left, right, param, start, length, bucket, BUCKET: tl.constexpr, HALF: tl.constexpr, ERROR: tl.constexpr):
    """Line 6, for both halves of some buckets."""
    low, high, in_low, in_high = _halves(bucket, length, BUCKET, HALF)
    if ERROR == ERROR_CODES:
        lowers, uppers = _bounds_at(param, start, bucket, BUCKET)
        some = bucket * BUCKET < length
        lower = tl.load(lowers, mask=some, other=0.0)
        unit = tl.math.div_rn(tl.load(uppers, mask=some, other=0.0) - lower, TOP)[:, None]
        codes = tl.load(_codes_at(param, start, bucket, HALF, BUCKET), mask=in_low, other=0)
        left += (codes & 15).to(tl.float32) * unit + lower[:, None]
        right += (codes >> 4).to(tl.float32) * unit + lower[:, None]
    elif ERROR == ERROR_DENSE:
        dense = tl.load(param + RESIDUAL).to(tl.pointer_type(tl.float32)) + start
        left += tl.load(dense + low, mask=in_low, other=0.0)
        right += tl.load(dense + high, mask=in_high, other=0.0)
    return left, right


@triton.jit
def _quantize(
    left, right, param, start, length, bucket, key, BUCKET: tl.constexpr, HALF: tl.constexpr, STOCHASTIC: tl.constexpr
):
    """Lines 10–11: bounds and packed 4-bit codes of both halves of some buckets."""
    low, high, in_low, in_high = _halves(bucket, length, BUCKET, HALF)
    least, most = float("inf"), float("-inf")
    lower = tl.minimum(tl.min(tl.where(in_low, left, least), axis=1), tl.min(tl.where(in_high, right, least), axis=1))
    upper = tl.maximum(tl.max(tl.where(in_low, left, most), axis=1), tl.max(tl.where(in_high, right, most), axis=1))
    lowers, uppers = _bounds_at(param, start, bucket, BUCKET)
    tl.store(lowers, lower, mask=bucket * BUCKET < length)
    tl.store(uppers, upper, mask=bucket * BUCKET < length)
    unit = tl.math.div_rn(upper - lower, TOP)[:, None]
    code_low = _codes(left - lower[:, None], unit, in_low, key, start + low, STOCHASTIC)
    code_high = _codes(right - lower[:, None], unit, in_high, key, start + high, STOCHASTIC)
    tl.store(_codes_at(param, start, bucket, HALF, BUCKET), (code_low | (code_high << 4)).to(tl.uint8), mask=in_low)


@triton.jit
def _codes(above, unit, inside, key, coordinate, STOCHASTIC: tl.constexpr):
    """Rounded to the nearest, or with the numbers of ``quantization.rounding_offsets``; 0 in buckets that are constant."""
    offsets = 0.5
    if STOCHASTIC:
        word = (coordinate + 1).to(tl.uint64) * GOLDEN + key
        word = (word ^ (word >> 30)) * MIX_1
        word = (word ^ (word >> 27)) * MIX_2
        word = word ^ (word >> 31)
        offsets = (word >> 40).to(tl.int32).to(tl.float32) * UNIT_24
    levels = tl.minimum(tl.math.div_rn(above, tl.where(unit == 0.0, 1.0, unit)) + offsets, TOP)
    return tl.where(inside & (unit != 0.0), levels, 0.0).to(tl.int32)


@triton.jit
def _bits(values, inside):
    """The bits of |values|, which have the order of the magnitudes; -1 outside of the block."""
    return tl.where(inside, values.to(tl.int32, bitcast=True) & MAGNITUDE, -1)


@triton.jit
def _marks(bits, threshold):
    return tl.where(bits > threshold, 65536, tl.where(bits == threshold, 1, 0)).to(tl.uint32)


@triton.jit
def _ranks(counts, bits, threshold, ties):
    """Which coordinates are selected, the first of those that tie, and the place of each in the row of the window."""
    tied = counts & 65535
    chosen = (bits > threshold) | ((bits == threshold) & (tied <= ties))
    return chosen, ((counts >> 16) + tl.minimum(tied, ties)).to(tl.int32) - 1


@triton.jit
def _write_window(param, place, position, values, chosen, WIDE: tl.constexpr):
    """Line 8."""
    tl.store(tl.load(param + INDICES).to(tl.pointer_type(tl.int16)) + place, position.to(tl.int16), mask=chosen)
    address = tl.load(param + VALUES)
    if WIDE:
        tl.store(address.to(tl.pointer_type(tl.float32)) + place, values, mask=chosen)
    else:
        tl.store(address.to(tl.pointer_type(tl.uint16)) + place, memory.bfloat16_bits(values), mask=chosen)


@triton.jit
def _decay(param, start, position, inside, decay, DTYPE: tl.constexpr, STRIDED: tl.constexpr):
    places = memory.targets_at(param, start, position, DTYPE, STRIDED)
    old = memory.read(places, inside, DTYPE)
    memory.write(places, old * decay.to(old.dtype), inside, DTYPE)
