"""Reads a run folder for reports, without torch: finished or not, and started from the command line or from Python."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dp_microadam.errors import InputError
from dp_microadam.ledger.ledger import LEDGER_NAME, RUN_INSIDE, LedgerRecord, read_ledger, run_folder
from dp_microadam.ledger.statement import PRIVACY_NAME, STATEMENT_NAME, called
from dp_microadam.training.run_folder import (
    ADAM_STATE,
    CONFIG,
    LOG,
    METRICS,
    OPTIMIZER_STATE,
    STATISTICS,
    TEST,
    privacy_of,
    read_metrics,
)
from dp_microadam.workbench.reporting.tables import is_number

AUDIT = "audit.json"

_FIGURES = (
    "epsilon",
    "validation_loss",
    "validation_accuracy",
    "ema_validation_loss",
    "ema_validation_accuracy",
    "learning_rate",
    "steps_per_second",
)
"""The metrics that reports show. Metrics of training batches, which a run may have recorded on request, are never read."""


@dataclass(frozen=True)
class Run:
    """The content of a run folder. ``evaluations`` have a ``"step"`` and the public metrics that were recorded."""

    folder: Path
    settings: Mapping[str, Any]
    privacy: Mapping[str, Any]
    ledger: LedgerRecord | None
    evaluations: tuple[Mapping[str, float], ...]
    statistics: Mapping[str, Any]
    test: Mapping[str, Any]
    audit: Mapping[str, Any] | None
    last_activity: datetime | None
    words: str

    @classmethod
    def read(cls, folder: str | Path, group_size: int = 1) -> Run:
        """Read a run folder. Its privacy statement has ε for a group of ``group_size`` if that is above 1.

        Raises:
            InputError: if ``folder`` is not a run folder, or its files cannot be parsed.
        """
        path = run_folder(folder)
        if not (path / LEDGER_NAME).is_file() and not (path / PRIVACY_NAME).is_file():
            raise InputError(f"run is {str(folder)!r}; it must be a run folder, with a {LEDGER_NAME} or {PRIVACY_NAME}")
        ledger = read_ledger(path) if (path / LEDGER_NAME).is_file() else None
        lines, words = read_metrics(path), path / STATEMENT_NAME
        return cls(
            folder=path,
            settings=_settings(path / CONFIG),
            privacy=_json(path / PRIVACY_NAME) if ledger is None else privacy_of(path, group_size),
            ledger=ledger,
            evaluations=_evaluations(lines),
            statistics=_json(path / STATISTICS),
            test=_json(path / TEST),
            audit=_json(path / AUDIT) or None,
            last_activity=_last_activity(path),
            words=words.read_text(encoding="utf-8") if ledger is None and words.is_file() else "",
        )

    @property
    def name(self) -> str:
        path = self.folder.resolve()
        return path.parent.name if path.name == RUN_INSIDE else path.name

    @property
    def method(self) -> str:
        """The recipe's method; the optimizer of a run started from Python, which has no recipe."""
        method = self.settings.get("method")
        if method == "non-private":
            return f"non-private {str(self.settings.get('base', 'dp-threshold')).removeprefix('dp-')}"
        return str(method or self.statistics.get("optimizer", "unknown method"))

    @property
    def state(self) -> str:
        """How far the run is, with the time of its last activity if it is not finished."""
        last_step = self.statistics.get("last_step") or self.settings.get("max_steps")
        if self.steps >= self.steps_planned:
            return "finished"
        if last_step is not None and self.steps >= last_step:
            return "finished early, at max_steps"
        when = "" if self.last_activity is None else f", last activity {self.last_activity:%Y-%m-%d %H:%M} UTC"
        return f"not finished: {self.steps:,} of {self.steps_planned:,} steps{when}"

    @property
    def private(self) -> bool:
        return bool(self.privacy.get("private"))

    @property
    def stamp(self) -> str:
        """``"private"``, or ``"not private"`` with the reason."""
        if self.private:
            return "private"
        if self.ledger is None:
            return str(self.privacy.get("reason", "not private"))
        return f"not private: {self.privacy['randomness']}"

    @property
    def epsilon(self) -> float | None:
        """ε spent, or for a seeded run the ε it would have with unpredictable randomness; None without clipping and noise."""
        return self.privacy.get("epsilon")

    @property
    def unit(self) -> str:
        """Whom ε is for, and what batches count: ``"example"``, ``"user"``, or what the run calls it, such as ``"patient"``."""
        return called(self.privacy)

    @property
    def steps(self) -> int:
        return int(self.privacy.get("steps_done", 0))

    @property
    def steps_planned(self) -> int:
        return int(self.privacy.get("steps_planned", 0))

    @property
    def lost(self) -> int:
        """Number of steps that were spent but are not in the last checkpoint."""
        return int(self.statistics.get("steps_done", 0)) - int(self.statistics.get("updates", 0))

    @property
    def optimizer_state(self) -> tuple[int, int] | None:
        """Bytes of optimizer state, and of Adam's for the same parameters; None before the first step."""
        recorded = self.statistics.get("updates") and self.statistics.get(ADAM_STATE)
        return (int(self.statistics[OPTIMIZER_STATE]), int(self.statistics[ADAM_STATE])) if recorded else None

    @property
    def averaged(self) -> bool:
        """Whether averaged weights were evaluated; they then stand for the run."""
        return any(one.get("ema_validation_accuracy") or one.get("ema_validation_loss") for one in self.evaluations)

    def series(self, name: str, over: str = "step") -> list[tuple[float, float]]:
        """One metric over steps, or over another metric."""
        return [(one[over], one[name]) for one in self.evaluations if name in one and over in one]

    def headline(self, measure: str) -> str:
        """The metric that stands for the run: that of the averaged weights if there are any."""
        return f"ema_validation_{measure}" if self.averaged else f"validation_{measure}"

    @property
    def accuracy(self) -> tuple[float, str] | None:
        """The accuracy of the run, and on which data it was measured."""
        if self.tested:
            after = self.test.get("steps_done", self.steps)
            at = "" if after == self.steps else f" after {after:,} steps"
            return float(self.test["test_accuracy"]), f"test accuracy{at}"
        found = self.series(self.headline("accuracy"))
        return (found[-1][1], f"validation accuracy at step {found[-1][0]:,}") if found else None

    @property
    def tested(self) -> bool:
        """Whether the accuracy was measured on test data."""
        return is_number(self.test.get("test_accuracy"))

    @property
    def recall(self) -> Mapping[str, Any]:
        """Recall on test data by class; empty if it was not recorded."""
        found = self.test.get("recall")
        return found if isinstance(found, dict) else {}

    @property
    def expected_batch(self) -> int | None:
        """The expected batch size; realised batch sizes are private."""
        if self.ledger is not None:
            return self.ledger.plan.batch_size
        return self.statistics.get("expected_batch_size") or self.settings.get("batch_size")

    @property
    def throughput(self) -> list[tuple[float, float]]:
        """Steps, and expected examples (or users) per second before each."""
        batch = self.expected_batch
        return [(step, batch * rate) for step, rate in self.series("steps_per_second")] if batch else []

    @property
    def training_seconds(self) -> float | None:
        """Training time without evaluations; None if it was not recorded for all steps."""
        total, before = 0.0, 0.0
        for one in self.evaluations:
            rate = one.get("steps_per_second")
            if not rate:
                return None
            total, before = total + (one["step"] - before) / rate, one["step"]
        return total if before else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise InputError(f"{path} is not valid JSON, so the run cannot be reported; restore it or remove it") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold a JSON object")
    return content


def _settings(path: Path) -> dict[str, Any]:
    """The recipe, without what describes the machine and not the run."""
    if not path.is_file():
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} cannot be read, it must be valid TOML: {error}") from None
    return {key: value for key, value in content.items() if key != "data_folder"}


def _evaluations(lines: list[dict[str, Any]]) -> tuple[dict[str, float], ...]:
    found = []
    for line in lines:
        figures = {name: float(line[name]) for name in _FIGURES if is_number(line.get(name))}
        if figures and is_number(line.get("step")):
            found.append({"step": int(line["step"]), **figures})
    return tuple(sorted(found, key=lambda one: one["step"]))


def _last_activity(path: Path) -> datetime | None:
    times = [file.stat().st_mtime for name in (LEDGER_NAME, METRICS, LOG) if (file := path / name).is_file()]
    return datetime.fromtimestamp(max(times), UTC) if times else None
