"""Data sets by name: where each is found, and its public constants."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dp_microadam.data import idx
from dp_microadam.data.dataset import ImageData, split
from dp_microadam.data.digits import read_digits
from dp_microadam.errors import InputError

FOLDER_VARIABLE = "DP_MICROADAM_DATA"
"""Environment variable with a folder that has one subfolder per data set."""

_DEBIAN_FOLDER = Path("/usr/share/datasets")
"""Where Debian's data packages install."""


@dataclass(frozen=True)
class Source:
    """Constants of a data set, published with it; ``in_files`` for those read from a folder of idx files."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int
    in_files: bool


_SOURCES = {
    "digits": Source((0.1307,), (0.3081,), 10, in_files=False),
    "mnist": Source((0.1307,), (0.3081,), 10, in_files=True),
    "fashion-mnist": Source((0.2860,), (0.3530,), 10, in_files=True),
}
KNOWN_DATA = tuple(_SOURCES)


def load(name: str, folder: str | None, *, validation_fraction: float = 0.1, split_seed: int = 0) -> ImageData:
    """The data set called ``name``, from ``folder`` or, without one, from where it usually is.

    The validation part is ``validation_fraction`` of the published training part; the test part is the published one and
    does not depend on ``split_seed``.

    Raises:
        InputError: if the name is unknown, or its files are missing or damaged.
    """
    if name not in _SOURCES:
        raise InputError(f"data is {name!r}; it must be one of {', '.join(map(repr, KNOWN_DATA))}")
    source = _SOURCES[name]
    if source.in_files:
        images, labels, test_images, test_labels = idx.read_folder(_folder_of(name, folder))
    elif folder:
        raise InputError(f"data_folder is {folder!r}; {name} come inside a Python package and are not read from a folder")
    else:
        images, labels, test_images, test_labels = read_digits()
    training, validation = split(len(images), validation_fraction, split_seed)
    return ImageData(
        name=name,
        num_classes=source.num_classes,
        mean=source.mean,
        std=source.std,
        train_images=images[training],
        train_labels=labels[training],
        validation_images=images[validation],
        validation_labels=labels[validation],
        test_images=test_images,
        test_labels=test_labels,
    )


def _folder_of(name: str, folder: str | None) -> Path:
    if folder:
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise InputError(f"data_folder is {folder!r}, which is not a folder; it must hold {', '.join(idx.FILE_NAMES)}")
        return path
    usual = _usual_folders(name)
    for path in usual:
        if path.is_dir():
            return path
    raise InputError(
        f"{name} was not found: put {', '.join(idx.FILE_NAMES)} (plain or .gz) into {' or '.join(map(str, usual))}, or into "
        f"any folder given as data_folder{_hint(name)}"
    )


def _usual_folders(name: str) -> list[Path]:
    own = os.environ.get(FOLDER_VARIABLE)
    return [Path(folder).expanduser() / name for folder in (own, _DEBIAN_FOLDER) if folder]


def _hint(name: str) -> str:
    if name == "fashion-mnist":
        return "; on Debian and Ubuntu, apt install dataset-fashion-mnist does so"
    return f"; the environment variable {FOLDER_VARIABLE} names a folder with a subfolder {name}"
