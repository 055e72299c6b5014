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
from typing import Any

import torch
from torch.utils.data import Subset

from dp_microadam.apps.experiments.study import Cell
from dp_microadam.apps.recipes.assemble import assemble, load_data, plan_of
from dp_microadam.apps.recipes.recipe import Recipe
from dp_microadam.data import places
from dp_microadam.data.catalogue import known
from dp_microadam.data.dataset import Examples, LabelledData, size_of, split
from dp_microadam.data.images import ImageFolder
from dp_microadam.data.made_up import made_up

_STEPS = 3
_TRIAL = 4
_LARGER = 3
_ENOUGH_SECONDS = 2.0

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
    """Seconds of a step as a straight line in the batch size: what every step costs, and what every example does."""

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


class CostEstimator:
    """The cost of runs, training alone. Cells whose steps are alike are measured once; ``tell`` hears which are measured."""

    def __init__(self, tell: Callable[[str], None] = lambda text: None) -> None:
        self._tell = tell
        self._measured: dict[str, StepTime] = {}

    def cost(self, cell: Cell) -> Cost:
        """What one run of the cell takes.

        Raises:
            InputError: if the recipe cannot be run, or is about the user's own data and they are not there.
        """
        recipe = cell.recipe
        kind = _kind(recipe)
        if kind not in self._measured:
            self._tell(f"measuring {cell.words}")
            self._measured[kind] = self._measure(recipe)
        found = self._measured[kind]
        steps = plan_of(recipe, found.dataset_size).steps
        steps = steps if recipe.max_steps is None else min(steps, recipe.max_steps)
        return Cost(cell, steps, found.seconds(recipe.batch_size))

    def _measure(self, recipe: Recipe) -> StepTime:
        """Time a few steps with batches of one physical chunk, and of three; the line through both medians.

        A chunk is smaller than the recipe's where that would take long and tell no more.
        """
        data, dataset_size = self._data(recipe)
        most = min(recipe.physical_batch_size, recipe.batch_size)
        small = min(_TRIAL, most)
        seconds = _median_step(recipe, data, small, chunk=small)
        if (chosen := min(most, int(_ENOUGH_SECONDS / seconds * small))) > small:
            small = chosen
            seconds = _median_step(recipe, data, small, chunk=small)
        large = min(_LARGER * small, recipe.batch_size, dataset_size)
        if large == small:
            return StepTime(0.0, seconds / small, dataset_size)
        more = _median_step(recipe, data, large, chunk=small)
        per_example = max(0.0, more - seconds) / (large - small)
        return StepTime(max(0.0, seconds - per_example * small), per_example, dataset_size)

    def _data(self, recipe: Recipe) -> tuple[LabelledData, int]:
        """What to measure with, and how many examples the recipe trains on."""
        published = known(recipe.data)
        if published.train_size is None or places.is_here(recipe.data, published, recipe.data_folder or None):
            data = load_data(recipe)
            return data, size_of(data.train)
        self._tell(f"{recipe.data} is not here; images of noise in its shape take as long, but for reading them")
        training, _ = split(published.train_size, recipe.validation_fraction, recipe.split_seed, size=recipe.validation_size)
        count = min(_LARGER * recipe.physical_batch_size, recipe.batch_size)
        return made_up(recipe.data, count, image_size=recipe.image_size, **recipe.data_options), len(training)


def _median_step(recipe: Recipe, data: LabelledData, count: int, chunk: int) -> float:
    """Median seconds between steps of exactly ``count`` examples; the first, with all that is set up in it, is left out.

    On ``count`` examples with a sampling rate of one every step takes them all, where a smaller rate would give each step
    another number of them.
    """
    short = replace(
        recipe,
        batch_size=count,
        physical_batch_size=chunk,
        epsilon=None,
        noise_multiplier=1.0 if recipe.protected else None,
        steps=_STEPS + 1,
        max_steps=None,
        evaluate_every=10**9,
        checkpoint_every=10**9,
        checkpoint_minutes=10**6,
        validation_size=size_of(data.validation),
        optimizer=_with_any_public(recipe.optimizer),
    )
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        experiment = assemble(
            short, Path(folder) / "run", data=replace(data, train=_first(data.train, count)), show_progress=False
        )
        experiment.trainer.callbacks = (lambda report: ends.append(time.perf_counter()),)
        if not experiment.trainer.fit(experiment.training_part()).finished:
            raise KeyboardInterrupt  # the trainer ends its step first; what it took is no measurement
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def _first(examples: Examples, count: int) -> Examples:
    if isinstance(examples, tuple):
        return examples[0][:count], examples[1][:count]
    return examples.part(torch.arange(count)) if isinstance(examples, ImageFolder) else Subset(examples, range(count))


def _with_any_public(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Positions of public examples are of the whole data set; as many others cost the same."""
    positions = optimizer.get("public")
    return {**optimizer, "public": len(positions)} if isinstance(positions, list) else optimizer


def _kind(recipe: Recipe) -> str:
    """The same for recipes whose steps cost the same."""
    return json.dumps({key: value for key, value in asdict(recipe).items() if key not in _OF_THE_PLAN}, sort_keys=True)
