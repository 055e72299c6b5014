"""Kernels of norms on the device: on a pretend one in Triton's interpreter, beside plain torch on the CPU."""

from __future__ import annotations

import torch
from pretend_cuda.cases.comparison import agree


def norms(device: torch.device) -> None:
    """Squared norms of per-example gradients of a linear layer, and of its factors."""
    from dp_microadam.clipping.norms_triton import tile_norms

    inputs, deltas = torch.randn(3, 7, 5), torch.randn(3, 7, 66)
    expected = [rows.flatten(1).square().sum(1) for rows in (deltas.transpose(1, 2) @ inputs, inputs, deltas)]
    for one, other in zip(expected, tile_norms(inputs.to(device), deltas.to(device)), strict=True):
        agree(one, other, device, "squared norms")


CASES = {
    "norms": norms,
}
