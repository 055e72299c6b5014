"""Full precision for norms and clipped sums, whatever precision the model itself runs in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


@cache
def _switches(device_type: str) -> list[tuple[Any, str, Any]]:
    """The settings that decide how exact products are on a device, each with its exact value."""
    backends: Any = torch.backends
    gpu, cpu = [backends.cuda.matmul], [backends.mkldnn.matmul, backends.mkldnn.conv]
    if not hasattr(gpu[0], "fp32_precision"):  # before torch 2.9
        return [(place, "allow_tf32", False) for place in (*gpu, backends.cudnn)]
    places = cpu if device_type == "cpu" else [*gpu, backends.cudnn.conv, backends.cudnn.rnn, *cpu]
    return [(place, "fp32_precision", "ieee") for place in places]


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Context manager that disables autocast, TF32 and bfloat16 products, and restores the settings on exit.

    TF32 keeps ten bits of the mantissa: a norm could then be under-estimated by a thousandth.
    """
    switches = _switches(device.type)
    before = [getattr(place, name) for place, name, _ in switches]
    try:
        for place, name, full in switches:
            setattr(place, name, full)
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for (place, name, _), value in zip(switches, before, strict=True):
            setattr(place, name, value)


def autocasting(
    per_example_loss: Callable[[nn.Module, Any], Tensor], device: torch.device, dtype: torch.dtype | None
) -> Callable[[nn.Module, Any], Tensor]:
    """The same loss computed under autocast to ``dtype``; the backward pass has the precision of the forward pass."""
    if dtype is None:
        return per_example_loss

    def under_autocast(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(device.type, dtype=dtype):
            return per_example_loss(model, batch)

    return under_autocast
