"""Atomic checkpoints: a checkpoint is either complete or not there.

A checkpoint is a file of ``torch.save``, which has a checksum of each of its parts. It is written to a temporary file, synced
and renamed, so a crash at any moment leaves earlier checkpoints intact. It never contains the random state of noise or
sampling, nor partial sums of a step.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from dp_microadam.durable_files import write_durably
from dp_microadam.errors import DPMicroAdamError
from dp_microadam.validation import require_integer

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
                torch.save(content, file)
        except (OSError, RuntimeError) as error:
            last = self.positions()
            kept = f"the checkpoint of step {last[-1]} is intact" if last else "there is no earlier one"
            reason = next((each.strerror for each in (error, error.__context__) if isinstance(each, OSError)), str(error))
            raise CheckpointError(
                f"checkpoint {target} could not be written ({reason}); {kept}, free disk space and resume"
            ) from error
        for old in self.positions()[: -self.keep]:
            (self.path / f"step-{old:09d}.ckpt").unlink(missing_ok=True)
        return target

    def positions(self) -> list[int]:
        """The ledger positions of all checkpoints, ascending."""
        found = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir()) if self.path.is_dir() else ()
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


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a checkpoint; ``None`` if it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            return load_plain(path, path) if archive.testzip() is None else None
    except CheckpointError as error:
        if isinstance(error.__cause__, RuntimeError):
            return None
        raise
    except Exception:  # whatever zipfile makes of a damaged file
        return None


def load_plain(file: Any, path: Path) -> dict[str, Any]:
    """What ``torch.save`` wrote to a file, which is called ``path``; only tensors and plain values.

    Raises:
        CheckpointError: if it holds anything else, which ``torch`` would tell how to run.
    """
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, perhaps code, which is never run; use what this library wrote"
        ) from error
    return content
