"""Where data sets lie on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from dp_microadam.data.catalogue import KnownData
from dp_microadam.errors import InputError

FOLDER_VARIABLE = "DP_MICROADAM_DATA"
"""Environment variable with a folder that has one subfolder per data set."""

_DEBIAN_FOLDER = Path("/usr/share/datasets")
"""Where Debian's data packages install."""


def usual_folders(name: str) -> list[Path]:
    """Where a data set is looked for, in this order: the variable's folder, the user's own, the system's."""
    return [own_folder(name), _user_folder() / name, _DEBIAN_FOLDER / name][0 if os.environ.get(FOLDER_VARIABLE) else 1 :]


def own_folder(name: str) -> Path:
    """Where a download goes: under the environment variable's folder if it is set, else under the user's data folder."""
    variable = os.environ.get(FOLDER_VARIABLE)
    return (Path(variable).expanduser() if variable else _user_folder()) / name


def find(name: str, data: KnownData, folder: str | None) -> Path:
    """The folder (or file) of a data set: ``folder`` if given, else the first of the usual ones that exists.

    Raises:
        InputError: saying where to put what.
    """
    if folder:
        path = Path(folder).expanduser()
        if not path.exists():
            raise InputError(f"data_folder is {folder!r}, which does not exist; it must hold {wanted_files(data)}")
        return path
    if data.kind == "table":
        raise InputError("data_folder is not given; table is your own data, name its file or its folder")
    usual = usual_folders(name)
    for path in usual:
        if path.is_dir() and any(path.iterdir()):
            return path
    raise InputError(
        f"{name} was not found: {how_to_get(name, data)}, or put {wanted_files(data)} into "
        f"{' or '.join(map(str, usual))}, or name any other folder as data_folder"
    )


def wanted_files(data: KnownData) -> str:
    """What a folder must hold, in words."""
    if data.downloads:
        return " and ".join(download.name for download in data.downloads)
    return "train.csv and test.csv (or .npz)" if data.kind == "table" else "train/CLASS/*.jpg and val/CLASS/*.jpg"


def how_to_get(name: str, data: KnownData) -> str:
    if not data.downloads:
        return data.by_hand
    also = " (on Debian and Ubuntu also apt install dataset-fashion-mnist)" if name == "fashion-mnist" else ""
    return f"run dp-microadam data get {name}{also}"


def _user_folder() -> Path:
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(home).expanduser() / "dp-microadam"
