"""Everything a run writes to its folder: configuration, log, metrics, checkpoints, statistics and the privacy statement."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dp_microadam.durable_files import write_text_durably
from dp_microadam.training.checkpoint import CheckpointFolder
from dp_microadam.training.private_step import PrivateStep
from dp_microadam.training.progress import tell
from dp_microadam.training.run_folder import (
    CHECKPOINTS,
    CONFIG,
    EVENTS,
    LOG,
    METRICS,
    NOISE_MEMORY,
    STATISTICS,
    create_folder,
    read_metrics,
)
from dp_microadam.training.run_statistics import Events, Pace, peak_memory


class RunRecord:
    """Writes the files of one run. Metrics are those of validation data unless stated otherwise.

    The privacy statement is always written first, so that it covers at least the steps of every other file. With several ranks
    only the one with ``writes`` writes to disk; all of them may call these methods.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep_checkpoints: int = 2, writes: bool = True) -> None:
        self.path = Path(path)
        self.checkpoints = CheckpointFolder(self.path / CHECKPOINTS, keep_checkpoints)
        self.pace = Pace()
        self._events = Events(self.path / EVENTS)
        self._writes = writes

    def create(self) -> None:
        """Create the folder; an existing folder that is not empty is refused, unless its run never trained."""
        create_folder(self.path)

    def begin(self, config: str | None, stamp: str) -> None:
        """Write the configuration and the first line of the log."""
        if self._writes and config is not None:
            self.write(CONFIG, config)
        self.log(f"began; this run is {stamp}")

    def write_checkpoint(self, step: PrivateStep, content: dict[str, Any], statistics: Mapping[str, Any]) -> None:
        """Write the privacy statement, then a checkpoint."""
        self.pace.rest()
        if self._writes:
            self._write_what_precedes(step, statistics)
            self.checkpoints.write(step.position, content)

    def write_evaluation(
        self,
        step: PrivateStep,
        metrics: Mapping[str, float],
        learning_rate: float,
        statistics: Mapping[str, Any],
        private_metrics: Mapping[str, float],
    ) -> None:
        """Write the privacy statement, then the metrics of the weights after this step."""
        pace = self.pace.take()
        if not self._writes:
            return
        line: dict[str, Any] = {"step": step.position, "epsilon": step.epsilon(), **metrics, "learning_rate": learning_rate}
        if pace is not None:
            line["steps_per_second"] = pace
        if private_metrics:
            line["outside_the_guarantee"] = dict(private_metrics)
        self._write_what_precedes(step, statistics)
        self.append_metrics(line)
        self._events.write(step.position, {**metrics, "epsilon": line["epsilon"]})

    def log(self, text: str) -> None:
        """Append one line to the log, with the time."""
        if self._writes:
            with open(self.path / LOG, "a", encoding="utf-8") as file:
                file.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {text}\n")

    def log_and_tell(self, text: str, *, shown: bool) -> None:
        """Append one line to the log and show it to the user."""
        self.log(text)
        if shown:
            tell(text)

    def write(self, name: str, text: str) -> None:
        """Replace a text file atomically."""
        write_text_durably(self.path / name, text)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Replace a JSON file atomically."""
        self.write(name, json.dumps(values, indent=2, ensure_ascii=False) + "\n")

    def append_metrics(self, values: Mapping[str, Any]) -> None:
        """Append one line to ``metrics.jsonl``."""
        with open(self.path / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All metrics so far, without lines that a crash left incomplete."""
        return read_metrics(self.path)

    def forget_metrics_after(self, step: int) -> None:
        """Remove metrics of steps whose results were lost."""
        if self._writes:
            kept = [line for line in self.metrics() if line["step"] <= step]
            self.write(METRICS, "".join(json.dumps(line) + "\n" for line in kept))

    def close(self) -> None:
        """Close open files. Closing twice is allowed."""
        self._events.close()

    def _write_what_precedes(self, step: PrivateStep, statistics: Mapping[str, Any]) -> None:
        step.write_privacy(self.path)
        self.write_json(
            STATISTICS,
            {
                **statistics,
                **peak_memory(),
                **({NOISE_MEMORY: step.mechanism.noise_memory} if step.plan.bands > 1 else {}),
                "dataset_size": step.plan.dataset_size,
                "expected_batch_size": step.plan.batch_size,
                "steps_done": step.position,
                "updates": step.account.updates,
                "last_step": step.account.last_step,
            },
        )
