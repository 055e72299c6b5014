"""Batches are nested tuples, lists and dicts of tensors whose first dimension counts examples."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dp_microadam.errors import InputError


def batch_size(batch: Any) -> int:
    """The number of examples, which all tensors of a batch must agree on."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not tensors:
        raise InputError(f"batch is {type(batch).__name__} without tensors; pass tensors, or tuples or dicts of them")
    sizes = {len(tensor) if tensor.dim() else None for tensor in tensors}
    if len(sizes) > 1 or None in sizes:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise InputError(f"batch holds tensors of shapes {shapes}; all must share their first dimension, one row per example")
    return len(tensors[0])


def require_weights(weights: Tensor, count: int) -> int:
    """Require the weights of ``count`` examples, (units, examples per unit); returns how many examples a unit has."""
    if weights.dim() != 2 or weights.numel() != count or (count and not weights.shape[1]):
        raise InputError(
            f"weights has shape {tuple(weights.shape)} for a batch of {count}; it must have a row per user and a column for "
            "each of the user's consecutive examples"
        )
    return max(1, weights.shape[1])


def detached(batch: Any) -> Any:
    """The same batch, detached from the graph."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, batch)


def signature(batch: Any) -> tuple[Any, ...]:
    """What two batches must have in common for a check of one to hold for the other: structure, dtypes and ranks."""
    return tuple((leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else type(leaf) for leaf in tree_leaves(batch))


def select(batch: Any, rows: Tensor) -> Any:
    """The examples of these rows, in this order."""
    return tree_map(lambda leaf: leaf[_beside(leaf, rows)] if isinstance(leaf, Tensor) else leaf, batch)


def replace_rows(batch: Any, others: Any, rows: Tensor) -> Any:
    """A copy of the batch with these rows taken from the others."""

    def changed(leaf: Any, other: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        places = _beside(leaf, rows)
        return leaf.index_copy(0, places, other[places])

    return tree_map(changed, batch, others)


def in_precision(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point numbers in this precision."""
    return tree_map(lambda leaf: leaf.to(dtype) if is_floating(leaf) and not leaf.is_complex() else leaf, batch)


def _beside(leaf: Tensor, rows: Tensor) -> Tensor:
    """The rows on the device of the leaf; the host does not wait until they are there."""
    return rows.to(leaf.device, non_blocking=True)


def is_floating(leaf: Any) -> bool:
    """Whether a leaf is a tensor of real or complex numbers."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


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
