"""Batches are nested tuples, lists and dicts of tensors whose first dimension counts examples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
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


def detached(batch: Any) -> Any:
    """The same batch outside any graph."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, batch)


def signature(batch: Any) -> tuple[Any, ...]:
    """What must stay the same for a proof about one batch to hold for another: structure, types and ranks."""
    return tuple((leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else type(leaf) for leaf in tree_leaves(batch))


def synthetic(batch: Any, count: int, seed: int) -> Any:
    """``count`` random examples shaped like those of ``batch``; no value of the batch is looked at.

    Real numbers are uniform in [0, 1), where roots and logarithms exist; whole numbers are 0 or 1, which are valid
    classes, tokens and masks.
    """
    generator = torch.Generator().manual_seed(seed)

    def like(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = (count, *leaf.shape[1:])
        if leaf.is_floating_point() or leaf.is_complex():
            return torch.rand(shape, generator=generator).to(device=leaf.device, dtype=leaf.dtype)
        values = torch.randint(2, shape, generator=generator)
        values[1::2] = 1 - values[: count - count % 2 : 2]  # each odd row differs everywhere from the row before it
        return values.to(device=leaf.device, dtype=leaf.dtype)

    return tree_map(like, batch)


def rows_of(batch: Any, count: int) -> Any:
    """The first ``count`` examples, from the first again where there are fewer."""

    def taken(leaf: Any) -> Any:
        return leaf[torch.arange(count, device=leaf.device) % len(leaf)] if isinstance(leaf, Tensor) else leaf

    return tree_map(taken, batch)


def with_another_example(batch: Any, row: int) -> Any:
    """A copy in which one example is replaced by the one before it."""

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.clone()
        leaf[row] = leaf[row - 1]
        return leaf

    return tree_map(changed, batch)
