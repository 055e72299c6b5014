"""The unprotected twin of the private step, for comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dp_microadam.accounting.one_step import require_room
from dp_microadam.clipping.row_norms import ClippedRowNorms
from dp_microadam.ledger.statement import write_privacy_report
from dp_microadam.plan.plan import require_unit
from dp_microadam.training.gradients import GradientSums, UnclippedGradients
from dp_microadam.training.method import ROW_NORMS, Phase
from dp_microadam.training.training_data import TrainingData
from dp_microadam.training.training_step import Result, TrainingStep

_NO_BOUND = 1e12
"""A clipping norm that never clips, for runs without privacy that need per-example gradients."""


@dataclass(frozen=True)
class UnprotectedPlan:
    """The plan of a run without privacy: Poisson sampling and a number of steps, but no noise and no guarantee.

    ``unit`` and ``examples_per_user`` say what is sampled and averaged, as in :class:`~dp_microadam.PrivacyPlan`.
    """

    dataset_size: int
    batch_size: int
    steps: int
    unit: str = "example"
    examples_per_user: int | None = None
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        require_unit(self.unit, self.examples_per_user)
        require_room(self.max_batch_size, self.batch_size)

    @property
    def bands(self) -> int:
        """One: there is no noise to correlate, and every step samples from all examples."""
        return 1


class PlainStep(TrainingStep):
    """A training step without privacy: like :class:`PrivateStep`, but without ledger, clipping and noise.

    It takes the same arguments; those about clipping have no effect.
    """

    def take(self) -> dict[str, Tensor]:
        """The mean gradient of the next step over the expected batch size, by parameter name."""
        index = self.position
        self._prepare_query(index)
        with self.ranks.together():
            sums = self._sums(index)
        self.ranks.sum_(sums)
        means = {name: total / self.plan.batch_size for name, total in sums.items()}
        return self._finish(means)

    @property
    def private(self) -> bool:
        return False

    @property
    def stamp(self) -> str:
        return "not private: trained without clipping and noise"

    @property
    def privacy(self) -> None:
        return None

    @property
    def noise_deviation(self) -> float:
        return 0.0

    def _set_up_noise(self) -> None:
        """No noise is added."""

    @property
    def begun(self) -> bool:
        return True

    def epsilon(self) -> None:
        return None

    def describe_spent(self, steps: int) -> str:
        return "not private"

    def begin(self) -> None:
        """Nothing to do: a run without privacy has no ledger."""

    @property
    def ledger_head(self) -> None:
        return None

    def resume(self, position: int, updates: int, ledger_head: str | None = None) -> None:
        """Continue at ``position``."""
        self._continue_at(position, updates)

    def peek(self, position: int, updates: int) -> None:
        self._continue_at(position, updates)

    def write_privacy(self, folder: str | Path | None = None, group_size: int = 1) -> None:
        """Write a statement that nothing is guaranteed into ``folder``, by default ``run_dir``."""
        report = {
            "private": False,
            "epsilon": None,
            "delta": None,
            "steps_planned": self.plan.steps,
            "steps_done": self.position,
            "accountant": None,
            "reason": self.stamp,
        }
        words = f"NOT PRIVATE: {self.stamp}. No guarantee of any kind holds for this model.\n"
        if self.ranks.main:
            write_privacy_report(self.run_dir if folder is None else folder, report, words)

    def _make_engine(self, phase: Phase) -> GradientSums:
        if phase.query == ROW_NORMS:
            return ClippedRowNorms(self.model, self._loss, max_grad_norm=_NO_BOUND)
        return UnclippedGradients(self.model, self._loss)

    def _check_model(self, data: TrainingData) -> None:
        """Nothing to check: without privacy examples may interact, as in batch normalization."""
        self._engines.reopen()

    def _guarded(self, work: Callable[[], Result]) -> Result:
        return work()
