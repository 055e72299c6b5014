"""Folders of image files with one subfolder per class, as for ImageNet. Images are decoded on access."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dp_microadam.data.augmentation import random_boxes
from dp_microadam.errors import DPMicroAdamError, InputError, UnreadableExample

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm")
SIZE = 224
"""Default height and width that images are resized to."""
_RESIZE_RATIO = 256 / 224
"""For evaluation, the shorter side is resized to 256/224 of the size before the centre crop."""


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Dataset of image files: pairs of an image as uint8 [3, size, size] and its class index.

    By default each image is resized so that its shorter side is 8/7 of ``size``, and the centre is cropped.
    :meth:`random_crops` returns a dataset of random resized crops instead.
    """

    def __init__(self, folder: Path, files: NDArray[np.bytes_], labels: NDArray[np.int64], size: int) -> None:
        self.folder = folder
        self._files = files
        self._labels = labels
        self._size = size
        self._crops = 0
        self._protected = False

    def part(self, rows: Tensor) -> ImageFolder:
        """The images with these indices."""
        return ImageFolder(self.folder, self._files[rows.numpy()], self._labels[rows.numpy()], self._size)

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

    def example_ids(self) -> NDArray[np.bytes_]:
        """Identifiers of the examples: file names relative to the folder, which do not depend on where it is stored."""
        return np.char.add(os.fsencode(self.folder.name) + b"/", self._files)

    def path(self, index: int) -> Path:
        """The file of an image."""
        return self.folder / os.fsdecode(bytes(self._files[index]))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = int(self._labels[index])
        try:
            image = _decoded(self.path(index))
        except InputError:
            if not self._protected:
                raise
            raise UnreadableExample(
                f"an image of the training data in {self.folder} cannot be decoded; which one is private, find it with "
                "dp-microadam data check"
            ) from None
        if not self._crops:
            return _centre(image, self._size), label
        views = torch.stack([_random_crop(image, self._size) for _ in range(self._crops)])
        return views if self._crops > 1 else views[0], label


def read_folder(folder: Path, size: int, expected_classes: int | None) -> tuple[ImageFolder, ImageFolder, int]:
    """The images in ``train`` and in ``val`` (or ``test``), and the number of classes.

    Classes are the subfolders of ``train`` in alphabetical order. Images are not decoded yet.

    Raises:
        InputError: if a folder is missing or empty, or contains a file without an image extension.
    """
    require_pillow()
    train = folder / "train"
    test = next((folder / name for name in ("val", "test") if (folder / name).is_dir()), folder / "val")
    for part in (train, test):
        if not part.is_dir():
            raise InputError(f"{folder} lacks the folder {part.name}; it must hold train/CLASS/*.jpg and val/CLASS/*.jpg")
    classes = _subfolders(train)
    if expected_classes is not None and len(classes) != expected_classes:
        raise InputError(
            f"{train} has {len(classes)} class folders, not the {expected_classes} of the published data; set "
            "verify_data=false if it is your own data"
        )
    unknown = set(_subfolders(test)) - set(classes)
    if unknown:
        raise InputError(f"{test / min(unknown)} is a class that {train} does not have; remove it, or add it there")
    return _scan(train, classes, size), _scan(test, classes, size), len(classes)


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    if not names:
        raise InputError(f"{folder} has no class folders; it must hold CLASS/*.jpg")
    return names


def _scan(folder: Path, classes: list[str], size: int) -> ImageFolder:
    names: list[bytes] = []
    labels: list[int] = []
    for label, class_name in enumerate(classes):
        if not (folder / class_name).is_dir():
            continue
        with os.scandir(folder / class_name) as entries:
            found = sorted(entry.name for entry in entries if not entry.name.startswith("."))
        for name in found:
            if not name.lower().endswith(EXTENSIONS):
                raise InputError(
                    f"{folder / class_name / name} is not an image by its name; its extension must be one of {EXTENSIONS}"
                )
            names.append(os.fsencode(f"{class_name}/{name}"))
        labels += [label] * len(found)
    if not names:
        raise InputError(f"{folder} holds no images; put them into {folder}/CLASS")
    # One compact array: a list of a million strings would be copied into each worker by reference counting.
    return ImageFolder(folder, np.array(names), np.array(labels, dtype=np.int64), size)


def require_pillow() -> None:
    """Raise DPMicroAdamError if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise DPMicroAdamError(
            "image files are decoded by Pillow, which is not installed; run pip install 'dp-microadam[images]'"
        ) from None


def _decoded(path: Path) -> Image:
    import PIL.Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            warnings.filterwarnings("ignore", category=UserWarning)  # odd EXIF data does not matter
            with PIL.Image.open(path) as image:
                return image.convert("RGB")
    except Exception as error:  # Pillow's decoders raise almost anything on damaged files
        raise InputError(f"{path} cannot be decoded as an image ({type(error).__name__}); replace or remove it") from None


def _random_crop(image: Image, size: int) -> Tensor:
    import PIL.Image

    box = random_boxes(image.height, image.width, 1)
    top, left, height, width = (int(side) for side in (box.top, box.left, box.height, box.width))
    part = image.resize((size, size), PIL.Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
    return _tensor(part)


def _centre(image: Image, size: int) -> Tensor:
    import PIL.Image

    scale = round(size * _RESIZE_RATIO) / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    whole = image.resize((width, height), PIL.Image.Resampling.BILINEAR)
    return _tensor(whole.crop((left, top, left + size, top + size)))


def _tensor(image: Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
