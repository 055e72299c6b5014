"""Estimates how long a study's runs take on this machine, by timing a few steps with smaller batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from dp_microadam.workbench.command_line.timing import StepTime, data_or_stand_in, step_time
from dp_microadam.workbench.recipes.assemble import plan_of
from dp_microadam.workbench.recipes.recipe import Recipe
from research.experiments.study import Cell

# Recipes that differ only in these take about the same time per step and example; correlated noise adds a few percent at most.
_WITHOUT_EFFECT_ON_TIME = (
    *("name", "epsilon", "noise_multiplier", "steps", "delta", "accountant", "bands", "batch_size", "max_steps"),
    *("learning_rate", "distance", "schedule", "warmup", "tune"),
)


@dataclass(frozen=True)
class Cost:
    """Estimated duration of one run of a cell."""

    cell: Cell
    steps: int
    seconds_per_step: float

    @property
    def hours(self) -> float:
        return self.steps * self.seconds_per_step / 3600


class CostEstimator:
    """Estimates the training time of runs. Cells with the same kind of step are measured once; ``tell`` reports each."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._measured: dict[str, tuple[StepTime, int]] = {}

    def cost(self, cell: Cell) -> Cost:
        """Estimate one run of the cell.

        Raises:
            InputError: if the recipe cannot be run, or needs the user's own data and these are missing.
        """
        recipe = cell.recipe
        kind = _kind(recipe)
        if kind not in self._measured:
            self._tell(f"measuring {cell.description}")
            data, size = data_or_stand_in(recipe, self._tell)
            self._measured[kind] = step_time(recipe, data), size
        time, size = self._measured[kind]
        steps = plan_of(recipe, size).steps if recipe.steps is None else recipe.steps
        steps = steps if recipe.max_steps is None else min(steps, recipe.max_steps)
        return Cost(cell, round(steps * recipe.tune.get("expected_runs", 1)), time.seconds(recipe))


def _kind(recipe: Recipe) -> str:
    """A key shared by recipes whose steps cost the same."""
    return json.dumps(
        {key: value for key, value in asdict(recipe).items() if key not in _WITHOUT_EFFECT_ON_TIME}, sort_keys=True
    )
