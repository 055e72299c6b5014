"""Datasets of image files with one folder per class, as for ImageNet. Images are decoded on access."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dp_microadam.errors import InputError, UnreadableExample
from dp_microadam.validation import require_integer
from dp_microadam.workbench.data.augmentation import random_box
from dp_microadam.workbench.data.columns import Unsuitable
from dp_microadam.workbench.data.dataset import Found, Source, UserIds, add_shared_users
from dp_microadam.workbench.data.raw import (
    BIT_DEPTHS,
    EXTENSIONS,
    RawImages,
    ResizedCentre,
    decoded,
    pixels_of,
    require_pillow,
    resized_pixels,
)
from dp_microadam.workbench.data.rows import Problems, open_rows, user_of

SIZE = 224
"""Default height and width that images are resized to."""

_OTHER_FORMATS = (".avif", ".cr2", ".dcm", ".dicom", ".dng", ".heic", ".heif", ".jp2", ".jxl", ".nef", ".nii", ".npy", ".psd")
"""Images, but not in a format that is read; passing them over would lose examples without a word."""
_CLUTTER = ("__MACOSX", "@eaDir")


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Dataset of image files: pairs of an image as uint8 [3, size, size] and its class index.

    ``files`` are paths within ``folder``, in one compact array: a list of a million strings would be copied into each worker by
    reference counting. By default each image is resized so that its shorter side is 8/7 of ``size``, and the centre is cropped.
    :meth:`random_crops` returns a dataset of random resized crops instead.
    """

    def __init__(
        self, folder: Path, files: NDArray[np.bytes_], labels: NDArray[np.int64], size: int, bit_depth: int = 16
    ) -> None:
        self.folder = folder
        self.users: UserIds | None = None
        self._files = files
        self._labels = labels
        self._size = size
        self._bit_depth = bit_depth
        self._centre = ResizedCentre(size)
        self._crops = 0
        self._protected = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image."""
        return 3, self._size, self._size

    def part(self, rows: NDArray[np.int64]) -> ImageFolder:
        """The images with these indices."""
        return ImageFolder(self.folder, self._files[rows], self._labels[rows], self._size, self._bit_depth)

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
        """Identifiers of the examples: paths within the folder, which do not depend on where it is stored."""
        return self._files

    def path(self, index: int) -> Path:
        """The file of an image."""
        return self.folder / os.fsdecode(bytes(self._files[index]))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            image = pixels_of(decoded(self.path(index), self._bit_depth))[None]
        except InputError:
            if not self._protected:
                raise
            raise UnreadableExample(
                f"an image of the training data in {self.folder} cannot be decoded; which one is private, find it with "
                "dp-microadam data check"
            ) from None
        views = torch.cat([self._random_crop(image) for _ in range(self._crops)]) if self._crops else self._centre(image)
        return views if self._crops > 1 else views[0], int(self._labels[index])

    def _random_crop(self, image: Tensor) -> Tensor:
        top, left, height, width = random_box(image.shape[-2], image.shape[-1])
        return resized_pixels(image[..., top : top + height, left : left + width], (self._size, self._size))


def read_images(source: Source) -> Found:
    """The images in ``train/CLASS`` and ``val/CLASS`` (or ``test/CLASS``), or in ``CLASS`` where there are no such folders.

    Classes are the folders' names in alphabetical order: of ``train``, or of the folder itself. None is decoded yet.
    """
    require_pillow()
    options, place, problems = source.options, source.place, source.problems
    bit_depth = require_integer("data_options.bit_depth", options.get("bit_depth", 16), BIT_DEPTHS.start, BIT_DEPTHS.stop - 1)
    size, listing, parts = source.image_size or SIZE, _Listing(place, problems), [place]
    if any((place / name).is_dir() for name in ("train", "val", "test")):
        parts = [place / "train", place / ("test" if (place / "test").is_dir() and not (place / "val").is_dir() else "val")]
    for part in parts:
        if not part.is_dir():
            wanted = "it must hold train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg"
            problems.add(f"{place} lacks the folder {part.name}", wanted)
    problems.refuse()
    classes, *others = (listing.class_folders(part) for part in parts)
    expected = source.data.num_classes if source.verify else None
    if expected not in (None, len(classes)):
        fault = f"{parts[0]} has {len(classes)} class folders, not the {expected} of the published data"
        problems.add(fault, "set verify_data=false if it is your own data")
    elif len(classes) == 1:
        problems.add(f"{parts[0]} has a single class folder, {classes[0]}", "it must have at least two, one for each class")
    for name in sorted(set().union(*others) - set(classes)):
        problems.add(f"{parts[1] / name} is a class that {parts[0]} does not have", "remove it, or add it there")
    found = [ImageFolder(place, *listing.images(part, classes), size, bit_depth) for part in parts]
    _add_users(source, found)
    problems.refuse()
    notes = []
    if listing.passed_over:
        files = "file" if listing.passed_over == 1 else "files"
        notes.append(f"skipped {listing.passed_over} {files} without an image extension")
    if len(found) == 1:
        divided = "" if found[0].users is None else ", divided by whose images they are,"
        notes.append(f"{place} has no test part of its own: a fifth of it{divided} is set aside for tests, and not protected")
    test = found[1] if len(found) == 2 else None
    return Found(found[0], test, classes, RawImages.of_any_size(size, bit_depth), tuple(notes))


class _Listing:
    """Finds image files and everything that is wrong with a folder; nothing is decoded."""

    def __init__(self, folder: Path, problems: Problems) -> None:
        self.folder = folder
        self._problems = problems
        self.passed_over = 0

    def class_folders(self, part: Path) -> list[str]:
        names = []
        for entry in _entries(part):
            if entry.is_dir() and not _is_clutter(entry.name):
                names.append(entry.name)
            elif _is_image(entry):
                self._problems.add(f"{entry.path} lies in no class folder", f"put it into {part}/CLASS, or remove it")
            else:
                self.passed_over += 1
        if not names:
            self._problems.add(f"{part} has no class folders", "it must hold CLASS/*.jpg")
        return names

    def images(self, part: Path, classes: Iterable[str]) -> tuple[NDArray[np.bytes_], NDArray[np.int64]]:
        names, labels = [], []
        for label, class_name in enumerate(classes):
            for entry in _entries(part / class_name):
                if _is_image(entry):
                    names.append(os.fsencode(os.path.relpath(entry.path, self.folder)))
                    labels.append(label)
                elif entry.is_dir() and not _is_clutter(entry.name):
                    self._problems.add(f"{entry.path} is a folder inside a class", "images must lie in the class folder itself")
                elif entry.name.lower().endswith(_OTHER_FORMATS) and not _is_clutter(entry.name):
                    remedy = f"save it as one of {', '.join(EXTENSIONS)}"
                    self._problems.add(f"{entry.path} is in a format that is not read", remedy)
                else:
                    self.passed_over += 1
        if not names and classes:
            self._problems.add(f"{part} holds no images", f"put them into {part}/CLASS")
        return np.array(names, dtype=np.bytes_), np.array(labels, dtype=np.int64)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What a folder holds, by name; nothing if there is none."""
    return sorted(os.scandir(folder), key=lambda entry: entry.name) if folder.is_dir() else []


