"""Random data augmentation for batches of training images, on their device.

All randomness comes from torch's generators, which a private run reseeds unpredictably at each step; each view of each image
draws its own numbers. the test of this module does the same image by image.
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
class Boxes:
    """Crop boxes of N images: top, left, height and width as integer tensors [N]."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


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
            images = resized(images, self.size)
        views = self._change(images, self.multiplicity)
        if self.multiplicity == 1:
            return views, labels
        return views.view(len(images), self.multiplicity, *images.shape[1:]), labels

    def _change(self, images: Tensor, multiplicity: int) -> Tensor:
        """``multiplicity`` views of each image, example-major."""
        count, device = len(images) * multiplicity, images.device
        flipped = torch.rand(count, device=device) < 0.5 if self.flip else torch.zeros(count, dtype=torch.bool, device=device)
        if self.resized_crop:
            boxes = random_boxes(images.shape[-2], images.shape[-1], count, device)
            return cut_and_resize(images.repeat_interleave(multiplicity, 0), boxes, flipped)
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


def random_boxes(height: int, width: int, count: int, device: torch.device | None = None) -> Boxes:
    """``count`` random crop boxes for images of this size, for :func:`cut_and_resize`.

    Area and log aspect ratio are uniform. The first of ten attempts that fits into the image is taken, otherwise the largest
    centred box with an allowed ratio.
    """
    area = height * width * torch.empty(_ATTEMPTS, count, device=device).uniform_(SMALLEST_AREA, 1)
    ratio = torch.empty(_ATTEMPTS, count, device=device).uniform_(-math.log(WIDEST_RATIO), math.log(WIDEST_RATIO)).exp()
    heights, widths = (area / ratio).sqrt().round().long(), (area * ratio).sqrt().round().long()
    fits = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
    first = fits.int().argmax(0, keepdim=True)
    place = torch.rand(2, count, device=device)
    whole_height, whole_width = _largest_allowed(height, width)
    found = fits.any(0)
    tall = torch.where(found, heights.gather(0, first)[0], whole_height)
    wide = torch.where(found, widths.gather(0, first)[0], whole_width)
    top = torch.where(found, (place[0] * (height - tall + 1)).long(), (height - whole_height) // 2)
    left = torch.where(found, (place[1] * (width - wide + 1)).long(), (width - whole_width) // 2)
    # A product just below a whole number may round up to it.
    return Boxes(torch.minimum(top, height - tall), torch.minimum(left, width - wide), tall, wide)


def _largest_allowed(height: int, width: int) -> tuple[int, int]:
    if width / height > WIDEST_RATIO:
        return height, round(height * WIDEST_RATIO)
    if height / width > WIDEST_RATIO:
        return round(width * WIDEST_RATIO), width
    return height, width


def cut_and_resize(images: Tensor, boxes: Boxes, flipped: Tensor) -> Tensor:
    """Crop each image to its box and resize the crop to the image size (bilinear), mirrored where ``flipped``; as floats."""
    _, _, height, width = images.shape
    rows = _samples(boxes.top, boxes.height, height)
    columns = _samples(boxes.left, boxes.width, width)
    columns = torch.where(flipped.view(-1, 1), columns.flip(1), columns)
    # grid_sample counts from -1 to 1 between the centres of the outermost pixels.
    y, x = rows * (2 / max(1, height - 1)) - 1, columns * (2 / max(1, width - 1)) - 1
    grid = torch.stack([x.unsqueeze(1).expand(-1, height, -1), y.unsqueeze(2).expand(-1, -1, width)], dim=3)
    return F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=True)


def _samples(first: Tensor, length: Tensor, count: int) -> Tensor:
    """Positions [N, count] of ``count`` equidistant samples of a range of pixels, clamped to its first and last pixel."""
    steps = torch.arange(count, device=first.device) + 0.5
    inside = (steps * length.view(-1, 1) / count - 0.5).clamp(min=0)
    return torch.minimum(inside, length.view(-1, 1) - 1.0) + first.view(-1, 1)
