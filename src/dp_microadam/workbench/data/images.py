"""Datasets of image files with one folder per class, as for ImageNet. Images are decoded on access."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dp_microadam.errors import InputError, UnreadableExample
from dp_microadam.workbench.data.augmentation import random_boxes
from dp_microadam.workbench.data.image_decoding import decoded, require_pillow
from dp_microadam.workbench.data.image_listing import list_images
from dp_microadam.workbench.data.resampling import resized_centre

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE = 224
"""Default height and width that images are resized to."""


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Dataset of image files: pairs of an image as uint8 [3, size, size] and its class index.

    ``files`` are paths within ``folder``. By default each image is resized so that its shorter side is 8/7 of ``size``, and the
    centre is cropped. :meth:`random_crops` returns a dataset of random resized crops instead.
    """

    def __init__(
        self, folder: Path, files: NDArray[np.bytes_], labels: NDArray[np.int64], size: int, bit_depth: int = 16
    ) -> None:
        self.folder = folder
        self._files = files
        self._labels = labels
        self._size = size
        self._bit_depth = bit_depth
        self._crops = 0
        self._protected = False

    def part(self, rows: Tensor) -> ImageFolder:
        """The images with these indices."""
        chosen = rows.numpy()
        return ImageFolder(self.folder, self._files[chosen], self._labels[chosen], self._size, self._bit_depth)

    def protected(self) -> ImageFolder:
        """The same images as private training data: an error message does not tell which image caused it."""
        other = copy.copy(self)
        other._protected = True
        return other

    def random_crops(self, views: int = 1) -> ImageFolder:
        """The same images as random resized crops: [3, size, size], or [views, 3, size, size] for several views."""
        other = copy.copy(self)
        other._crops = views
        return other

    def __len__(self) -> int:
        return len(self._files)

    @property
    def place(self) -> Path:
        """The folder of the part that these images are of: train, or all of it where there are no parts."""
        part, *rest = os.fsdecode(bytes(self._files[0])).split("/")
        return self.folder / part if len(rest) == 2 else self.folder

    def example_ids(self) -> NDArray[np.bytes_]:
        """Identifiers of the examples: paths within the folder, which do not depend on where it is stored."""
        return self._files

    def path(self, index: int) -> Path:
        """The file of an image."""
        return self.folder / os.fsdecode(bytes(self._files[index]))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = int(self._labels[index])
        try:
            image = decoded(self.path(index), self._bit_depth)
        except InputError:
            if not self._protected:
                raise
            raise UnreadableExample(
                f"an image of the training data in {self.folder} cannot be decoded; which one is private, find it with "
                "dp-microadam data check"
            ) from None
        if not self._crops:
            return _tensor(resized_centre(image, self._size)), label
        views = torch.stack([_random_crop(image, self._size) for _ in range(self._crops)])
        return views if self._crops > 1 else views[0], label


@dataclass(frozen=True, eq=False)
class FoundImages:
    """The images of a data folder. ``test`` is None if the folder has no test part: it is split off then."""

    train: ImageFolder
    test: ImageFolder | None
    classes: tuple[str, ...]
    notes: tuple[str, ...]
    """What the owner of the folder should know about it."""


def read_folder(folder: Path, size: int, expected_classes: int | None, bit_depth: int = 16) -> FoundImages:
    """The images of a folder, as ``list_images`` finds them. None is decoded yet.

    Raises:
        InputError: with all that is wrong with the folder.
    """
    require_pillow()
    listing = list_images(folder, expected_classes)
    listing.require_in_order()
    parts = [ImageFolder(folder, part.files, part.labels, size, bit_depth) for part in listing.parts]
    notes = () if listing.note is None else (listing.note,)
    return FoundImages(parts[0], parts[1] if len(parts) == 2 else None, listing.classes, notes)


def _random_crop(image: Image, size: int) -> Tensor:
    import PIL.Image

    box = random_boxes(image.height, image.width, 1)
    top, left, height, width = (int(side) for side in (box.top, box.left, box.height, box.width))
    part = image.resize((size, size), PIL.Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
    return _tensor(part)


def _tensor(image: Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
