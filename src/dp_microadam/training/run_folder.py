"""The folder of a run: the names of its files, functions that read them, and the results that a trainer returns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from dp_microadam.durable_files import write_text_durably
from dp_microadam.errors import DPMicroAdamError, InputError
from dp_microadam.ledger.ledger import LEDGER_NAME, discard_unspent, read_ledger
from dp_microadam.ledger.statement import privacy_report
from dp_microadam.plan.plan import PrivacyPlan

CONFIG = "config.toml"
SELECTION = "selection.json"
"""In the folder of a run that a search published: what the search declared, and which hyperparameters it chose."""
DECLARATION = "declaration.json"
METRICS = "metrics.jsonl"
LOG = "log.txt"
CHECKPOINTS = "checkpoints"
EVENTS = "tensorboard"
PRIVATE_METRICS_SHOWN = "private_metrics_shown.txt"
STATISTICS = "run.json"
TEST = "test.json"
OPTIMIZER_STATE, ADAM_STATE = "optimizer_state_bytes", "adam_state_bytes"
NOISE_MEMORY = "noise_memory_bytes"


def default_folder(name: str) -> Path:
    """A new folder under ``runs/``, named after the recipe and the time."""
    return Path("runs") / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def refuse_existing(path: Path) -> None:
    """Raise InputError if ``path`` is where a search will publish, or exists, unless it is empty or its run never trained."""
    if (search_folder(path) / DECLARATION).exists():
        raise InputError(
            f"run_dir is {str(path)!r}, where a search will publish its best run; use a new folder, or go on with the search: "
            f"dp-microadam resume {path}"
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())) and not never_trained(path):
        raise InputError(
            f"run_dir is {str(path)!r}, which exists already; use a new folder, or go on with: {how_to_go_on(path)}"
        )


def search_folder(path: Path) -> Path:
    """The folder in which a search keeps its runs until it publishes the best one as ``path``."""
    return path.with_name(f"{path.name}.unpublished")


def declared_search(path: Path) -> str | None:
    """The recipe of a search that will publish its best run as ``path``, if any; InputError if it was started from Python."""
    declaration = search_folder(path) / DECLARATION
    if not declaration.is_file():
        return None
    config: str | None = json.loads(declaration.read_text(encoding="utf-8"))["config"]
    if config is None:
        raise InputError(
            f"run is {str(path)!r}, where a search from Python will publish; go on with it there: call fit of the same search"
        )
    return config


def never_trained(path: Path) -> bool:
    """Whether a run began in this folder and was killed before its first checkpoint, with no step recorded.

    The first checkpoint is written before the first step, so such a run has nothing to resume and has spent nothing.
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
    """The command that resumes a run: on the command line for recipes; in Python for runs that need model and data again."""
    return f"dp-microadam resume {path}" if (path / CONFIG).is_file() else f"trainer.resume({str(path)!r}).fit(data)"


def privacy_of(path: Path, group_size: int = 1) -> dict[str, Any]:
    """The current privacy report of the run in this folder, computed from its ledger; with ε for a group, if it has a size."""
    report = privacy_report(read_ledger(path), group_size=group_size)
    if (path / PRIVATE_METRICS_SHOWN).exists():
        report["outside_the_guarantee"].append(
            "loss and accuracy on training batches, which this run showed; they also reveal how large the batches were"
        )
    return report


def note_private_metrics(path: Path) -> None:
    """Record that the run showed metrics of its training batches, so that its privacy statement says so."""
    write_text_durably(path / PRIVATE_METRICS_SHOWN, "This run showed loss and accuracy on training batches.\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All metrics of the run in this folder so far, without lines that a crash left incomplete."""
    file = path / METRICS
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def create_folder(path: Path) -> None:
    """Create a run's folder; an existing folder that is not empty is refused, unless its run never trained."""
    refuse_existing(path)
    path.mkdir(parents=True, exist_ok=True)
    if (path / LEDGER_NAME).exists():
        discard_unspent(path)


@dataclass(frozen=True)
class StepReport:
    """The argument of callbacks, after each step. In a private run all of it is public.

    ``metrics`` are those of validation data after this step, if there was an evaluation; ``expected_batch`` is the mean size of
    a batch, whose real one is private.
    """

    step: int
    steps: int
    expected_batch: int
    plan: PrivacyPlan | None
    learning_rate: float
    metrics: dict[str, float] | None
    resumed_at: tuple[int, ...] = ()

    @cached_property
    def epsilon(self) -> float | None:
        """ε spent so far, computed when it is first read; None without privacy."""
        return None if self.plan is None else self.plan.epsilon_after(self.step, self.resumed_at)


@dataclass(frozen=True)
class RunResult:
    """The result of ``PrivateTrainer.fit``.

    ``steps_done`` steps were spent, and ``updates`` of them are in the weights: fewer, if steps were lost in a crash.
    """

    run_dir: Path
    private: bool
    finished: bool
    steps_done: int
    epsilon: float | None
    delta: float | None
    metrics: dict[str, float]
    updates: int
