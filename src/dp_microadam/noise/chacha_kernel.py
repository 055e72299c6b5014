"""Triton kernels that draw normal numbers on the device from ChaCha20, as ``chacha.py`` does in NumPy.

The key is passed as eight integers, so that it needs no copy to the device and is not left in its memory. They are not
specialised on: their values enter neither the compiled code nor the name it is stored under.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call, misc"

import triton
import triton.language as tl

_KEY = ["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"]


@triton.jit(do_not_specialize=["first", *_KEY, "n1", "n2"])
def write_blocks(out, first, k0, k1, k2, k3, k4, k5, k6, k7, n1, n2, lanes: tl.constexpr):
    """The words of blocks ``first``, ``first`` + 1, …, ``lanes`` of them per program; to verify the block function."""
    lane = tl.program_id(0).to(tl.int64) * lanes + tl.arange(0, lanes)
    words = _block(first.to(tl.int64) + lane, k0, k1, k2, k3, k4, k5, k6, k7, n1, n2)
    for place in tl.static_range(16):
        tl.store(out + lane * 16 + place, words[place].to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["count", *_KEY])
def write_normals(out, count, k0, k1, k2, k3, k4, k5, k6, k7, lanes: tl.constexpr):
    """``count`` standard normal numbers, computed in double and rounded to the dtype of ``out``; 8·``lanes`` per program."""
    group = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, lanes)
    words = _block(group * lanes + lane, k0, k1, k2, k3, k4, k5, k6, k7, k0 * 0, k0 * 0)
    for pair in tl.static_range(4):
        # 1 − u is exact, and never zero.
        radius = tl.sqrt(-2.0 * tl.log(1.0 - _uniform(words[4 * pair], words[4 * pair + 1])))
        angle = _uniform(words[4 * pair + 2], words[4 * pair + 3]) * 6.283185307179586
        at = group * (8 * lanes) + 2 * pair * lanes + lane
        tl.store(out + at, (radius * tl.cos(angle)).to(out.dtype.element_ty), mask=at < count)
        at += lanes
        tl.store(out + at, (radius * tl.sin(angle)).to(out.dtype.element_ty), mask=at < count)


@triton.jit
def _block(number, k0, k1, k2, k3, k4, k5, k6, k7, n1, n2):
    """The sixteen words of block ``number``, of 64 bits, of each lane."""
    low = number.to(tl.uint32)
    high = (number >> 32).to(tl.uint32)
    zero = low * 0
    i0, i1, i2, i3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    j0, j1, j2, j3 = _word(zero, k0), _word(zero, k1), _word(zero, k2), _word(zero, k3)
    j4, j5, j6, j7 = _word(zero, k4), _word(zero, k5), _word(zero, k6), _word(zero, k7)
    m1, m2 = _word(zero, n1), _word(zero, n2)
    a0, a1, a2, a3, b0, b1, b2, b3 = i0, i1, i2, i3, j0, j1, j2, j3
    c0, c1, c2, c3, d0, d1, d2, d3 = j4, j5, j6, j7, low, high, m1, m2
    for _ in range(10):
        a0, b0, c0, d0 = _quarter_round(a0, b0, c0, d0)
        a1, b1, c1, d1 = _quarter_round(a1, b1, c1, d1)
        a2, b2, c2, d2 = _quarter_round(a2, b2, c2, d2)
        a3, b3, c3, d3 = _quarter_round(a3, b3, c3, d3)
        a0, b1, c2, d3 = _quarter_round(a0, b1, c2, d3)
        a1, b2, c3, d0 = _quarter_round(a1, b2, c3, d0)
        a2, b3, c0, d1 = _quarter_round(a2, b3, c0, d1)
        a3, b0, c1, d2 = _quarter_round(a3, b0, c1, d2)
    a0, a1, a2, a3, b0, b1, b2, b3 = a0 + i0, a1 + i1, a2 + i2, a3 + i3, b0 + j0, b1 + j1, b2 + j2, b3 + j3
    c0, c1, c2, c3, d0, d1, d2, d3 = c0 + j4, c1 + j5, c2 + j6, c3 + j7, d0 + low, d1 + high, d2 + m1, d3 + m2
    return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3


@triton.jit
def _quarter_round(a, b, c, d):
    a += b
    d = _rotated(d ^ a, 16)
    c += d
    b = _rotated(b ^ c, 12)
    a += b
    d = _rotated(d ^ a, 8)
    c += d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _rotated(word, bits: tl.constexpr):
    return (word << bits) | (word >> (32 - bits))


@triton.jit
def _word(zero, value):
    """A word of every lane, from a signed integer of 32 bits."""
    return zero + value.to(tl.uint32, bitcast=True)


@triton.jit
def _uniform(low, high):
    """Multiples of 2⁻⁵³ in [0, 1) from two words."""
    return (((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11).to(tl.float64) * 1.1102230246251565e-16
