"""Labelled images in memory, divided into the parts of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.validation import require_in_open, require_integer


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images as uint8 [N, C, H, W] and labels as int64 [N] of the training, validation and test part.

    ``mean`` and ``std`` are one number per channel for pixels scaled to [0, 1]. They are published constants of the data set,
    declared public, and never computed from the data at hand.
    """

    name: str
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train_images: Tensor
    train_labels: Tensor
    validation_images: Tensor
    validation_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 images [B, C, H, W] as float32 with the public ``mean`` taken off and divided by ``std``, on their device."""
    shift = torch.tensor(mean, device=images.device).view(1, -1, 1, 1)
    scale = torch.tensor(std, device=images.device).view(1, -1, 1, 1)
    return (images.float() / 255 - shift) / scale


def split(count: int, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of ``count`` examples in two parts, shuffled: the larger rest, and ``fraction`` of them.

    Formal guarantees: the order depends on ``count`` and the public ``seed`` alone, not on what the examples hold. The
    guarantee of a training run is about the first part: adding or removing one example of it, the division given.

    >>> rest, held_out = split(10, 0.2, seed=0)
    >>> len(rest), len(held_out), sorted([*rest.tolist(), *held_out.tolist()]) == list(range(10))
    (8, 2, True)
    """
    require_in_open("validation_fraction", fraction, 0, 1)
    require_integer("split_seed", seed, 0)
    held_out = round(count * fraction)
    if not 0 < held_out < count:
        raise InputError(f"validation_fraction is {fraction}; of {count} examples it must leave at least one in each part")
    order = torch.from_numpy(np.random.default_rng(seed).permutation(count))
    return order[held_out:], order[:held_out]
