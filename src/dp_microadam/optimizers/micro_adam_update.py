"""MicroAdam's update of one parameter in plain torch, on any device: lines 6–14 of Algorithm 1.

The readable counterpart and the fallback of the Numba kernel in ``micro_adam_kernel.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dp_microadam.optimizers.bias import scales
from dp_microadam.optimizers.micro_adam_state import Layout, Segment
from dp_microadam.optimizers.quantization import (
    bucket_bounds,
    dequantize,
    derive_key,
    pack,
    quantize,
    rounding_offsets,
    unpack,
)
from dp_microadam.optimizers.selection import largest_magnitudes

_CHUNK = {"cpu": 1 << 17}
_CHUNK_ON_ACCELERATORS = 1 << 22
"""Coordinates the plain torch path handles at once; bounds its scratch memory to a few times this many floats."""


def plain_update(
    target: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    layout: Layout,
    group: dict[str, Any],
    second_moment: float | None = None,
) -> None:
    """Lines 6–14 of Algorithm 1 in plain torch: subtract one step from ``target``, a flat float32 tensor.

    ``second_moment`` is that of the whole tensor, if its group has one.

    Works through chunks of blocks, so that scratch memory is bounded; with ``scope="tensor"`` only the accumulator is as
    large as the tensor.
    """
    window, bucket_size = group["window"], group["bucket_size"]
    step = int(state["step"])
    slot = (step - 1) % window
    factors = scales(step, group, second_moment)
    for segment in layout.segments:
        for first, rows in _chunks(segment, target.device):
            start = segment.start + first * segment.length
            span = slice(start, start + rows * segment.length)
            kept = slice(segment.window_start + first * segment.kept, segment.window_start + (first + rows) * segment.kept)
            accumulator = gradient[span].clone()
            add_residual(accumulator, start, state, bucket_size)  # line 6
            blocks = accumulator.view(rows, segment.length)
            selected = largest_magnitudes(blocks, segment.kept)  # line 7
            state["indices"][slot, kept] = selected.view(-1).to(layout.index_dtype)  # line 8
            state["values"][slot, kept] = blocks.gather(1, selected).view(-1).to(group["window_dtype"])
            blocks.scatter_(1, selected, 0.0)  # line 9
            _store_residual(accumulator, start, state, group)  # lines 10–11
            del accumulator, blocks, selected
            indices = state["indices"][:, kept].view(window, rows, segment.kept)
            values = state["values"][:, kept].view(window, rows, segment.kept)
            target[span].sub_(_step_from_window(indices, values, segment.length, step, group, factors).view(-1))  # lines 12–14


def _chunks(segment: Segment, device: torch.device) -> Iterator[tuple[int, int]]:
    at_once = max(1, _CHUNK.get(device.type, _CHUNK_ON_ACCELERATORS) // segment.length)
    for first in range(0, segment.rows, at_once):
        yield first, min(at_once, segment.rows - first)


def _step_from_window(
    indices: Tensor, values: Tensor, length: int, step: int, group: dict[str, Any], factors: Sequence[float]
) -> Tensor:
    """The dense step η·m̂/(ε_s + √v̂) for a chunk of blocks."""
    first, second = moments_from_window(indices, values, length, step, group, factors)
    return first.div_(second.sqrt_().add_(group["eps"])).mul_(float(group["lr"]))


def moments_from_window(
    indices: Tensor, values: Tensor, length: int, step: int, group: dict[str, Any], factors: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """The dense moments m̂ and v̂ of a chunk of blocks: the sums over the window times the two ``factors``."""
    (beta_1, beta_2), window = group["betas"], group["window"]
    slot = (step - 1) % window
    first = torch.zeros(indices.shape[1], length, device=indices.device)
    second = torch.zeros_like(first)
    for row in range(min(step, window)):
        age = (slot - row) % window
        where, what = indices[row].long(), values[row].float()
        # Indices are distinct within a row, so gather and scatter need no atomic addition.
        first.scatter_(1, where, first.gather(1, where) + what * beta_1**age)
        second.scatter_(1, where, second.gather(1, where) + what.square() * beta_2**age)
    return first.mul_(factors[0]), second.mul_(factors[1])


def add_residual(accumulator: Tensor, start: int, state: dict[str, Any], bucket_size: int) -> None:
    if "error" in state:
        accumulator.add_(state["error"][start : start + len(accumulator)])
    if "codes" not in state:
        return
    for span, buckets, part in _bucket_rows(accumulator, bucket_size):
        first = (start + span.start) // bucket_size
        packed = state["codes"][(start + span.start) // 2 : (start + span.stop + 1) // 2].view(buckets, -1)
        bounds = state["bounds"][:, first : first + buckets]
        part.add_(dequantize(unpack(packed, part.shape[1]), bounds[0], bounds[1]))


def _store_residual(accumulator: Tensor, start: int, state: dict[str, Any], group: dict[str, Any]) -> None:
    if "error" in state:
        state["error"][start : start + len(accumulator)] = accumulator
    if "codes" not in state:
        return
    key = derive_key(int(state["rounding_key"]), int(state["step"])) if "rounding_key" in state else None
    bucket_size = group["bucket_size"]
    for span, buckets, part in _bucket_rows(accumulator, bucket_size):
        first = (start + span.start) // bucket_size
        lower, upper = bucket_bounds(part)
        offsets = None
        if key is not None:
            offsets = rounding_offsets(key, start + span.start, part.numel(), part.device).view_as(part)
        codes = quantize(part, lower, upper, offsets)
        state["codes"][(start + span.start) // 2 : (start + span.stop + 1) // 2] = pack(codes).view(-1)
        state["bounds"][0, first : first + buckets] = lower
        state["bounds"][1, first : first + buckets] = upper


def _bucket_rows(flat: Tensor, bucket_size: int) -> Iterator[tuple[slice, int, Tensor]]:
    """``flat`` as matrices with one bucket per row: a bounded number of full buckets at a time, then the shorter last one."""
    full = len(flat) // bucket_size * bucket_size
    at_once = _CHUNK.get(flat.device.type, _CHUNK_ON_ACCELERATORS) // bucket_size * bucket_size or bucket_size
    for begin in range(0, full, at_once):
        span = slice(begin, min(begin + at_once, full))
        rows = (span.stop - span.start) // bucket_size
        yield span, rows, flat[span].view(rows, bucket_size)
    if full < len(flat):
        yield slice(full, len(flat)), 1, flat[full:].view(1, -1)
