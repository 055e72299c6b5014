"""The results that a trainer returns and passes to callbacks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dp_microadam.plan.plan import PrivacyPlan


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
