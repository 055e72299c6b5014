"""Decodes an image file into 8-bit RGB, or refuses it by name. Training, evaluation and predictions share this one function.

Every file is decoded on its own: no minimum or maximum of its pixels, or of other files, is used to scale it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dp_microadam.errors import DPMicroAdamError, InputError

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
BIT_DEPTHS = range(9, 17)
"""Bit depths that files with 16 bits per grey value may be declared to have."""
_BACKGROUND = (255, 255, 255)
"""What transparent pixels show: white, as a page would."""
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")


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
    except OSError as error:
        if error.errno is None:  # Pillow's own, for files that are no images or end early
            raise InputError(_undecodable(path, error)) from None
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # Pillow's decoders raise almost anything on damaged files
        raise InputError(_undecodable(path, error)) from None


def used_bits(path: Path) -> int:
    """Bits that the largest grey value in a file of 16 bits needs; 0 for other files. Only for the owner: it is private.

    Raises:
        InputError: naming the file, if it cannot be decoded.
    """
    import PIL.Image

    decoded(path)
    with PIL.Image.open(path) as image:
        grey = image.mode in (*_SIXTEEN_BITS, "I")
        return int(np.asarray(image).max()).bit_length() if grey else 0


def _undecodable(path: Path, error: Exception) -> str:
    name = type(error).__name__
    reason = {"UnidentifiedImageError": "it holds none", "OSError": "it ends early or is damaged"}.get(name, name)
    return f"{path} cannot be decoded as an image ({reason}); replace or remove it"


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
    unpacked = str(tiles[0][3]) if tiles else ""
    if image.mode in _SIXTEEN_BITS or ";16" in unpacked:
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

    page = PIL.Image.new("RGBA", image.size, (*_BACKGROUND, 255))
    return PIL.Image.alpha_composite(page, image).convert("RGB")
