"""Whether processes number the same examples the same way: shards of differently shuffled data would overlap."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from dp_microadam.training.held_out import unwrapped

_ROWS = 4096
"""Rows looked at, evenly spread: another order changes nearly all of them."""


def data_digest(data: Any) -> str:
    """A digest of the positions that Subsets select, and of rows of the tensors and arrays that the data holds.

    Of a Dataset that reads its examples elsewhere it sees the length, and whatever arrays it keeps, such as names of files.
    What it is computed from is private; it is compared between processes and neither written nor shown.

    >>> images = torch.arange(6).view(3, 2)
    >>> data_digest((images,)) == data_digest((images.clone(),)), data_digest((images,)) == data_digest((images.flip(0),))
    (True, False)
    """
    digest = hashlib.blake2b()
    base, positions = unwrapped(data)
    if positions is not None:
        digest.update(np.asarray(positions, dtype=np.int64).tobytes())
    if isinstance(base, Dataset):
        digest.update(b"%d" % len(base))  # type: ignore[arg-type]
    for array in _arrays(base):
        digest.update(f"{array.shape} {array.dtype}".encode())
        rows = np.unique(np.linspace(0, len(array) - 1, min(len(array), _ROWS)).astype(np.int64))
        if isinstance(array, Tensor):
            found = array[torch.from_numpy(rows).to(array.device)].detach().cpu().contiguous()
            digest.update(found.view(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(np.ascontiguousarray(array[rows]).tobytes())
    return digest.hexdigest()


def _arrays(data: Any) -> Iterator[Any]:
    for leaf in tree_leaves(list(getattr(data, "__dict__", {}).values()) if isinstance(data, Dataset) else data):
        numeric = isinstance(leaf, Tensor) or (isinstance(leaf, np.ndarray) and leaf.dtype != object)
        if numeric and leaf.ndim and len(leaf):
            yield leaf
