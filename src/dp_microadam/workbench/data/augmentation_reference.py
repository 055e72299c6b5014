"""Reference implementation of ``augmentation.py``: one image and one random number at a time, written for readability."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_microadam.workbench.data.augmentation import SMALLEST_AREA, WIDEST_RATIO


def shifted_one(image: Tensor, top: int, left: int, flipped: bool, padding: int) -> Tensor:
    """The crop of the padded image [C, H, W] that starts at (top, left), mirrored if ``flipped``."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=image.dtype)
    padded[:, padding : padding + height, padding : padding + width] = image
    part = padded[:, top : top + height, left : left + width]
    return part.flip(2) if flipped else part


def cut_and_resize_one(image: Tensor, top: int, left: int, height: int, width: int, flipped: bool) -> Tensor:
    """A crop of the image, resized to the image size."""
    part = image[:, top : top + height, left : left + width].float()
    whole = F.interpolate(part.unsqueeze(0), image.shape[1:], mode="bilinear", align_corners=False)[0]
    return whole.flip(2) if flipped else whole


def random_shift(padding: int) -> tuple[int, int]:
    """Top and left of a random crop of a padded image."""
    return int(torch.randint(2 * padding + 1, ())), int(torch.randint(2 * padding + 1, ()))


def random_flip() -> bool:
    """A fair coin."""
    return bool(torch.rand(()) < 0.5)


def random_box(height: int, width: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random resized crop: the first of ten attempts that fits, else the centre."""
    for _ in range(10):
        area = height * width * (SMALLEST_AREA + (1 - SMALLEST_AREA) * float(torch.rand(())))
        ratio = math.exp((2 * float(torch.rand(())) - 1) * math.log(WIDEST_RATIO))
        tall, wide = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 1 <= tall <= height and 1 <= wide <= width:
            return int(torch.randint(height - tall + 1, ())), int(torch.randint(width - wide + 1, ())), tall, wide
    tall, wide = min(height, round(width * WIDEST_RATIO)), min(width, round(height * WIDEST_RATIO))
    return (height - tall) // 2, (width - wide) // 2, tall, wide
