"""Decodes an image file into 8-bit RGB, or refuses it by name. Training, evaluation and predictions share this one function.

Every file is decoded on its own: no minimum or maximum of its pixels, or of other files, is used to scale it. For evaluation
the shorter side is resized and the centre cropped: with Pillow for data, and by the same bytes in torch operations for deployed
models (``test_image_decoding.py``), which take images of any size without Pillow.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dp_microadam.errors import DPMicroAdamError, InputError

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
BIT_DEPTHS = range(9, 17)
"""Bit depths that files with 16 bits per grey value may be declared to have."""

_BACKGROUND = (255, 255, 255, 255)
"""What transparent pixels show: white, as a page would."""
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")
_COEFFICIENT_BITS = 22
"""Pillow rounds the coefficients of 8-bit images to multiples of 2⁻²²."""


class _Unreadable(Exception):
    """Why a file cannot be used, in words that complete "FILE … ; what would be right"."""


def require_pillow() -> None:
    """Raise DPMicroAdamError if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise DPMicroAdamError(
            "image files are decoded by Pillow, which is not installed; run pip install 'dp-microadam[images]'"
        ) from None


def decoded(path: Path, bit_depth: int = 16) -> Image:
    """The image in ``path`` as it is meant to be seen, in mode RGB.

    It is turned upright by its EXIF orientation. Grey values of 16 bits are scaled by their bit depth, which is 16 unless
    ``bit_depth`` declares that only the lower so many bits are used, as in X-rays. Transparent pixels are laid over white.

    Raises:
        InputError: naming the file, if it cannot be decoded, has several frames, or has pixels whose range is unknown.
    """
    import PIL.Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            warnings.filterwarnings("ignore", category=UserWarning)  # odd EXIF data does not matter
            with PIL.Image.open(path) as image:
                return _as_seen(image, bit_depth)
    except _Unreadable as reason:
        raise InputError(f"{path} {reason}") from None
    except Exception as error:  # Pillow's decoders raise almost anything on damaged files
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        kind = type(error).__name__
        cause = {"UnidentifiedImageError": "it holds none", "OSError": "it ends early or is damaged"}.get(kind, kind)
        raise InputError(f"{path} cannot be decoded as an image ({cause}); replace or remove it") from None


def _as_seen(image: Image, bit_depth: int) -> Image:
    from PIL import ImageOps

    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # phones add a second picture to a photograph; the first is the photograph
        raise _Unreadable(f"has {frames} frames; save the one that is meant as a file of its own")
    stored = _stored_bits(image)
    upright = ImageOps.exif_transpose(image)
    if upright.mode in (*_SIXTEEN_BITS, "I"):
        if stored != 16:
            raise _Unreadable(f"has {stored} bits per pixel, whose range is unknown; save it with 8 or 16")
        return _eight_bits(upright, bit_depth).convert("RGB")
    if stored == 16 and bit_depth != 16:
        raise _Unreadable(f"has colours of 16 bits, but bit_depth is {bit_depth}, which is for grey values; save it with 8")
    if upright.mode == "F":
        raise _Unreadable("has pixels that are floating-point numbers, whose range is unknown; save it with 8 or 16 bits")
    if upright.mode in _WITH_ALPHA or "transparency" in upright.info:
        return _over_background(upright.convert("RGBA"))
    try:
        return upright.convert("RGB")
    except ValueError:
        raise _Unreadable(f"has colours of kind {upright.mode}, which cannot be converted; save it as RGB") from None


def _stored_bits(image: Image) -> int:
    """Bits per value in the file: 16 where Pillow unpacks 16-bit values or keeps them, 32 for other integers, else 8."""
    tiles = getattr(image, "tile", None)  # of images read from a file
    if image.mode in _SIXTEEN_BITS or ";16" in (str(tiles[0][3]) if tiles else ""):
        return 16
    if image.mode == "I":  # before Pillow 11, PNG's 16-bit values; netpbm's, which are scaled to 16 bits, in all versions
        return 16 if image.format in ("PNG", "PPM") else 32
    return 8


def _eight_bits(image: Image, bit_depth: int) -> Image:
    import PIL.Image

    values = np.asarray(image).astype(np.int64)
    largest = 2**bit_depth - 1
    if values.min() < 0 or values.max() > largest:
        raise _Unreadable(f"has values above {largest}, the largest with bit_depth = {bit_depth}; declare its true bit depth")
    return PIL.Image.fromarray(((values * 255 + largest // 2) // largest).astype(np.uint8))


def _over_background(image: Image) -> Image:
    import PIL.Image

    return PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, _BACKGROUND), image).convert("RGB")


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
    return torch.floor(weights * 2**_COEFFICIENT_BITS + 0.5) / 2**_COEFFICIENT_BITS


def _rounded(values: Tensor) -> Tensor:
    return torch.floor(values + 0.5).clamp(0, 255)
