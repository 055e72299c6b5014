"""How MicroAdam's GPU kernels find and read tensors: tables of addresses, strides and dtypes, for kernels written in Triton.

Tensors are found by address. Three tables of int64 describe them: ``blocks`` and ``params`` are made once for a list of
parameters, ``now`` in every step; a fourth of float64, ``settings``, has a row per parameter group.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"
# ruff: noqa: SIM108, SIM300 (constants of a kernel decide what is compiled; both branches would have to be valid in an expression)

import triton
import triton.language as tl

# Columns of ``blocks``: the parameter's row in the other tables; the block's first coordinate, its length, how many coordinates
# a step keeps, and where these begin in a row of the window.
PARAM, START, LENGTH, KEPT, KEPT_BEFORE = (tl.constexpr(column) for column in range(5))
BLOCK_COLUMNS = tl.constexpr(5)

# Columns of ``params``: addresses of parameter and state, sizes, the row in ``settings``, and for parameters that are not
# contiguous the sizes of their last four dimensions and the strides of all five.
TARGET, RESIDUAL, BOUNDS, INDICES, VALUES, NUMEL, WINDOW_ROW, SETTING = (tl.constexpr(column) for column in range(8))
SIZES, TARGET_STRIDES = tl.constexpr(8), tl.constexpr(12)
PARAM_COLUMNS = tl.constexpr(17)

# Columns of ``now``: the gradient's address, the number of this step, the key of stochastic rounding, the bits of both bias
# corrections, and the gradient's strides.
GRADIENT, STEP, KEY, SCALE_1, SCALE_2, GRADIENT_STRIDES = (tl.constexpr(column) for column in range(6))
NOW_COLUMNS = tl.constexpr(10)

# Columns of ``settings``: learning rate, ε, the factor of weight decay, then the powers of β₁ and of β₂ by age.
LR, EPS, DECAY, POWERS = (tl.constexpr(column) for column in range(4))


@triton.jit
def rows_of(block, params, now):
    """The rows of a block's parameter in ``params`` and in ``now``."""
    number = tl.load(block + PARAM)
    return params + number * PARAM_COLUMNS, now + number * NOW_COLUMNS


@triton.jit
def gradient_at(param, current, start, position, inside, DTYPE: tl.constexpr, STRIDED: tl.constexpr):
    """The gradient of coordinates of a block, in float32."""
    address, sizes, strides = tl.load(current + GRADIENT), param + SIZES, current + GRADIENT_STRIDES
    return read(places_of(address, start, position, sizes, strides, DTYPE, STRIDED), inside, DTYPE).to(tl.float32)


@triton.jit
def targets_at(param, start, position, DTYPE: tl.constexpr, STRIDED: tl.constexpr):
    """Pointers to the weights of coordinates of a block."""
    return places_of(tl.load(param + TARGET), start, position, param + SIZES, param + TARGET_STRIDES, DTYPE, STRIDED)


@triton.jit
def places_of(address, start, position, sizes, strides, DTYPE: tl.constexpr, STRIDED: tl.constexpr):
    """Pointers to the coordinates ``start + position`` of a tensor, counted in the order of its dimensions."""
    if DTYPE == tl.bfloat16:
        base = address.to(tl.pointer_type(tl.uint16))
    else:
        base = address.to(tl.pointer_type(DTYPE))
    if STRIDED:
        # 32 bits count the coordinates, since dividing 64 takes many instructions; strides can lead further.
        rest = (start.to(tl.int32) + position).to(tl.uint32)
        places = base + tl.zeros_like(position)
        for dimension in tl.static_range(3, -1, -1):
            size = tl.load(sizes + dimension).to(tl.uint32)
            above = rest // size
            places += (rest - above * size).to(tl.int32) * tl.load(strides + dimension + 1)
            rest = above
        places += rest.to(tl.int32) * tl.load(strides)
    else:
        places = base + start + position
    return places


@triton.jit
def read(places, inside, DTYPE: tl.constexpr):
    """Values in the precision to compute with: float64 for float64, else float32; 0 where not ``inside``."""
    if DTYPE == tl.bfloat16:
        found = bfloat16_values(tl.load(places, mask=inside, other=0))
    elif DTYPE == tl.float64:
        found = tl.load(places, mask=inside, other=0.0)
    else:
        found = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    return found


@triton.jit
def write(places, values, inside, DTYPE: tl.constexpr):
    """Store values in the dtype of the tensor, rounded to the nearest."""
    if DTYPE == tl.bfloat16:
        tl.store(places, bfloat16_bits(values), mask=inside)
    else:
        tl.store(places, values.to(DTYPE), mask=inside)


@triton.jit
def bfloat16_bits(values):
    """Bits of the nearest bfloat16, ties to even. Written out because Triton's interpreter rounds ties away from zero."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values == values, rounded, 0x7FC0).to(tl.uint16)


@triton.jit
def bfloat16_values(bits):
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
