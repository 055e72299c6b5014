"""The per-example loss function that users pass in, and the check that it returns one value per example."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.clipping.batches import batch_size
from dp_microadam.errors import InputError

PerExampleLoss = Callable[[nn.Module, Any], Tensor]


def losses_of(model: nn.Module, per_example_loss: PerExampleLoss, batch: Any) -> Tensor:
    """The loss of each example; raises :class:`InputError` unless there is exactly one value per example."""
    count = batch_size(batch)
    with not_compiled():
        losses = per_example_loss(model, batch)
    if not isinstance(losses, Tensor) or losses.shape != (count,):
        what = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise InputError(
            f"per_example_loss returned {what} for a batch of {count}; it must return one value per example, shape "
            f"({count},), for instance with reduction='none' and a mean over all dimensions but the first"
        )
    return losses


def not_compiled() -> AbstractContextManager[None]:
    """Context manager in which what torch.compile made runs as it was written.

    Layers are observed one by one, so nothing could be fused; and every pass of the check, with its stand-ins for parameters,
    would be compiled anew, for minutes.
    """
    # Importing it takes a second, and without it nothing is compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
