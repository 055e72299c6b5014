"""Atomic checkpoints: a checkpoint is either complete or not there.

A checkpoint is one file: a line that names the format, the SHA-256 of the rest, and the output of ``torch.save``. It is
streamed to a temporary file, synced and renamed, so a crash at any moment leaves earlier checkpoints intact. It never
contains the random state of noise or sampling, nor partial sums of a step.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
from pathlib import Path
from typing import IO, Any

import torch

from dp_microadam.durable_files import write_durably
from dp_microadam.errors import DPMicroAdamError
from dp_microadam.validation import require_integer

_HEADER = b"dp-microadam checkpoint 1\n"
_NAME = re.compile(r"step-(\d{9})\.ckpt")


class CheckpointError(DPMicroAdamError):
    """A checkpoint could not be written or read."""


class CheckpointFolder:
    """The checkpoints of one run; only the last ``keep`` are kept."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path
        self.keep = require_integer("keep_checkpoints", keep, 1)

    def write(self, position: int, content: dict[str, Any]) -> Path:
        """Write the checkpoint of a run that has recorded ``position`` steps, then delete the oldest.

        Raises:
            CheckpointError: if writing fails; earlier checkpoints are still there.
        """
        target = self.path / f"step-{position:09d}.ckpt"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with write_durably(target) as file:
                file.write(_HEADER + bytes(hashlib.sha256().digest_size))
                body = _Hashed(file)
                torch.save(content, body)  # type: ignore[arg-type]  # it only writes
                file.seek(len(_HEADER))
                file.write(body.digest())
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and body.failed is None:
                raise
            reason = error if isinstance(error, OSError) else body.failed
            last = self.positions()
            kept = f"the checkpoint of step {last[-1]} is intact" if last else "there is no earlier one"
            raise CheckpointError(
                f"checkpoint {target} could not be written ({reason.strerror}); {kept}, free disk space and resume"  # type: ignore[union-attr]
            ) from error
        for old in self.positions()[: -self.keep]:
            (self.path / f"step-{old:09d}.ckpt").unlink(missing_ok=True)
        return target

    def positions(self) -> list[int]:
        """The ledger positions of all checkpoints, ascending."""
        if not self.path.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def newest(self) -> tuple[int, dict[str, Any], list[str]]:
        """Position and content of the newest intact checkpoint, and the names of damaged ones that were skipped.

        Raises:
            CheckpointError: if there is no intact checkpoint.
        """
        damaged: list[str] = []
        for position in reversed(self.positions()):
            path = self.path / f"step-{position:09d}.ckpt"
            content = _read(path)
            if content is not None:
                return position, content, damaged
            damaged.append(path.name)
        what = f"all are damaged: {', '.join(damaged)}" if damaged else "there is none"
        raise CheckpointError(f"no usable checkpoint in {self.path}: {what}; start a new run, what this one spent stays spent")


class _Hashed:
    """A file-like object for ``torch.save`` that hashes what is written, so that no second copy is held in memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.failed: OSError | None = None
        """The error of the file system, which torch replaces by one of its own."""

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.failed = error
            raise

    def flush(self) -> None:
        self._file.flush()

    def digest(self) -> bytes:
        return self._hash.digest()


class _Body(io.RawIOBase):
    """The part of a checkpoint after its header, as a file-like object."""

    def __init__(self, file: IO[bytes], start: int) -> None:
        super().__init__()
        self._file = file
        self._start = start
        file.seek(start)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer)  # type: ignore[attr-defined]

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset + (self._start if whence == os.SEEK_SET else 0), whence) - self._start

    def tell(self) -> int:
        return self._file.tell() - self._start


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a checkpoint; ``None`` if its digest does not match."""
    start = len(_HEADER) + hashlib.sha256().digest_size
    with open(path, "rb") as file:
        opening = file.read(start)
        if opening != _HEADER + hashlib.file_digest(file, "sha256").digest():
            return None
        return load_plain(_Body(file, start), path)


def load_plain(file: Any, path: Path) -> dict[str, Any]:
    """What ``torch.save`` wrote to a file, which is called ``path``; only tensors and plain values.

    Raises:
        CheckpointError: if it holds anything else, which ``torch`` would tell how to run.
    """
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, perhaps code, which is never run; use what this library wrote"
        ) from None
    return content
