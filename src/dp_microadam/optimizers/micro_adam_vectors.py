"""Vector instructions of MicroAdam's CPU kernel, written in LLVM's portable intermediate representation.

Numba does not vectorize all loops as one would wish: it checks indices for signs and arrays for overlap, and a loop over one
bucket of 128 coordinates is too short to pay for that. Each function here works on 16 to 128 numbers at once, and LLVM splits
them into the widest registers that the machine has. Nothing may be reassociated or contracted, except where stated.

Numba caches compiled functions by the file that they are in: after a change here, delete the caches (``*.nbi``) of the files
that use this one.

Arguments are addresses. Loads and stores assume no alignment beyond that of one element.
"""

# mypy: disable-error-code="no-untyped-def, misc, import-untyped"

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 64
"""Coordinates per half bucket that a function takes; also the bits of a mask."""

LINE = 64
"""Bytes of a cache line."""

NARROW = 16
"""Entries of the window that a function takes."""

MAGNITUDE = np.uint32(0x7FFFFFFF)
"""Without the sign bit, float32 numbers have the order of their bits as integers."""

ENCODE_DOUBT = 1e-5
"""More than the error of :func:`encode_nearest`, in units between neighbouring codes."""

_FLOAT, _BYTE, _WORD, _ADDRESS = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _load(builder, address, element, lanes, offset=0):
    pointer = builder.inttoptr(builder.add(address, _ADDRESS(offset)), ir.VectorType(element, lanes).as_pointer())
    return builder.load(pointer, align=element.width // 8 if isinstance(element, ir.IntType) else 4)


def _store(builder, value, address, align):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def _constant(element, value, lanes):
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def _repeat(builder, value, lanes):
    """A vector with ``value`` in every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    one = builder.insert_element(undefined, value, _WORD(0))
    return builder.shuffle_vector(one, undefined, _constant(_WORD, 0, lanes))


def _bits_of(builder, flags):
    return builder.bitcast(flags, ir.IntType(flags.type.count))


@intrinsic
def pointer(typing_context, address):
    """An integer address as a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def prefetch(typing_context, address):
    """Ask for the cache line at ``address``, which need not be valid, to be brought into the second-level cache."""

    def generate(context, builder, signature, arguments):
        where = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [where.type, _WORD, _WORD, _WORD])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [where, _WORD(0), _WORD(2), _WORD(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def lowest_bit(typing_context, mask):
    """The position of the lowest bit that is set; 64 if there is none."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.IntType(1)(0))

    return types.int64(types.uint64), generate


@intrinsic
def count_bits(typing_context, mask):
    """How many bits are set."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


def _reaching(builder, words, floor):
    magnitudes = builder.and_(words, _constant(_WORD, int(MAGNITUDE), LANES))
    return _bits_of(builder, builder.icmp_unsigned(">=", magnitudes, _repeat(builder, floor, LANES)))


@intrinsic
def reaching(typing_context, values, floor):
    """A mask of those of 64 float32 numbers whose magnitude, as bits, is at least ``floor``."""

    def generate(context, builder, signature, arguments):
        return _reaching(builder, _load(builder, arguments[0], _WORD, LANES), arguments[1])

    return types.uint64(types.int64, types.uint32), generate


@intrinsic
def decode(typing_context, codes, gradient, values, half, unit, lower, floor):
    """Line 6: ``values = gradient + (code · unit + lower)`` for the 128 codes in 64 bytes.

    The second 64 numbers of ``gradient`` and ``values`` begin ``half`` bytes after the first. Returns the masks of both.
    """

    def generate(context, builder, signature, arguments):
        codes, gradient, values, half, unit, lower, floor = arguments
        packed = _load(builder, codes, _BYTE, LANES)
        low, high = builder.and_(packed, _constant(_BYTE, 15, LANES)), builder.lshr(packed, _constant(_BYTE, 4, LANES))
        unit, lower = _repeat(builder, unit, LANES), _repeat(builder, lower, LANES)
        masks = []
        for code, offset in ((low, _ADDRESS(0)), (high, half)):
            number = builder.uitofp(builder.zext(code, ir.VectorType(_WORD, LANES)), ir.VectorType(_FLOAT, LANES))
            error = builder.fadd(builder.fmul(number, unit), lower)
            total = builder.fadd(_load(builder, builder.add(gradient, offset), _FLOAT, LANES), error)
            _store(builder, total, builder.add(values, offset), 4)
            masks.append(_reaching(builder, builder.bitcast(total, ir.VectorType(_WORD, LANES)), floor))
        return context.make_tuple(builder, signature.return_type, masks)

    arguments = (*[types.int64] * 4, types.float32, types.float32, types.uint32)
    return types.UniTuple(types.uint64, 2)(*arguments), generate


def _fold(builder, vector, comparison):
    """The smallest (``<``) or largest (``>``) lane; there are no NaNs, and the order of comparisons does not matter."""
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        halves = [
            builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_WORD, lanes), list(range(start, start + lanes))))
            for start in (0, lanes)
        ]
        vector = builder.select(builder.fcmp_ordered(comparison, *halves), *halves)
    return builder.extract_element(vector, _WORD(0))


