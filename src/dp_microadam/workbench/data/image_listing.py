"""Finds the image files below a folder, their classes, and everything that is wrong with the folder; nothing is decoded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.image_decoding import EXTENSIONS

PARTS = ("train", "val", "test")
_OTHER_FORMATS = (".avif", ".cr2", ".dcm", ".dicom", ".dng", ".heic", ".heif", ".jp2", ".jxl", ".nef", ".nii", ".npy", ".psd")
"""Images, but not in a format that is read; passing them over would lose examples without a word."""
_CLUTTER_FOLDERS = ("__MACOSX", "@eaDir")
_LEFT_BY_SYSTEMS = ("Thumbs.db", "desktop.ini", ".DS_Store", ".ipynb_checkpoints", *_CLUTTER_FOLDERS)
_TABLES = (".csv", ".json", ".jsonl", ".toml", ".tsv")
"""Files beside the class folders that may belong to the data, such as a user_table."""
_SHOWN = 20


@dataclass(frozen=True, eq=False)
class ListedImages:
    """Image files, by their paths within the data folder, and the indices of their classes.

    One compact array: a list of a million strings would be copied into each worker by reference counting.
    """

    files: NDArray[np.bytes_]
    labels: NDArray[np.int64]


@dataclass
class Listing:
    """The images of a data folder.

    ``parts`` are the training and the test part if the folder has ``train`` and ``val`` (or ``test``), and all images
    together if it has class folders alone.
    """

    folder: Path
    classes: tuple[str, ...] = ()
    parts: list[ListedImages] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    """Names of files and folders that are no images by their names."""

    @property
    def note(self) -> str | None:
        """How many files were passed over, in a sentence; None if none were."""
        if not self.passed_over:
            return None
        kinds = Counter(_kind_of(name) for name in self.passed_over)
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5)) + (", …" if len(kinds) > 5 else "")
        files = (
            "1 file that is no image by its name"
            if len(self.passed_over) == 1
            else (f"{len(self.passed_over)} files that are no images by their names")
        )
        return f"passed over {files}: {listed}"

    def require_in_order(self) -> None:
        """Raise InputError with all problems at once, if there are any."""
        if len(self.problems) == 1:
            raise InputError(self.problems[0])
        if self.problems:
            more = len(self.problems) - _SHOWN
            rest = [f"and {more} more, which dp-microadam data check lists"] if more > 0 else []
            listed = "\n  ".join([*self.problems[:_SHOWN], *rest])
            raise InputError(f"{self.folder} has {len(self.problems)} problems to remove:\n  {listed}")


def list_images(folder: Path, expected_classes: int | None = None) -> Listing:
    """The images in ``train/CLASS`` and ``val/CLASS`` (or ``test/CLASS``), or in ``CLASS`` where there are no such folders.

    Classes are the folders' names in alphabetical order: of ``train``, or of ``folder`` itself.
    """
    listing = Listing(folder)
    if not any(_has_folders(folder / name) for name in PARTS):
        return _plain(listing, expected_classes)
    train = folder / "train"
    test = next((folder / name for name in ("val", "test") if (folder / name).is_dir()), folder / "val")
    for part in (train, test):
        if not part.is_dir():
            listing.problems.append(
                f"{folder} lacks the folder {part.name}; it must hold train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg"
            )
    if listing.problems:
        return listing
    listing.classes = _class_folders(listing, train, expected_classes)
    unknown = sorted(set(_class_folders(listing, test)) - set(listing.classes))
    for name in unknown:
        listing.problems.append(f"{test / name} is a class that {train} does not have; remove it, or add it there")
    listing.parts = [_scan(listing, train), _scan(listing, test)]
    return listing


def _plain(listing: Listing, expected_classes: int | None) -> Listing:
    listing.classes = _class_folders(listing, listing.folder, expected_classes)
    listing.parts = [_scan(listing, listing.folder)]
    return listing


def _has_folders(folder: Path) -> bool:
    """Whether it is a part: it has folders in it. A folder of images called train may be a class: of vehicles."""
    return folder.is_dir() and any(entry.is_dir() and not _is_clutter(entry.name) for entry in os.scandir(folder))


def _class_folders(listing: Listing, folder: Path, expected: int | None = None) -> tuple[str, ...]:
    names = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir() and not _is_clutter(entry.name):
            names.append(entry.name)
        elif _is_image(entry.name) and not entry.is_dir():
            listing.problems.append(f"{entry.path} lies in no class folder; put it into {folder}/CLASS, or remove it")
        elif folder != listing.folder or not entry.name.lower().endswith(_TABLES):
            listing.passed_over.append(entry.name)
    if not names:
        listing.problems.append(f"{folder} has no class folders; it must hold CLASS/*.jpg")
    if expected is not None and len(names) != expected:
        listing.problems.append(
            f"{folder} has {len(names)} class folders, not the {expected} of the published data; set verify_data=false if "
            "it is your own data"
        )
    return tuple(names)


def _scan(listing: Listing, part: Path) -> ListedImages:
    names: list[bytes] = []
    labels: list[int] = []
    prefix = "" if part == listing.folder else f"{part.name}/"
    for label, class_name in enumerate(listing.classes):
        if not (part / class_name).is_dir():
            continue
        for entry in sorted(os.scandir(part / class_name), key=lambda entry: entry.name):
            if _accepted(listing, entry):
                names.append(os.fsencode(f"{prefix}{class_name}/{entry.name}"))
                labels.append(label)
    if not names and listing.classes:
        listing.problems.append(f"{part} holds no images; put them into {part}/CLASS")
    return ListedImages(np.array(names, dtype=np.bytes_), np.array(labels, dtype=np.int64))


def _accepted(listing: Listing, entry: os.DirEntry[str]) -> bool:
    if _is_clutter(entry.name):
        listing.passed_over.append(entry.name)
    elif entry.is_dir():
        listing.problems.append(f"{entry.path} is a folder inside a class; images must lie in the class folder itself")
    elif entry.name.lower().endswith(_OTHER_FORMATS):
        listing.problems.append(f"{entry.path} is in a format that is not read; save it as one of {_listed(EXTENSIONS)}")
    elif _is_image(entry.name):
        return True
    else:
        listing.passed_over.append(entry.name)
    return False


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not _is_clutter(name)


def _is_clutter(name: str) -> bool:
    return name.startswith(".") or name in _CLUTTER_FOLDERS


def _kind_of(name: str) -> str:
    """The name itself where systems leave such files, else the ending: names that people give may tell whose a file is."""
    if name in _LEFT_BY_SYSTEMS:
        return name
    if name.startswith("."):
        return "hidden"
    return f"*.{name.rpartition('.')[2]}" if "." in name else "without an ending"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)
