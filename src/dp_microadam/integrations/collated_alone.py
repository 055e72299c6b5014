"""A Dataset whose examples went through a collate function one at a time, so that padding cannot depend on others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dp_microadam.errors import UnreadableExample


class CollatedAlone(Dataset[dict[str, Tensor]]):
    """Each example as the collator makes it by itself: a batch is then a stack of what does not depend on other examples."""

    def __init__(self, data: Any, collate: Any) -> None:
        self.data = data
        self.collate = collate
        self._shapes: dict[str, torch.Size] = {}

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = dict(self.collate([self.data[index]]))
        example = {name: value[0] for name, value in batch.items() if isinstance(value, Tensor) and len(value) == 1}
        if example.keys() != batch.keys():
            raise UnreadableExample(
                "data_collator gives something else than tensors with one row per example; it must give those alone"
            )
        shapes = {name: value.shape for name, value in example.items()}
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            raise UnreadableExample(
                "train_dataset has examples of different lengths, and padding to the longest of a batch would make an example "
                "depend on others; pad all to one length, as padding='max_length' does"
            )
        return example