@intrinsic
def extremes(typing_context, values):
    """The smallest and the largest of 128 float32 numbers."""

    def generate(context, builder, signature, arguments):
        vector = _load(builder, arguments[0], _FLOAT, 2 * LANES)
        ends = [_fold(builder, vector, comparison) for comparison in "<>"]
        return context.make_tuple(builder, signature.return_type, ends)

    return types.UniTuple(types.float32, 2)(types.int64), generate


def _encode(builder, values, offsets, codes, half, inverse, start):
    vector, words = ir.VectorType(_FLOAT, LANES), ir.VectorType(_WORD, LANES)
    kind = ir.FunctionType(vector, [vector] * 3)
    multiply_add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
    doubt = _FLOAT(ENCODE_DOUBT)
    ends = [_repeat(builder, builder.fsub(start, doubt), LANES), _repeat(builder, builder.fadd(start, doubt), LANES)]
    inverse = _repeat(builder, inverse, LANES)
    found, differences = [], []
    for shift in (_ADDRESS(0), half):
        value = _load(builder, builder.add(values, shift), _FLOAT, LANES)
        if offsets is None:
            sums = [builder.call(multiply_add, [value, inverse, end]) for end in ends]
        else:
            total = builder.call(multiply_add, [value, inverse, _load(builder, builder.add(offsets, shift), _FLOAT, LANES)])
            sums = [builder.fadd(total, end) for end in ends]
        lower, upper = (builder.fptosi(each, words) for each in sums)
        found.append(lower)
        differences.append(builder.xor(lower, upper))
    both = builder.or_(found[0], builder.shl(found[1], _constant(_WORD, 4, LANES)))
    _store(builder, builder.trunc(both, ir.VectorType(_BYTE, LANES)), codes, 1)
    return _bits_of(builder, builder.icmp_unsigned("!=", builder.or_(*differences), _constant(_WORD, 0, LANES)))


@intrinsic
def encode_nearest(typing_context, values, codes, half, inverse, start):
    """Line 11: 128 codes ⌊value · inverse + start⌋ in 64 bytes, and which of them are in doubt, as a mask of bytes.

    ``start`` is ½ − lower · inverse. Instead of dividing by u as ``quantization.quantize`` does, this multiplies by its rounded
    inverse, and the compiler may fuse multiplication and addition. If lower ≤ 0 ≤ upper, the difference is below ENCODE_DOUBT:
    no number that occurs is above 16, so none of the ten roundings of both ways is off by more than 2⁻²¹. A code is therefore
    certain if it stays the same when ENCODE_DOUBT is subtracted and added.
    """

    def generate(context, builder, signature, arguments):
        values, codes, half, inverse, start = arguments
        return _encode(builder, values, None, codes, half, inverse, start)

    return types.uint64(*[types.int64] * 3, types.float32, types.float32), generate


