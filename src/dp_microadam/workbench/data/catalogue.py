"""Catalogue of data sets, ``catalogue.toml``, and the folders in which they are searched for. Needs neither torch nor numpy."""

from __future__ import annotations

import importlib.util
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dp_microadam.errors import InputError
from dp_microadam.validation import require_one_of

FOLDER_VARIABLE = "DP_MICROADAM_DATA"
"""Environment variable with a folder that has one subfolder per data set."""

_DEBIAN_FOLDER = Path("/usr/share/datasets")
"""Install location of Debian's data packages."""


@dataclass(frozen=True)
class KnownData:
    """Metadata of a data set.

    ``kind`` is the file format, and ``reader`` the module of this folder and its function that gets a ``Source`` and returns
    what it has found. ``num_classes`` is None for the user's own data.
    """

    kind: str
    reader: str
    summary: str
    num_classes: int | None = None
    train_size: int | None = None
    shape: tuple[int, ...] = ()
    """Shape of one image; empty if images differ in size, or for the user's own data."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    classes: tuple[str, ...] = ()
    """Names of the classes, if they are not numbers."""
    header: tuple[str, ...] = ()
    """Names of the columns of a table without a header."""
    options: tuple[str, ...] = ()
    """Keys that a recipe may set under ``data_options``."""
    urls: tuple[str, ...] = ()
    downloads: tuple[str, ...] = ()
    """Names of the published files, which lie below each of the ``urls``."""
    digests: Mapping[str, str] = field(default_factory=dict)
    by_hand: str = ""
    """How to get data that cannot be downloaded automatically."""
    package: str = ""
    """Name of the pip package that contains the data, if any."""


def _read() -> dict[str, KnownData]:
    found = {}
    for name, entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items():
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        found[name] = KnownData(**fields)
    return found


_CATALOGUE = _read()
KNOWN_DATA = tuple(_CATALOGUE)


def known(name: str) -> KnownData:
    """Metadata of the data set called ``name``.

    >>> known("cifar10").num_classes
    10
    """
    return _CATALOGUE[require_one_of("data", name, KNOWN_DATA)]


def takes_columns(name: str) -> bool:
    """Whether a recipe declares the columns of this data set."""
    return known(name).kind == "table"


def usual_folders(name: str) -> list[Path]:
    """Folders searched for a data set, in order: ``$DP_MICROADAM_DATA`` if set, the user's data folder, the system's.

    The first is where downloads are stored.
    """
    variable = os.environ.get(FOLDER_VARIABLE)
    chosen = [Path(variable).expanduser()] if variable else []
    home = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser()
    return [folder / name for folder in (*chosen, home / "dp-microadam", _DEBIAN_FOLDER)]


def find(name: str, folder: str | None) -> Path:
    """The folder (or file) of a data set: ``folder`` if given, else the first of the usual ones that exists."""
    data = known(name)
    if data.package:
        if folder:
            raise InputError(f"data_folder is {folder!r}; {name} come with a Python package and are not read from a folder")
        if importlib.util.find_spec(data.package) is None:
            raise InputError(f"{name} were not found: {data.by_hand}")
        return Path(data.package)
    tables = {"table": "train.csv and test.csv", "text": "train.csv and test.csv (or .jsonl)"}
    wanted = " and ".join(data.downloads) or tables.get(data.kind, "train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg")
    if folder:
        path = Path(folder).expanduser()
        if not path.exists():
            raise InputError(f"data_folder is {folder!r}, which does not exist; it must hold {wanted}")
        return path
    if data.kind in tables and data.num_classes is None:
        raise InputError(f"data_folder is not given; {name} is your own data, name its file or its folder")
    folders = usual_folders(name)
    for path in folders:
        if path.is_dir() and any(path.iterdir()):
            return path
    how = f"run dp-microadam data get {name}" if data.downloads else data.by_hand
    raise InputError(
        f"{name} was not found: {how}, or put {wanted} into {' or '.join(map(str, folders))}, or name any other folder as "
        "data_folder"
    )


def is_here(name: str, folder: str | None) -> bool:
    """Whether :func:`find` succeeds."""
    try:
        find(name, folder)
    except InputError:
        return False
    return True