def _is_image(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(EXTENSIONS) and not entry.is_dir() and not _is_clutter(entry.name)


def _is_clutter(name: str) -> bool:
    return name.startswith(".") or name in _CLUTTER


def _add_users(source: Source, parts: list[ImageFolder]) -> None:
    """Whose each image is: by a CSV file of files and users, or by a pattern on the file names. A test part may name none."""
    whose = _users_by(source)
    if whose is None:
        return
    by, user_by_file = whose
    for number, part in enumerate(parts):
        files = [os.fsdecode(bytes(file)) for file in part.example_ids()]
        users, nobody = [], []
        for file in files:
            try:
                users.append(user_of(user_by_file(file)))
            except Unsuitable:
                nobody.append(file)
        if nobody and (number == 0 or users):
            remedy = "every image must have one, rename the file or extend what names users"
            source.problems.add(f"{source.place} has an image without a user by {by}", remedy, nobody)
        part.users = np.array(users, np.str_) if users else None
    if len(parts) == 2:
        add_shared_users(source.problems, source.place, parts[0].users, parts[1].users)


def _users_by(source: Source) -> tuple[str, Callable[[str], str | None]] | None:
    """What names users, and the function from a file's path within the folder to its user."""
    table, pattern = (source.options.get(name) for name in ("user_table", "user_pattern"))
    if table is None and pattern is None:
        return None
    if table is not None and pattern is not None:
        raise InputError(f"data_options has user_table = {table!r} and user_pattern = {pattern!r}; it must have one of them")
    for name, value in (("user_table", table), ("user_pattern", pattern)):
        if value is not None and not (isinstance(value, str) and value):
            raise InputError(f"data_options.{name} is {value!r}; it must be a string")
    if pattern is None:
        place = source.place / Path(str(table)).expanduser()
        return str(place), _table_of_users(place, source.problems).get
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise InputError(f"data_options.user_pattern is {pattern!r}; it must be a regular expression ({error})") from None
    if compiled.groups != 1:
        raise InputError(
            f"data_options.user_pattern is {pattern!r} with {compiled.groups} groups; it must have one group (…), the user, "
            "and match the whole file name"
        )

    def user_by_file(file: str) -> str | None:
        match = compiled.fullmatch(file.rpartition("/")[2])
        return match and match[1]

    return f"user_pattern '{pattern}'", user_by_file


def _table_of_users(place: Path, problems: Problems) -> dict[str, str]:
    users: dict[str, str] = {}
    names, rows = open_rows(place)
    if not {"file", "user"} <= set(names):
        raise InputError(f"{place} must have one column 'file' and one column 'user'; its first line must name them")
    for line, row in rows:
        if isinstance(row, Unsuitable):
            problems.add(f"{place} has a row that {row.fault}", row.remedy, [f"line {line}"])
            continue
        file, user = os.path.normpath(row["file"].strip()), row["user"].strip()
        if users.setdefault(file, user) != user:
            problems.add(f"{place} has a row that gives a file another user than before", "it must have one", [f"line {line}"])
    return users
