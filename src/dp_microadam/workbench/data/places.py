"""Folders in which data sets are searched for and stored."""

from __future__ import annotations

import os
from pathlib import Path

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.catalogue import KnownData
from dp_microadam.workbench.data.download import PARTIAL

FOLDER_VARIABLE = "DP_MICROADAM_DATA"
"""Environment variable with a folder that has one subfolder per data set."""

_DEBIAN_FOLDER = Path("/usr/share/datasets")
"""Install location of Debian's data packages."""


def usual_folders(name: str) -> list[Path]:
    """Folders searched for a data set, in order: ``$DP_MICROADAM_DATA`` if set, the user's data folder, the system's."""
    variable = os.environ.get(FOLDER_VARIABLE)
    chosen = [Path(variable).expanduser()] if variable else []
    return [folder / name for folder in (*chosen, _user_folder(), _DEBIAN_FOLDER)]


def own_folder(name: str) -> Path:
    """Target folder of a download."""
    return usual_folders(name)[0]


def find(name: str, data: KnownData, folder: str | None) -> Path:
    """The folder (or file) of a data set: ``folder`` if given, else the first of the usual ones that exists.

    Raises:
        InputError: if it was not found; the message says how to get it.
    """
    if folder:
        path = Path(folder).expanduser()
        if not path.exists():
            raise InputError(f"data_folder is {folder!r}, which does not exist; it must hold {wanted_files(data)}")
        return path
    if data.kind in ("table", "text") and data.num_classes is None:
        raise InputError(f"data_folder is not given; {name} is your own data, name its file or its folder")
    usual = usual_folders(name)
    for path in usual:
        # Partial downloads do not count.
        if path.is_dir() and any(not entry.name.endswith(PARTIAL) for entry in path.iterdir()):
            return path
    raise InputError(
        f"{name} was not found: {how_to_get(name, data)}, or put {wanted_files(data)} into "
        f"{' or '.join(map(str, usual))}, or name any other folder as data_folder"
    )


def is_here(name: str, data: KnownData, folder: str | None) -> bool:
    """Whether :func:`find` succeeds, or the data set comes with a package."""
    try:
        return bool(data.package) or find(name, data, folder).exists()
    except InputError:
        return False


def wanted_files(data: KnownData) -> str:
    """The files a folder must contain, for messages."""
    if data.downloads:
        return " and ".join(download.name for download in data.downloads)
    tables = {"table": "train.csv and test.csv (or .npz)", "text": "train.csv and test.csv (or .jsonl)"}
    return tables.get(data.kind, "train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg")


def how_to_get(name: str, data: KnownData) -> str:
    """How to get the data set, for messages."""
    if not data.downloads:
        return data.by_hand
    also = " (on Debian and Ubuntu also apt install dataset-fashion-mnist)" if name == "fashion-mnist" else ""
    return f"run dp-microadam data get {name}{also}"


def _user_folder() -> Path:
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(home).expanduser() / "dp-microadam"
