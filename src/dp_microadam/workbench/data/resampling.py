"""Resizes the shorter side of an image and crops the centre: with Pillow for data, and in torch operations for deployment.

Both compute the same bytes (``test_resampling.py``). The second is traced by ``torch.export``, so that a deployed
model takes images of any size without Pillow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from PIL.Image import Image

_BITS = 22
"""Pillow rounds the coefficients of 8-bit images to multiples of 2⁻²²."""


def shorter_side(size: int) -> int:
    """The length that the shorter side of an image is resized to before the centre of ``size`` is cropped: 8/7 of it.

    >>> shorter_side(224), shorter_side(28)
    (256, 32)
    """
    return round(size * 256 / 224)


def resized_centre(image: Image, size: int) -> Image:
    """The centre of an image, ``size`` × ``size``, after its shorter side was resized to :func:`shorter_side`."""
    import PIL.Image

    width, height = (_resized(side, min(image.size), size) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    # Versions of Pillow differ in which direction comes first; the bytes differ with it.
    narrowed = image.resize((width, image.height), PIL.Image.Resampling.BILINEAR)
    whole = narrowed.resize((width, height), PIL.Image.Resampling.BILINEAR)
    return whole.crop((left, top, left + size, top + size))


class ResizedCentre(nn.Module):
    """:func:`resized_centre` for uint8 images [B, C, H, W] of any height and width, in torch operations; returns uint8."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        shorter = torch.sym_min(height, width)
        across, down = (_coefficients(side, _resized(side, shorter, self.size), self.size) for side in (width, height))
        # float64 holds these sums exactly. Pillow rounds after the horizontal pass too.
        rows = _rounded(images.double() @ across.to(images.device).T)
        return _rounded(down.to(images.device) @ rows).to(torch.uint8)


def _resized(side: Any, shorter: Any, size: int) -> Any:
    """The length of a side after resizing, rounded to the nearest integer; in integers, which can be traced."""
    return torch.sym_max(size, (2 * side * shorter_side(size) + shorter) // (2 * shorter))


def _coefficients(side: Any, resized: Any, size: int) -> Tensor:
    """Pillow's antialiased bilinear filter as a matrix [size, side], for the ``size`` pixels in the middle of ``resized``."""
    scale = side / resized
    support = torch.sym_max(scale, 1.0)
    centres = (torch.arange(size, dtype=torch.float64) + (resized - size) // 2 + 0.5) * scale
    pixels = torch.arange(side, dtype=torch.float64) + 0.5
    weights = (1 - (pixels - centres[:, None]).abs() / support).clamp(min=0)
    weights = weights / weights.sum(1, keepdim=True)
    return torch.floor(weights * 2**_BITS + 0.5) / 2**_BITS


def _rounded(values: Tensor) -> Tensor:
    return torch.floor(values + 0.5).clamp(0, 255)
