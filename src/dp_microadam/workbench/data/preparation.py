"""Deterministic preprocessing of every batch, in training and evaluation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_microadam.workbench.data.dataset import LabelledData


class Preparation:
    """Preprocesses batches of (inputs, labels): resize images if necessary, convert to float, normalize by public constants.

    Formal guarantees: every example is transformed on its own, by constants that do not depend on the data.

    >>> data = LabelledData("pixels", 2, (1, 1, 2), (0.5,), (0.25,), *3 * [(torch.empty(0), torch.empty(0))])
    >>> Preparation(data)((torch.tensor([[[[0, 255]]]], dtype=torch.uint8), torch.tensor([1])))[0]
    tensor([[[[-2.,  2.]]]])
    """

    def __init__(self, data: LabelledData) -> None:
        self._as_they_are = data.tokens
        self._size = (data.example_shape[1], data.example_shape[2]) if data.images else None
        # Pixels range from 0 to 255, but their constants are for 0 to 1.
        unit = 255.0 if data.images else 1.0
        shape = (-1, 1, 1) if data.images else (-1,)
        self._mean = torch.tensor(data.mean or (0.0,)).view(shape) * unit
        self._scale = 1 / (torch.tensor(data.std or (1 / unit,)).view(shape) * unit)

    def __call__(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self._as_they_are:
            return batch
        inputs, labels = batch
        if self._size is not None and tuple(inputs.shape[-2:]) != self._size:
            inputs = resized(inputs, self._size)
        mean, scale = self._mean.to(inputs.device), self._scale.to(inputs.device)
        return (inputs - mean).mul_(scale), labels


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images [B, C, H, W] (bilinear, with antialiasing); as floats."""
    return F.interpolate(images.float(), size, mode="bilinear", align_corners=False, antialias=True)
