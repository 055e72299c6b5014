"""Whether two sets of examples have some in common, as far as that can be seen without comparing their values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset


def share_examples(one: Any, other: Any) -> bool:
    """Whether they hold the same positions of one Dataset, or the same memory.

    Copies are not recognised.

    >>> data = list(range(10))
    >>> share_examples(Subset(data, [0, 1]), Subset(data, [1, 2])), share_examples(Subset(data, [0, 1]), Subset(data, [2]))
    (True, False)
    >>> images = torch.zeros(10, 3)
    >>> share_examples((images,), images[5:6]), share_examples(images[::2], images[1::2])
    (True, False)
    """
    (base, positions), (other_base, other_positions) = unwrapped(one), unwrapped(other)
    if base is other_base:
        return positions is None or other_positions is None or not set(positions).isdisjoint(other_positions)
    return any(
        _rows_meet(mine, theirs)
        for mine in _rows_in_memory(base, positions)
        for theirs in _rows_in_memory(other_base, other_positions)
    )


def unwrapped(data: Any) -> tuple[Any, list[int] | None]:
    """What Subsets of Subsets are taken from, and which positions; None for all."""
    positions: list[int] | None = None
    while isinstance(data, Subset):
        own = [int(index) for index in data.indices]
        positions = own if positions is None else [own[position] for position in positions]
        data = data.dataset
    return data, positions


_Rows = tuple[torch.device, NDArray[np.int64], int]
"""Device, first bytes and length in bytes of the rows of a tensor."""


def _rows_in_memory(data: Any, positions: Sequence[int] | None) -> Iterator[_Rows]:
    for tensor in tree_leaves(data.tensors if hasattr(data, "tensors") else data):
        if isinstance(tensor, Tensor) and tensor.dim() and tensor.numel():
            item = tensor.element_size()
            rows = np.arange(len(tensor)) if positions is None else np.asarray(positions, dtype=np.int64)
            length = sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)) + 1
            yield tensor.device, np.sort(tensor.data_ptr() + rows * tensor.stride(0) * item), length * item


def _rows_meet(one: _Rows, other: _Rows) -> bool:
    (device, starts, length), (other_device, other_starts, other_length) = one, other
    if device != other_device or not len(starts) or not len(other_starts):
        return False
    after = np.searchsorted(other_starts, starts)
    next_one = other_starts[np.minimum(after, len(other_starts) - 1)]
    one_before = other_starts[np.maximum(after - 1, 0)]
    meets_next = (next_one >= starts) & (next_one < starts + length)
    meets_before = (one_before < starts) & (one_before + other_length > starts)
    return bool((meets_next | meets_before).any())
