"""Features on disk: private like the data they come from, written completely or not at all, and easy to remove.

An entry is one ``.npy`` file with a row per example. It is written under another name, synced, and then renamed to its key and
the digest of its content, so that an entry is complete if it exists, and every byte of it is as it was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_microadam.durable_files import sync_folder
from dp_microadam.errors import InputError

_ENTRY = re.compile(r"[0-9a-f]{64}\.([0-9a-f]{64}\.npy|(?P<writer>\d+)\.unfinished)")


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/dp-microadam/features``, by default below ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "dp-microadam" / "features"


class FeatureStore:
    """The entries of one folder.

    Formal guarantees: an entry that :meth:`read` returns was written to its end, by this user, and every byte of it is as it
    was written. The folder has permissions 0700, entries and what interrupted processes left of theirs 0600, and :meth:`clean`
    removes both. A folder or entry that is a link, or that others own or may write to, is refused or not used.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder).expanduser()

    def read(self, key: str) -> NDArray[Any] | None:
        """The rows of an entry, memory-mapped; None if there is none, or none as it was written."""
        for path in self._entries():
            if path.name.startswith(key) and path.suffix == ".npy" and _is_own(path) and _digest(path) == path.suffixes[-2][1:]:
                # Copy on write: torch wants arrays that can be written to, and the file must not change.
                return np.load(path, mmap_mode="c", allow_pickle=False)
        return None

    def write(self, key: str, count: int, row: np.dtype[Any], fill: Callable[[NDArray[Any]], None]) -> NDArray[Any]:
        """Make an entry of ``count`` rows, which ``fill`` fills, and read it; if it raises, nothing is left.

        Of two processes that write one entry, either's is kept.

        Raises:
            InputError: if there is not enough room on the disk.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self._entries():  # what killed processes left unfinished, and entries that are not as they were written
            match = _ENTRY.fullmatch(left.name)
            writer = match and match["writer"]
            if (writer and not _is_running(int(writer))) or (not writer and left.name.startswith(key)):
                left.unlink(missing_ok=True)
        self._refuse_full_disk(count * row.itemsize)
        unfinished = self.folder / f"{key}.{os.getpid()}.unfinished"
        try:
            unfinished.touch(mode=0o600)
            rows = np.lib.format.open_memmap(unfinished, mode="w+", dtype=row, shape=(count,))
            fill(rows)
            rows.flush()
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.rename(self.folder / f"{key}.{_digest(unfinished)}.npy")
            sync_folder(self.folder)
        finally:
            unfinished.unlink(missing_ok=True)
        found = self.read(key)
        if found is None:
            raise InputError(f"features in {self.folder} changed while they were written; give a folder that nobody else uses")
        return found

    def clean(self) -> int:
        """Remove all entries and what was left unfinished; returns the number of bytes. Other files are left alone."""
        freed = 0
        for entry in self._entries():
            freed += entry.stat().st_size
            entry.unlink()
        with contextlib.suppress(OSError):  # not there, or something else is in it
            self.folder.rmdir()
        return freed

    def _entries(self) -> list[Path]:
        if os.path.lexists(self.folder) and not _is_own(self.folder):
            raise InputError(
                f"features would be kept in {self.folder}, which is a link, or which others own or may write to; give a "
                "folder of your own (chmod go-w), or set XDG_CACHE_HOME to one"
            )
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return [entry for entry in found if _ENTRY.fullmatch(entry.name) and entry.is_file() and not entry.is_symlink()]

    def _refuse_full_disk(self, wanted: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if wanted > free:
            raise InputError(
                f"features would take {wanted / 2**30:.1f} GiB, but {self.folder} has {free / 2**30:.1f} GiB free; make room, "
                "set XDG_CACHE_HOME to a larger disk, or do not keep them"
            )


def _is_own(path: Path) -> bool:
    found = path.lstat()
    return not stat.S_ISLNK(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
