"""One second moment for a whole tensor: the average of g² over its coordinates and over past steps.

Second moments shared by a block of weights are from Zhang et al., "Adam-mini: Use Fewer Learning Rates To Gain More" (2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dp_microadam.optimizers.shards import is_sharded


def mean_square(gradient: Tensor) -> Tensor:
    """The mean of g² as a float32 scalar; of a sharded gradient (DTensor) over all shards, which all ranks must ask for.

    Coordinates are added up in their own order, so that the layout in memory does not change how the sum is rounded.
    """
    norm = torch.linalg.vector_norm(gradient.contiguous(), dtype=_wide(gradient))
    if is_sharded(norm):
        norm = norm.full_tensor()
    return (norm / math.sqrt(gradient.numel())).square().to(torch.float32)


def mean_squares(gradients: Sequence[Tensor]) -> list[float]:
    """:func:`mean_square` of each gradient, as numbers. The host waits for the device once, however many there are."""
    if all(gradient.dtype is torch.float32 and not is_sharded(gradient) for gradient in gradients):
        norms = torch._foreach_norm([gradient.contiguous() for gradient in gradients])
        together: list[float] = torch.stack(norms).tolist() if norms else []
        return [norm**2 / gradient.numel() for norm, gradient in zip(together, gradients, strict=True)]
    return [float(mean_square(gradient)) for gradient in gradients]


def averaged(gradients: Sequence[Tensor], before: Sequence[Tensor], beta: float) -> list[float]:
    """β·v + (1 − β)·mean(g²) of each gradient, in float32; ``before`` are the v so far, tensors of one number.

    The host waits for the device once, however many gradients there are.
    """
    if not gradients:
        return []
    device, given = gradients[0].device, [gradient.detach().contiguous() for gradient in gradients]
    wide = all(gradient.dtype is torch.float32 for gradient in given)
    norms = torch._foreach_norm(given) if wide else [torch.linalg.vector_norm(one, dtype=_wide(one)) for one in given]
    both = [norm.to(device, torch.float32) for norm in norms] + [one.to(device).squeeze(0) for one in before]
    numbers: list[float] = torch.stack(both).tolist()
    means = [norm**2 / gradient.numel() for norm, gradient in zip(numbers, given, strict=False)]
    return [_rounded(beta * v + (1 - beta) * mean) for v, mean in zip(numbers[len(given) :], means, strict=True)]


def _rounded(value: float) -> float:
    """To float32, in which it is kept, so that a step after loading a state is the same."""
    return torch.tensor(value, dtype=torch.float32).item()


def _wide(gradient: Tensor) -> torch.dtype:
    return torch.promote_types(gradient.dtype, torch.float32)
