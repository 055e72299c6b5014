"""Arrays of features on disk: private like the data they come from, written completely or not at all, and easy to remove.

Each entry is a folder named after a key, with one ``.npy`` file per array. It is written under another name, synced, and then
renamed, so that an entry is complete if it exists. Only the user who wrote it can read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_microadam.durable_files import sync_folder
from dp_microadam.errors import InputError

Arrays = list[NDArray[Any]]

_DIGEST = "sha256"
_ENTRY = re.compile(r"[0-9a-f]{64}(\.(?P<writer>\d+)\.unfinished)?")


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/dp-microadam/features``, by default below ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "dp-microadam" / "features"


class FeatureStore:
    """The entries of one folder.

    Formal guarantees: an entry that :meth:`read` returns was written to its end, by this user, and every byte of it is as it
    was written. Entries and what interrupted processes left of theirs have permissions 0700, their files 0600, and
    :meth:`clean` removes both. A folder that is a link, or that others own or may write to, is refused.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder).expanduser()

    def read(self, key: str) -> Arrays | None:
        """The arrays of an entry, memory-mapped; None if there is none, or none as it was written."""
        entry = self.folder / key
        if not self.holds(key) or not _is_own(entry):
            return None
        try:
            if (entry / _DIGEST).read_text() != _digest(entry):
                return None
        except OSError:
            return None
        return _mapped(entry)

    def holds(self, key: str) -> bool:
        """Whether there is such an entry, which :meth:`read` looks into."""
        self._refuse_folder_of_others()
        return (self.folder / key).is_dir()

    def write(
        self, key: str, shapes: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], fill: Callable[[Arrays], None]
    ) -> Arrays:
        """Make an entry of arrays of these shapes and types, which ``fill`` fills, and read it; if it raises, nothing is left.

        Of two processes that write one entry, the last one's is kept.

        Raises:
            InputError: if there is not enough room on the disk.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._refuse_folder_of_others()
        self._remove_abandoned()
        self._refuse_full_disk(sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes))
        unfinished = self.folder / f"{key}.{os.getpid()}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        try:
            arrays = [_new_array(unfinished / f"{number}.npy", *each) for number, each in enumerate(shapes)]
            fill(arrays)
            for array in arrays:
                array.flush()
            del arrays
            (unfinished / _DIGEST).touch(mode=0o600)
            (unfinished / _DIGEST).write_text(_digest(unfinished))
            for file in unfinished.iterdir():
                _sync(file)
            sync_folder(unfinished)
            shutil.rmtree(self.folder / key, ignore_errors=True)
            with contextlib.suppress(OSError):  # another process was faster; its entry has the same key
                unfinished.rename(self.folder / key)
            sync_folder(self.folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return _mapped(self.folder / key)

    def clean(self) -> int:
        """Remove all entries and what was left unfinished; returns the number of bytes. Other files are left alone."""
        self._refuse_folder_of_others()
        freed = 0
        for entry in self._entries():
            freed += sum(file.stat().st_size for file in entry.iterdir())
            shutil.rmtree(entry)
        with contextlib.suppress(OSError):  # not there, or something else is in it
            self.folder.rmdir()
        return freed

    def _entries(self) -> list[Path]:
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return [entry for entry in found if _ENTRY.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink()]

    def _remove_abandoned(self) -> None:
        for entry in self._entries():
            match = _ENTRY.fullmatch(entry.name)
            writer = match and match["writer"]
            if writer and not _is_running(int(writer)):
                shutil.rmtree(entry, ignore_errors=True)

    def _refuse_folder_of_others(self) -> None:
        if os.path.lexists(self.folder) and not _is_own(self.folder):
            raise InputError(
                f"features would be kept in {self.folder}, which is a link, or which others own or may write to; give a "
                "folder of your own (chmod go-w), or set XDG_CACHE_HOME to one"
            )

    def _refuse_full_disk(self, wanted: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if wanted > free:
            raise InputError(
                f"features would take {wanted / 2**30:.1f} GiB, but {self.folder} has {free / 2**30:.1f} GiB free; make room, "
                "set XDG_CACHE_HOME to a larger disk, or do not keep them"
            )


def _is_own(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _digest(entry: Path) -> str:
    """The digest of all arrays of an entry."""
    whole = hashlib.sha256()
    for path in sorted(entry.glob("*.npy")):
        with path.open("rb") as file:
            whole.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


def _mapped(entry: Path) -> Arrays:
    # Copy on write: torch wants arrays that can be written to, and the files must not change.
    return [np.load(entry / f"{number}.npy", mmap_mode="c") for number in range(len(list(entry.glob("*.npy"))))]


def _new_array(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    path.touch(mode=0o600)
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
