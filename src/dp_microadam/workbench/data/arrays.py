"""Examples as numpy arrays, in memory or memory-mapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True, eq=False)
class Arrays:
    """Inputs of N examples, in one array or several consecutive ones, and their N labels as int64.

    An array may be a ``numpy.memmap``, which is read from its file on access. ``users`` are N ids, if it is known whose each
    example is.
    """

    inputs: list[NDArray[Any]]
    labels: NDArray[np.int64]
    users: NDArray[np.str_] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor] | MappedRows:
        """The examples with these indices (default: all), as tensors, or as a Dataset if an array is memory-mapped."""
        if rows is None:
            rows = torch.arange(len(self))
        if any(isinstance(array, np.memmap) for array in self.inputs):
            return MappedRows(self, rows.numpy())
        whole = self.inputs[0] if len(self.inputs) == 1 else np.concatenate(self.inputs)
        chosen = rows.numpy()
        return torch.from_numpy(whole[chosen]), torch.from_numpy(self.labels[chosen])


class MappedRows(Dataset[tuple[Tensor, Tensor]]):
    """A Dataset of some rows of memory-mapped arrays, read on access."""

    def __init__(self, arrays: Arrays, rows: NDArray[np.int64]) -> None:
        self._arrays = arrays
        self._rows = rows
        self._ends = np.cumsum([len(array) for array in arrays.inputs])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = int(self._rows[index])
        which = int(np.searchsorted(self._ends, row, side="right"))
        array = self._arrays.inputs[which]
        first = int(self._ends[which]) - len(array)
        return torch.from_numpy(np.array(array[row - first])), torch.tensor(self._arrays.labels[row])
