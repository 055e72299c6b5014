"""A small file for values that must survive a killed process and tell nothing afterwards: the state of a private search."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from dp_microadam.durable_files import sync_folder
from dp_microadam.errors import InputError, PrivacyError

_COPY = 4096
_DIGEST = hashlib.sha256().digest_size


class SecretState:
    """Values in a file of fixed size that only its owner may read, open and locked in one process.

    The file has two copies of the values; each write replaces the older one in place. A killed process leaves at least one
    intact copy, and no earlier version of the file that could be recovered from a disk's free space.

    Formal guarantees: when :meth:`write` returns, the values are on disk; after a crash the file has the values of the last
    write or of the one before. Its size, and how often it was written, do not depend on the values or show in it. A copy of
    the file, from which a second process could go on, is refused. Assumes a file system whose fsync and flock work as
    specified, and that writes in place.
    """

    def __init__(self, path: Path) -> None:
        """Open and lock the file at ``path``; it is created empty if it does not exist."""
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._closed = False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                reason = "is in use by another process; only one may go on with a search, wait for it or stop it"
            else:
                reason = f"cannot be locked ({error.strerror}); put the folder on a file system with locks"
            raise PrivacyError(f"{path} {reason}") from None
        os.ftruncate(self._file, 2 * _COPY)
        sync_folder(path.parent)
        _close_in_forked_children(self)
        self._turn, self._slot = 0, 0  # of the last write, and where the next one goes
        self._values: dict[str, Any] = {}
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    @property
    def begun(self) -> bool:
        """Whether values were ever written completely."""
        return bool(self._values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def write(self, **values: Any) -> None:
        """Change these values; the others stay as they are."""
        changed = {**self._values, **values}
        turn = (self._turn + 1) % 3  # cyclic, so that it does not count
        text = json.dumps({"turn": turn, "file": os.fstat(self._file).st_ino, "values": changed}).encode()
        content = text.ljust(_COPY - _DIGEST)
        if len(content) > _COPY - _DIGEST:
            raise InputError(f"the state takes {len(text)} bytes, more than {_COPY - _DIGEST}; choose among fewer settings")
        os.pwrite(self._file, hashlib.sha256(content).digest() + content, self._slot * _COPY)
        os.fsync(self._file)
        self._slot = 1 - self._slot
        self._turn, self._values = turn, changed

    def _read(self) -> None:
        copies = [self._copy(slot) for slot in (0, 1)]
        intact = [slot for slot in (0, 1) if copies[slot] is not None]
        if len(intact) == 2:
            turns = [copy["turn"] for copy in copies if copy is not None]
            intact = [0] if turns[0] == (turns[1] + 1) % 3 else [1]
        newest = copies[intact[0]] if intact else None
        if newest is not None:
            self._slot = 1 - intact[0]
            self._turn, self._values = newest["turn"], newest["values"]

    def _copy(self, slot: int) -> Mapping[str, Any] | None:
        found = os.pread(self._file, _COPY, slot * _COPY)
        digest, content = found[:_DIGEST], found[_DIGEST:]
        if len(found) < _COPY or hashlib.sha256(content).digest() != digest:
            return None
        values: dict[str, Any] = json.loads(content)
        if values["file"] != os.fstat(self._file).st_ino:
            raise PrivacyError(
                f"{self.path} is a copy: two searches that go on from one beginning are not covered by its epsilon; continue "
                "the original, or begin a new search in a new folder"
            )
        return values

    def close(self) -> None:
        """Close and unlock the file. Closing twice is allowed."""
        if not self._closed:
            self._closed = True
            os.close(self._file)

    def __enter__(self) -> SecretState:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _close_in_forked_children(state: SecretState) -> None:
    """Close the inherited file in forked data-loading workers, which would hold the lock after this process was killed."""
    reference = weakref.ref(state)

    def close_inherited() -> None:
        inherited = reference()
        if inherited is not None:
            inherited.close()

    os.register_at_fork(after_in_child=close_inherited)


def destroy(path: Path) -> None:
    """Overwrite and remove a file, or all files of a folder and the folder; does nothing if there is none.

    Formal guarantees: no name leads to the content any more, and on a disk that writes in place it is overwritten. A journal,
    a snapshot, a copy-on-write file system and the spare blocks of a solid-state disk may keep it.
    """
    if path.is_dir() and not path.is_symlink():
        for entry in list(path.iterdir()):
            destroy(entry)
        path.rmdir()
    elif path.exists() or path.is_symlink():
        if path.is_file() and not path.is_symlink():
            _overwrite(path)
        path.unlink(missing_ok=True)


def _overwrite(path: Path) -> None:
    path.chmod(0o600)
    with open(path, "r+b", buffering=0) as file:
        left = path.stat().st_size
        while left > 0:
            left -= file.write(bytes(min(left, 1 << 20)))
        os.fsync(file.fileno())
