"""A Triton kernel for squared norms of sums of outer products, ‖Σₜ δᵢₜaᵢₜᵀ‖², on CUDA devices.

Each program forms one tile of one example's gradient in registers, squares it and stores one number; neither the gradient nor
a Gram matrix is ever in memory. The same launch yields ‖aᵢ‖² and ‖δᵢ‖², by which the norm is judged (``outer_product.py``).
Partial sums are stored and added up by torch, never atomically, so that a result is the same in every run.

The slow twin is the strategy "drop", which forms the same gradients in memory; a test compares the two in Triton's
interpreter. The kernel is part of the extra ``gpu``; nothing imports this module without it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

POSITIONS, INPUTS, OUTPUTS = 16, 64, 64
"""A tile: 64×64 sums in registers, 16 positions loaded at a time."""

WARPS = 8


@triton.jit
def tile_squares(  # type: ignore[no-untyped-def]  # the compiler reads annotations of arguments
    a,
    d,
    out,
    positions,
    n_in,
    n_out,
    a_example,
    a_position,
    a_feature,
    d_example,
    d_position,
    d_feature,
    POSITIONS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
) -> None:
    """Stores (‖tile‖², ‖a‖² of its columns, ‖δ‖² of its rows) for one tile of one example.

    ‖a‖² is stored by the tiles of the first rows and ‖δ‖² by those of the first columns, zero by others: all add up over tiles.
    """
    across = tl.cdiv(n_in, INPUTS)
    tiles = across * tl.cdiv(n_out, OUTPUTS)
    example = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    o = tile // across * OUTPUTS + tl.arange(0, OUTPUTS)
    i = tile % across * INPUTS + tl.arange(0, INPUTS)
    sums = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    a_squares = tl.zeros([POSITIONS, INPUTS], tl.float32)
    d_squares = tl.zeros([OUTPUTS, POSITIONS], tl.float32)
    for first in range(0, positions, POSITIONS):
        t = first + tl.arange(0, POSITIONS)
        inputs = tl.load(
            a + example * a_example + t[:, None] * a_position + i[None, :] * a_feature,
            mask=(t[:, None] < positions) & (i[None, :] < n_in),
            other=0.0,
        )
        deltas = tl.load(
            d + example * d_example + t[None, :] * d_position + o[:, None] * d_feature,
            mask=(t[None, :] < positions) & (o[:, None] < n_out),
            other=0.0,
        )
        wide_inputs, wide_deltas = inputs.to(tl.float32), deltas.to(tl.float32)
        # Products of bfloat16 numbers are exact in float32. Those of float32 numbers are taken without TF32.
        if TENSOR_CORES:  # noqa: SIM108 - each branch is compiled on its own
            sums = tl.dot(deltas, inputs, sums)
        else:
            sums = tl.dot(wide_deltas, wide_inputs, sums, input_precision="ieee")
        a_squares += wide_inputs * wide_inputs
        d_squares += wide_deltas * wide_deltas
    place = out + tl.program_id(0).to(tl.int64) * 3
    tl.store(place, tl.sum(sums * sums))
    tl.store(place + 1, tl.where(tile // across == 0, tl.sum(a_squares), 0.0))
    tl.store(place + 2, tl.where(tile % across == 0, tl.sum(d_squares), 0.0))


def tile_norms(inputs: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """‖Σₜ δᵢₜaᵢₜᵀ‖², ‖aᵢ‖² and ‖δᵢ‖² of every example, float32, for a as (B, T, inputs) and δ as (B, T, outputs).

    Both are float32 or both bfloat16, with any strides. Sums are taken in float32; a norm is that of the gradient as this
    kernel rounds it, so the caller must treat it as measured by another kernel than the one that takes the clipped sum.
    """
    count, positions, n_in = inputs.shape
    n_out = deltas.shape[2]
    tiles = triton.cdiv(n_in, INPUTS) * triton.cdiv(n_out, OUTPUTS)
    partial = torch.empty(count, tiles, 3, dtype=torch.float32, device=inputs.device)
    tile_squares[(count * tiles,)](
        inputs,
        deltas,
        partial,
        positions,
        n_in,
        n_out,
        *inputs.stride(),
        *deltas.stride(),
        POSITIONS=POSITIONS,
        INPUTS=INPUTS,
        OUTPUTS=OUTPUTS,
        # Triton's interpreter, which has no device, takes bfloat16 factors of a product for integers.
        TENSOR_CORES=inputs.is_cuda and inputs.dtype == torch.bfloat16,
        num_warps=WARPS,
    )
    norms, input_squares, delta_squares = partial.sum(1).unbind(1)
    return norms.contiguous(), input_squares, delta_squares
