"""Kernels of MicroAdam and of norms on the device: on a pretend one in Triton's interpreter, beside plain torch on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pretend_cuda.cases.comparison import agree
from pretend_cuda.cases.optimizers import CPU, parameters, take_steps

from dp_microadam import MicroAdam
from dp_microadam.optimizers import micro_adam_triton

SHAPES = ((70,), (3, 5), (1,))


def steps(dtype: torch.dtype, options: dict[str, Any], device: torch.device) -> None:
    options = {"block_size": 32, "bucket_size": 8, "density": 0.1, **options}
    host, here = parameters(CPU, dtype, SHAPES), parameters(device, dtype, SHAPES)
    one, other = MicroAdam(host, fused=False, **options), MicroAdam(here, **options)
    assert micro_adam_triton.unsupported_reason(here[0], other.param_groups[0]) is None
    take_steps(one, host, range(3))
    take_steps(other, here, range(3))
    for number, (param, twin) in enumerate(zip(host, here, strict=True)):
        agree(param, twin, device, f"parameter {number}", 1e-5 if dtype == torch.float32 else 1e-2)


def norms(device: torch.device) -> None:
    """Squared norms of per-example gradients of a linear layer, and of its factors."""
    from dp_microadam.clipping.norms_triton import tile_norms

    inputs, deltas = torch.randn(3, 7, 5), torch.randn(3, 7, 66)
    expected = [rows.flatten(1).square().sum(1) for rows in (deltas.transpose(1, 2) @ inputs, inputs, deltas)]
    for one, other in zip(expected, tile_norms(inputs.to(device), deltas.to(device)), strict=True):
        agree(one, other, device, "squared norms")


CASES = {
    "norms": norms,
    "float32": partial(steps, torch.float32, {}),
    "bfloat16": partial(steps, torch.bfloat16, {"rounding": "stochastic", "seed": 2}),
    "dense error": partial(steps, torch.float32, {"quantize": False, "window_dtype": torch.float32}),
}
