"""What a study's runs would cost on this machine, from a few steps of smaller batches."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dp_microadam.experiments.study import Cell
from dp_microadam.recipes.assemble import assemble, plan_of
from dp_microadam.recipes.recipe import Recipe

_STEPS = 4
_LARGER = 3

# Recipes that differ in these alone take the same time per step.
_OF_THE_PLAN = (
    "name",
    "epsilon",
    "noise_multiplier",
    "steps",
    "delta",
    "accountant",
    "max_steps",
    "learning_rate",
    "schedule",
    "warmup",
    "batch_size",
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step as a straight line in the expected batch size: what every step costs, and what every example does."""

    per_step: float
    per_example: float
    dataset_size: int

    def seconds(self, batch_size: int) -> float:
        return self.per_step + self.per_example * batch_size


@dataclass(frozen=True)
class Cost:
    """What one run of a cell takes."""

    cell: Cell
    steps: int
    seconds_per_step: float

    @property
    def hours(self) -> float:
        return self.steps * self.seconds_per_step / 3600


def estimate(cells: tuple[Cell, ...], tell: Callable[[str], None] = lambda text: None) -> list[Cost]:
    """The cost of each cell's run, training alone; cells whose steps are alike are measured once."""
    measured: dict[str, StepTime] = {}
    costs = []
    for cell in cells:
        kind = _kind(cell.recipe)
        if kind not in measured:
            tell(f"measuring {cell.words}")
            measured[kind] = measure(cell.recipe)
        steps = plan_of(cell.recipe, measured[kind].dataset_size).steps
        steps = steps if cell.recipe.max_steps is None else min(steps, cell.recipe.max_steps)
        costs.append(Cost(cell, steps, measured[kind].seconds(cell.recipe.batch_size)))
    return costs


def measure(recipe: Recipe) -> StepTime:
    """Time a few steps with batches of one physical chunk, and of three; the line through both medians."""
    small = min(recipe.physical_batch_size, recipe.batch_size)
    large = min(_LARGER * small, recipe.batch_size)
    seconds, dataset_size = _median_step(recipe, small)
    if large == small:
        return StepTime(0.0, seconds / small, dataset_size)
    more, _ = _median_step(recipe, large)
    per_example = max(0.0, more - seconds) / (large - small)
    return StepTime(max(0.0, seconds - per_example * small), per_example, dataset_size)


def _median_step(recipe: Recipe, batch_size: int) -> tuple[float, int]:
    """Median seconds between steps; the first, with all that is set up in it, is left out."""
    short = replace(
        recipe,
        batch_size=batch_size,
        epsilon=None,
        noise_multiplier=1.0 if recipe.protected else None,
        steps=_STEPS + 1,
        max_steps=None,
        evaluate_every=10**9,
        checkpoint_every=10**9,
        checkpoint_minutes=10**6,
    )
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        experiment = assemble(short, Path(folder) / "run", show_progress=False)
        experiment.trainer.callbacks = (lambda report: ends.append(time.perf_counter()),)
        experiment.trainer.fit(experiment.training_part())
    return statistics.median(after - before for before, after in itertools.pairwise(ends)), experiment.trainer.plan.dataset_size


def _kind(recipe: Recipe) -> str:
    """The same for recipes whose steps cost the same."""
    return json.dumps({key: value for key, value in asdict(recipe).items() if key not in _OF_THE_PLAN}, sort_keys=True)
