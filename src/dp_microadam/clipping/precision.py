"""Full float32 for norms and clipped sums, whatever the model is allowed for its own products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No autocast and no TF32 inside; both are as they were outside afterwards.

    TF32 keeps ten bits of the mantissa: a norm could then be under-estimated by a thousandth.
    """
    if device.type != "cuda":
        with torch.autocast(device.type, enabled=False):
            yield
        return
    matmul, convolution = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, convolution


def autocasting(
    per_example_loss: Callable[[nn.Module, Any], Tensor], device: torch.device, dtype: torch.dtype | None
) -> Callable[[nn.Module, Any], Tensor]:
    """The same loss with the model's products in ``dtype``; the backward pass follows the forward's precision."""
    if dtype is None:
        return per_example_loss

    def under_autocast(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(device.type, dtype=dtype):
            return per_example_loss(model, batch)

    return under_autocast
