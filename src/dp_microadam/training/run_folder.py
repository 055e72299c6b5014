"""The folder of a run: everything that is known of it, written so that a crash leaves nothing half done."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dp_microadam.errors import DPMicroAdamError, InputError
from dp_microadam.privacy.ledger import LEDGER_NAME, discard_unspent, read_ledger
from dp_microadam.privacy.statement import privacy_report

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
LOG = "log.txt"
CURVES = "curves.png"
CHECKPOINTS = "checkpoints"
EVENTS = "tensorboard"
PRIVATE_METRICS_SHOWN = "private_metrics_shown.txt"
VITAL_SIGNS = "run.json"
TEST = "test.json"
OPTIMIZER_STATE, ADAM_STATE = "optimizer_state_bytes", "adam_state_bytes"


def default_folder(name: str) -> Path:
    """A new folder under ``runs/``, named after the recipe and the time."""
    return Path("runs") / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def refuse_existing(path: Path) -> None:
    """
    Raises:
        InputError: if ``path`` is there already and not an empty folder, nor that of a run that never trained.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())) and not never_trained(path):
        raise InputError(
            f"run_dir is {str(path)!r}, which exists already; name a new folder, or go on with: {how_to_go_on(path)}"
        )


def never_trained(path: Path) -> bool:
    """Whether a run began in this folder and was killed before its first checkpoint, with no step recorded.

    Checkpoints are written before the first step, so of such a run there is nothing to go on with and nothing spent.
    """
    if not path.is_dir() or any(path.glob(f"{CHECKPOINTS}/*.ckpt")) or (path / METRICS).exists():
        return False
    if not (path / LEDGER_NAME).exists():
        left = [entry.name for entry in path.iterdir()]
        return bool(left) and all(name.startswith(LEDGER_NAME) and name.endswith(".unfinished") for name in left)
    try:
        return read_ledger(path).steps == 0
    except DPMicroAdamError:
        return False


def how_to_go_on(path: Path) -> str:
    """A run that a recipe began goes on by the command line; one begun from Python needs its model and data again."""
    return f"dp-microadam resume {path}" if (path / CONFIG).is_file() else f"trainer.resume({str(path)!r}).fit(data)"


def privacy_of(path: Path) -> dict[str, Any]:
    """What the run in this folder has spent by now and what that covers, computed from its ledger."""
    report = privacy_report(read_ledger(path))
    if (path / PRIVATE_METRICS_SHOWN).exists():
        report["outside_the_guarantee"].append(
            "loss and accuracy on training batches, which this run showed; they also tell how large the batches were"
        )
    return report


class RunFolder:
    """Files of one run. Metrics are those of validation data unless they say otherwise."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def create(self) -> None:
        """Make the folder; one that exists and is not empty is refused, unless nothing was trained in it."""
        refuse_existing(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / LEDGER_NAME).exists():
            discard_unspent(self.path)

    def write(self, name: str, text: str) -> None:
        """Replace a file as a whole."""
        target = self.path / name
        unfinished = target.with_name(target.name + ".unfinished")
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        self.write(name, json.dumps(values, indent=2, ensure_ascii=False) + "\n")

    def append_metrics(self, values: dict[str, Any]) -> None:
        with open(self.path / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All metrics so far; a line that a crash tore is left out."""
        path = self.path / METRICS
        found = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def forget_metrics_after(self, step: int) -> None:
        """Drop metrics of steps whose results were lost."""
        kept = [line for line in self.metrics() if line["step"] <= step]
        self.write(METRICS, "".join(json.dumps(line) + "\n" for line in kept))

    def log(self, text: str) -> None:
        with open(self.path / LOG, "a", encoding="utf-8") as file:
            file.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {text}\n")
