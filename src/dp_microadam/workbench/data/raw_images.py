"""Image files as the raw input of a deployed model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.training.raw_inputs import RawInput
from dp_microadam.workbench.data.image_decoding import EXTENSIONS, decoded, require_pillow
from dp_microadam.workbench.data.resampling import ResizedCentre, shorter_side


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
        pixels = torch.from_numpy(np.array(image)).reshape(image.height, image.width, self.channels)
        yield str(file), pixels.permute(2, 0, 1)[None].contiguous()
