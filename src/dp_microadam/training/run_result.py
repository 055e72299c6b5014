"""What callers and callbacks are given of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StepReport:
    """What callbacks are given after each step. All of it is public, given a private run."""

    step: int
    steps: int
    epsilon: float | None
    learning_rate: float
    metrics: dict[str, float] | None


@dataclass(frozen=True)
class RunResult:
    """How a call of ``fit`` ended.

    ``steps_done`` were spent; ``updates`` of them are in the weights, fewer if steps were lost in a crash.
    """

    run_dir: Path
    private: bool
    finished: bool
    steps_done: int
    epsilon: float | None
    delta: float | None
    metrics: dict[str, float]
    updates: int
