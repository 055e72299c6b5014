"""Checkpoints that are either whole or not there.

A checkpoint is one file: a line that names the format, the SHA-256 of the rest, and what ``torch.save`` wrote. It is written
under another name, synced, and renamed, so a crash at any moment leaves the ones before untouched. It never holds random
states of noise or sampling, nor partial sums of a step.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from pathlib import Path
from typing import Any

import torch

from dp_microadam.errors import DPMicroAdamError
from dp_microadam.validation import require_integer

_HEADER = b"dp-microadam checkpoint 1\n"
_NAME = re.compile(r"step-(\d{9})\.ckpt")


class CheckpointError(DPMicroAdamError):
    """A checkpoint that cannot be written or read."""


class CheckpointFolder:
    """The checkpoints of one run, of which the last ``keep`` stay."""

    def __init__(self, path: Path, keep: int = 2) -> None:
        self.path = path
        self.keep = require_integer("keep_checkpoints", keep, 1)

    def write(self, position: int, content: dict[str, Any]) -> Path:
        """Write the checkpoint of a run that has recorded ``position`` steps, then drop the oldest.

        Raises:
            CheckpointError: if the disk refuses; checkpoints written before are still there.
        """
        target = self.path / f"step-{position:09d}.ckpt"
        unfinished = target.with_suffix(".unfinished")
        payload = io.BytesIO()
        torch.save(content, payload)
        body = payload.getvalue()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with open(unfinished, "wb") as file:
                file.write(_HEADER + hashlib.sha256(body).digest())
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, target)
            _sync_folder(self.path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            last = self.positions()
            kept = f"the checkpoint of step {last[-1]} is intact" if last else "there is no earlier one"
            raise CheckpointError(
                f"checkpoint {target} could not be written ({error.strerror}); {kept}, make room and resume"
            ) from error
        for old in self.positions()[: -self.keep]:
            (self.path / f"step-{old:09d}.ckpt").unlink(missing_ok=True)
        return target

    def positions(self) -> list[int]:
        """Ledger positions of the checkpoints there are, ascending."""
        if not self.path.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def newest(self) -> tuple[int, dict[str, Any], list[str]]:
        """Position and content of the newest checkpoint that is whole, and the names of damaged ones passed over.

        Raises:
            CheckpointError: if there is none.
        """
        damaged: list[str] = []
        for position in reversed(self.positions()):
            path = self.path / f"step-{position:09d}.ckpt"
            content = _read(path)
            if content is not None:
                return position, content, damaged
            damaged.append(path.name)
        what = f"all are damaged: {', '.join(damaged)}" if damaged else "there is none"
        raise CheckpointError(f"no usable checkpoint in {self.path}: {what}; begin a new run, what this one spent stays spent")


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a checkpoint; ``None`` if its digest does not match."""
    whole = path.read_bytes()
    start = len(_HEADER) + 32
    body = whole[start:]
    if whole[:start] != _HEADER + hashlib.sha256(body).digest():
        return None
    content: dict[str, Any] = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    return content


def _sync_folder(path: Path) -> None:
    # A rename is durable once the folder that holds the name is.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
