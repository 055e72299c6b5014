"""What a deployed model is given: files of images, of rows, and of texts, read as training read them.

Every image file is decoded on its own, into 8-bit RGB: no minimum or maximum of its pixels, or of other files, is used to scale
it. Training, evaluation and predictions share the function that decodes, and the one that resizes.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam.errors import DPMicroAdamError, InputError
from dp_microadam.training.program import RawInput, RawTensor
from dp_microadam.workbench.data.columns import Column, Columns, Unsuitable
from dp_microadam.workbench.data.rows import open_rows, read_rows, text_of

if TYPE_CHECKING:
    from PIL.Image import Image

TEXT_ENDINGS = (".csv", ".jsonl", ".txt")
STANDARD_INPUT = Path("-")

EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
BIT_DEPTHS = range(9, 17)
"""Bit depths that files with 16 bits per grey value may be declared to have."""

_BACKGROUND = (255, 255, 255, 255)
"""What transparent pixels show: white, as a page would."""
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")


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
    except Unsuitable as error:
        raise InputError(f"{path} {error.fault}; {error.remedy}") from None
    except Exception as error:  # Pillow's decoders raise almost anything on damaged files
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        kind = type(error).__name__
        cause = {"UnidentifiedImageError": "it holds none", "OSError": "it ends early or is damaged"}.get(kind, kind)
        raise InputError(f"{path} cannot be decoded as an image ({cause}); replace or remove it") from None


def _as_seen(image: Image, bit_depth: int) -> Image:
    import PIL.Image
    from PIL import ImageOps

    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # phones add a second picture to a photograph; the first is the photograph
        raise Unsuitable(f"has {frames} frames", "save the one that is meant as a file of its own")
    stored = _stored_bits(image)
    upright = ImageOps.exif_transpose(image)
    if upright.mode in (*_SIXTEEN_BITS, "I"):
        if stored != 16:
            raise Unsuitable(f"has {stored} bits per pixel, whose range is unknown", "save it with 8 or 16")
        return _eight_bits(upright, bit_depth).convert("RGB")
    if stored == 16 and bit_depth != 16:
        raise Unsuitable(f"has colours of 16 bits, but bit_depth is {bit_depth}, which is for grey values", "save it with 8")
    if upright.mode == "F":
        raise Unsuitable("has pixels that are floating-point numbers, whose range is unknown", "save it with 8 or 16 bits")
    if upright.mode in _WITH_ALPHA or "transparency" in upright.info:
        background = PIL.Image.new("RGBA", upright.size, _BACKGROUND)
        return PIL.Image.alpha_composite(background, upright.convert("RGBA")).convert("RGB")
    try:
        return upright.convert("RGB")
    except ValueError:
        raise Unsuitable(f"has colours of kind {upright.mode}, which cannot be converted", "save it as RGB") from None


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
        fault = f"has values above {largest}, the largest with bit_depth = {bit_depth}"
        raise Unsuitable(fault, "declare its true bit depth")
    return PIL.Image.fromarray(((values * 255 + largest // 2) // largest).astype(np.uint8))


def pixels_of(image: Image) -> Tensor:
    """The pixels as uint8 [channels, height, width]."""
    return torch.from_numpy(np.array(image)).reshape(image.height, image.width, -1).permute(2, 0, 1).contiguous()


def shorter_side(size: int) -> int:
    """The length that the shorter side of an image is resized to before the centre of ``size`` is cropped: 8/7 of it.

    >>> shorter_side(224), shorter_side(28)
    (256, 32)
    """
    return round(size * 256 / 224)


class ResizedCentre(nn.Module):
    """The centre, ``size`` × ``size``, of uint8 images [B, C, H, W], after their shorter side was resized."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, images: Tensor) -> Tensor:
        sides = images.shape[-2:]
        shorter, goal = torch.sym_min(*sides), shorter_side(self.size)
        # The nearest integers; in integers, which can be traced.
        height, width = (torch.sym_max(self.size, (2 * side * goal + shorter) // (2 * shorter)) for side in sides)
        top, left = (height - self.size) // 2, (width - self.size) // 2
        return resized_pixels(images, (height, width))[..., top : top + self.size, left : left + self.size]


def resized_pixels(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 images [B, C, H, W] (bilinear, with antialiasing), rounded to uint8 again."""
    found = F.interpolate(images.double(), size, mode="bilinear", align_corners=False, antialias=True)
    # Ties, which are frequent, are rounded up whatever the order of summation.
    return torch.floor(found + (0.5 + 1e-9)).to(torch.uint8)


@dataclass(frozen=True)
class RawImages(RawInput):
    """8-bit images: of any size if ``crop`` is given, and of exactly ``size`` otherwise.

    With ``crop``, the shorter side is resized to ``crop`` pixels (bilinear, antialiased), and the centre of ``size`` is taken.
    """

    channels: int
    size: Sequence[int]
    """Height and width."""
    crop: int | None = None
    bit_depth: int = 16
    """Bits that are used of files with 16 bits per grey value."""

    kind: ClassVar[str] = "images"
    endings: ClassVar[tuple[str, ...]] = EXTENSIONS

    @classmethod
    def of_any_size(cls, size: int, bit_depth: int = 16) -> RawImages:
        """Colour images whose shorter side is resized to 8/7 of ``size`` before the centre is cropped."""
        return cls(3, (size, size), shorter_side(size), bit_depth)

    @property
    def free(self) -> tuple[int, ...]:
        return (2, 3) if self.crop else ()

    @property
    def in_words(self) -> str:
        height, width = self.size
        seen = "upright, transparent pixels over white"
        if not self.crop:
            return f"uint8 tensor [B, {self.channels}, {height}, {width}], pixels 0 to 255; {seen}"
        return (
            f"uint8 tensor [B, {self.channels}, H, W] of any height and width, RGB, pixels 0 to 255; {seen}. The program "
            f"resizes the shorter side to {self.crop} pixels and takes the centre of {height}×{width}"
        )

    @property
    def file_code(self) -> str:
        mode = "RGB" if self.channels == 3 else "L"
        return (
            "import numpy\nfrom PIL import Image, ImageOps\n\n"
            "# For photographs of 8 bits without transparency; dp-microadam predict reads the others as training did.\n"
            f'image = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("{mode}")\n'
            f"raw = torch.from_numpy(numpy.array(image)).reshape(1, image.height, image.width, {self.channels})"
            ".permute(0, 3, 1, 2)"
        )

    def module(self) -> nn.Module:
        return ResizedCentre(self.size[0]) if self.crop else nn.Identity()

    def example(self) -> Tensor:
        height, width = self.size
        # Other sides than those of the crop, and different ones, or the trace would take them for constants.
        more = (61, 41) if self.crop else (0, 0)
        generator = torch.Generator().manual_seed(0)
        shape = (2, self.channels, height + more[0], width + more[1])
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def read(self, file: Path) -> Iterator[tuple[str, Tensor]]:
        require_pillow()
        image = decoded(file, self.bit_depth)
        if self.channels == 1:
            image = image.convert("L")
        height, width = self.size
        if not self.crop and image.size != (width, height):
            raise InputError(f"{file} has {image.width}×{image.height} pixels; it must have {width}×{height}, as in training")
        yield str(file), pixels_of(image)[None]


@dataclass(frozen=True)
class RawRows(RawInput):
    """Rows of a CSV file, whose columns are found by their names; others are passed over.

    ``columns`` are names of numbers, or what a recipe declares for each column. ``header`` names the columns of files that do
    not. The program takes encoded rows: what is text in a file is encoded by the declaration, which needs no other row.
    """

    columns: Sequence[str] | Mapping[str, Mapping[str, Any]]
    header: Sequence[str] = ()

    kind: ClassVar[str] = "table"
    endings: ClassVar[tuple[str, ...]] = (".csv",)

    @property
    def in_words(self) -> str:
        return (
            f"float32 tensor [B, {self._encoding.width}], the columns {', '.join(self._encoding.inputs)}, encoded as declared"
        )

    @property
    def file_code(self) -> str:
        return (
            "import csv\nimport json\n\n"
            "from dp_microadam.workbench.data.raw import RawRows\n\n"
            'rows = RawRows(json.load(open("export.json"))["input"]["columns"])\n'
            'with open("rows.csv", newline="") as file:\n'
            "    raw = torch.cat([rows.encoded(row) for row in csv.DictReader(file, skipinitialspace=True)])"
        )

    def module(self) -> nn.Module:
        return nn.Identity()

    def example(self) -> Tensor:
        return torch.zeros(2, self._encoding.width)

    def encoded(self, row: Mapping[str, str]) -> Tensor:
        """The inputs of the model for the cells of a row."""
        return torch.tensor([self._encoding.vector(row)])

    def read(self, file: Path) -> Iterator[tuple[str, Tensor]]:
        first, rows = open_rows(file)
        if self.header and not set(self._encoding.inputs) <= set(first):
            first, rows = open_rows(file, self.header)
        for name in self._encoding.inputs:
            if name not in first:
                raise InputError(
                    f"{file} has no column {name!r}, by its first line; it must have one, the model was trained on it"
                )
        for number, _, inputs in read_rows(file, rows, self.encoded):
            yield f"{file} row {number}", inputs

    @cached_property
    def _encoding(self) -> Columns:
        if isinstance(self.columns, Mapping):
            return Columns.of(self.columns)
        return Columns({name: Column() for name in self.columns})


def raw_input(description: Mapping[str, Any]) -> RawInput:
    """The raw input that :meth:`RawInput.description` describes.

    >>> raw_input(RawTensor((3,), "float32").description())
    RawTensor(shape=(3,), dtype='float32')
    """
    kinds: dict[Any, type[RawInput]] = {kind.kind: kind for kind in (RawImages, RawRows, RawTensor)}
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in description.items()}
    kind = fields.pop("kind", None)
    fields.pop("in_words", None)
    if kind not in kinds:
        raise InputError(f"the input of this export is {kind!r}; it must be one of {', '.join(kinds)}")
    return kinds[kind](**fields)


def texts_in(file: Path, column: str) -> Iterator[tuple[str, str]]:
    """The texts in a file, each with its name: ``column`` of a CSV file or of JSON lines, the lines of any other file.

    ``-`` is standard input, one text per line. Lines without anything are passed over.
    """
    if tabular := file.suffix.lower() in TEXT_ENDINGS[:2]:
        names, rows = open_rows(file)
        if names and column not in names:
            raise InputError(f"{file} has no column {column!r}, in which the model was given texts; name it so")
    else:
        rows = ((line, {column: text.rstrip("\n")}) for line, text in enumerate(_lines(file), 1) if text.strip())
    for number, line, text in read_rows(file, rows, lambda row: text_of(row.get(column))):
        yield f"{file} {f'row {number}' if tabular else f'line {line}'}", text


def _lines(file: Path) -> Iterator[str]:
    options: Any = {"encoding": "utf-8-sig", "errors": "surrogateescape"}
    if file == STANDARD_INPUT:
        buffer = getattr(sys.stdin, "buffer", None)
        yield from sys.stdin if buffer is None else io.TextIOWrapper(buffer, **options)
        return
    try:
        with file.open(**options) as stream:
            yield from stream
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from None