@intrinsic
def encode_randomly(typing_context, values, offsets, codes, half, inverse, start):
    """The same with ``offsets`` in place of ½; ``start`` is −lower · inverse."""

    def generate(context, builder, signature, arguments):
        return _encode(builder, *arguments)

    return types.uint64(*[types.int64] * 4, types.float32, types.float32), generate


def _weigh(builder, values, products, power_1, power_2):
    first = builder.fmul(values, _repeat(builder, power_1, NARROW))
    second = builder.fmul(builder.fmul(values, values), _repeat(builder, power_2, NARROW))
    turns = [lane + start for lane in range(NARROW) for start in (0, NARROW)]
    pairs = builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_WORD, 2 * NARROW), turns))
    _store(builder, pairs, products, 4)


@intrinsic
def weigh_exact(typing_context, values, products, power_1, power_2):
    """Lines 12–13 for 16 float32 values of the window: the pairs value · power_1, value² · power_2."""

    def generate(context, builder, signature, arguments):
        _weigh(builder, _load(builder, arguments[0], _FLOAT, NARROW), *arguments[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.float32), generate


@intrinsic
def weigh_short(typing_context, values, products, power_1, power_2):
    """The same for bfloat16 values, which are the upper halves of float32 ones."""

    def generate(context, builder, signature, arguments):
        upper = builder.zext(_load(builder, arguments[0], ir.IntType(16), NARROW), ir.VectorType(_WORD, NARROW))
        words = builder.shl(upper, _constant(_WORD, 16, NARROW))
        _weigh(builder, builder.bitcast(words, ir.VectorType(_FLOAT, NARROW)), *arguments[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.float32), generate


@intrinsic
def add_pair(typing_context, total, addend):
    """Add two neighbouring float32 numbers to two others."""

    def generate(context, builder, signature, arguments):
        one, other = (_load(builder, address, _FLOAT, 2) for address in arguments)
        _store(builder, builder.fadd(one, other), arguments[0], 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def step_sizes(typing_context, sums, steps, scale_1, scale_2, lr, eps):
    """Line 14 for 16 coordinates: from pairs of sums, η · m̂ / (√v̂ + ε)."""

    def generate(context, builder, signature, arguments):
        sums, steps = arguments[:2]
        scale_1, scale_2, lr, eps = (_repeat(builder, each, NARROW) for each in arguments[2:])
        vector = ir.VectorType(_FLOAT, NARROW)
        square_root = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector]), f"llvm.sqrt.v{NARROW}f32"
        )
        pairs = _load(builder, sums, _FLOAT, 2 * NARROW)
        first, second = (
            builder.shuffle_vector(pairs, pairs, ir.Constant(ir.VectorType(_WORD, NARROW), list(range(start, 2 * NARROW, 2))))
            for start in (0, 1)
        )
        divisor = builder.fadd(builder.call(square_root, [builder.fmul(second, scale_2)]), eps)
        _store(builder, builder.fmul(builder.fdiv(builder.fmul(first, scale_1), divisor), lr), steps, 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, *[types.float32] * 4), generate


@intrinsic
def any_above(typing_context, first, second, third, fourth, limit):
    """Whether, of 64 float32 numbers at each of four addresses, the magnitude of one is above ``limit``, or one is NaN."""

    def generate(context, builder, signature, arguments):
        words = ir.VectorType(_WORD, LANES)
        largest = ir.Constant(words, None)
        for address in arguments[:4]:
            magnitudes = builder.and_(_load(builder, address, _WORD, LANES), _constant(_WORD, int(MAGNITUDE), LANES))
            largest = builder.select(builder.icmp_unsigned(">", largest, magnitudes), largest, magnitudes)
        return _bits_of(builder, builder.icmp_unsigned(">", largest, _repeat(builder, arguments[4], LANES)))

    return types.uint64(*[types.int64] * 4, types.uint32), generate
