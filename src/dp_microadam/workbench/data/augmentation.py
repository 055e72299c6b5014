"""Random data augmentation for batches of training images, on their device.

All randomness comes from torch's generators, which a private run reseeds unpredictably at each step; each view of each image
draws its own numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.validation import require_integer
from dp_microadam.workbench.data.dataset import resized

SMALLEST_AREA = 0.08
"""Smallest area of a random resized crop, as a fraction of the image (Szegedy et al., 2015)."""
WIDEST_RATIO = 4 / 3
_ATTEMPTS = 10


@dataclass(frozen=True)
class Augmentation:
    """Random crops and flips for a batch of (images [B, C, H, W], labels).

    Arguments:
        crop_padding: zero padding on each side before a random crop of the original size; 0: no random crop.
        flip: flip each view horizontally with probability ½.
        resized_crop: random crop of 8 to 100 % of the area and aspect ratio 3:4 to 4:3, resized to the original size.
        multiplicity: number K of views per image (augmentation multiplicity, Hoffer et al. 2019; De et al. 2022). Images
            become [B, K, C, H, W] if K > 1; average the losses of an image's views before its gradient is clipped.
        size: height and width to resize images to before augmentation; None: unchanged.

    Formal guarantees: a view depends on its own image and on random numbers that are independent of all data.
    """

    crop_padding: int = 0
    flip: bool = False
    resized_crop: bool = False
    multiplicity: int = 1
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        require_integer("crop_padding", self.crop_padding, 0)
        require_integer("multiplicity", self.multiplicity, 1)
        if self.crop_padding and self.resized_crop:
            raise InputError(
                f"crop_padding is {self.crop_padding} and resized_crop is true; only one of the two crops can be used, leave "
                "one out"
            )

    def __call__(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        if images.dim() == 5:  # views that were already cropped when the images were decoded
            return self._change(images.flatten(0, 1), 1).view(images.shape), labels
        if self.size is not None and tuple(images.shape[-2:]) != self.size:
            images = resized(images.float(), self.size)
        views = self._change(images, self.multiplicity)
        if self.multiplicity == 1:
            return views, labels
        return views.view(len(images), self.multiplicity, *images.shape[1:]), labels

    def _change(self, images: Tensor, multiplicity: int) -> Tensor:
        """``multiplicity`` views of each image, example-major."""
        count, device = len(images) * multiplicity, images.device
        flipped = torch.rand(count, device=device) < 0.5 if self.flip else torch.zeros(count, dtype=torch.bool, device=device)
        if self.resized_crop:
            views = [random_crop(image) for image in images.repeat_interleave(multiplicity, 0)]
            crops = torch.stack(views) if views else images.float()
            return torch.where(flipped.view(-1, 1, 1, 1), crops.flip(-1), crops)
        if self.crop_padding:
            shift = torch.randint(2 * self.crop_padding + 1, (2, count), device=device)
        else:
            shift = torch.zeros(2, count, dtype=torch.long, device=device)
        if not (self.flip or self.crop_padding):
            return images.repeat_interleave(multiplicity, 0)
        return shifted(images, shift[0], shift[1], flipped, self.crop_padding)


def shifted(images: Tensor, top: Tensor, left: Tensor, flipped: Tensor, padding: int) -> Tensor:
    """Crops of the padded images at each (top, left), ``len(top) / len(images)`` per image, mirrored where ``flipped``.

    A crop has the size of the image, so top = left = padding gives the image itself.
    """
    _, _, height, width = images.shape
    padded = F.pad(images, (padding, padding, padding, padding))
    owner = torch.arange(len(images), device=images.device).repeat_interleave(len(top) // max(1, len(images)))
    rows = top.view(-1, 1) + torch.arange(height, device=images.device)
    columns = left.view(-1, 1) + torch.arange(width, device=images.device)
    columns = torch.where(flipped.view(-1, 1), columns.flip(1), columns)
    # Channels last, so that one index fetches all channels of a pixel.
    pixels = padded.permute(0, 2, 3, 1)[owner.view(-1, 1, 1), rows.unsqueeze(2), columns.unsqueeze(1)]
    return pixels.permute(0, 3, 1, 2).contiguous()


def random_box(height: int, width: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random crop of an image of this size.

    Area and log aspect ratio are uniform. The first of ten attempts that fits into the image is taken, otherwise the largest
    centred box with an allowed ratio.
    """
    widest = math.log(WIDEST_RATIO)
    for _ in range(_ATTEMPTS):
        area = height * width * float(torch.empty(()).uniform_(SMALLEST_AREA, 1))
        ratio = math.exp(float(torch.empty(()).uniform_(-widest, widest)))
        tall, wide = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 1 <= tall <= height and 1 <= wide <= width:
            return int(torch.randint(height - tall + 1, ())), int(torch.randint(width - wide + 1, ())), tall, wide
    tall, wide = min(height, round(width * WIDEST_RATIO)), min(width, round(height * WIDEST_RATIO))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def random_crop(image: Tensor) -> Tensor:
    """A random crop [C, H, W] of an image of that size, as floats."""
    size = image.shape[-2], image.shape[-1]
    top, left, height, width = random_box(*size)
    return resized(image[None, :, top : top + height, left : left + width].float(), size)[0]
