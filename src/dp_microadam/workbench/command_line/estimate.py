"""Estimates how long a study's runs take on this machine, by timing a few steps with smaller batches."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import Subset

from dp_microadam.workbench.data.catalogue import is_here, known
from dp_microadam.workbench.data.dataset import Examples, LabelledData, size_of, split
from dp_microadam.workbench.data.images import ImageFolder
from dp_microadam.workbench.data.published import synthetic_images
from dp_microadam.workbench.recipes.assemble import assemble, load_data, number_of_units, plan_of
from dp_microadam.workbench.recipes.recipe import Recipe

_STEPS = 3
_TRIAL = 4
_LARGER = 3
_ENOUGH_SECONDS = 2.0

# Recipes that differ only in these take about the same time per step and example; correlated noise adds a few percent at most.
_WITHOUT_EFFECT_ON_TIME = (
    *("name", "epsilon", "noise_multiplier", "steps", "delta", "accountant", "bands", "batch_size", "max_steps"),
    *("learning_rate", "distance", "schedule", "warmup", "tune"),
)


class Cell(Protocol):
    """What is estimated: a recipe, and what it is called."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def description(self) -> str: ...


@dataclass(frozen=True)
class StepTime:
    """Seconds per step as a linear function of the batch size."""

    per_step: float
    per_example: float
    dataset_size: int

    def seconds(self, batch_size: int) -> float:
        return self.per_step + self.per_example * batch_size


@dataclass(frozen=True)
class Cost:
    """Estimated duration of one run of a cell."""

    cell: Any
    steps: int
    seconds_per_step: float

    @property
    def hours(self) -> float:
        return self.steps * self.seconds_per_step / 3600


class CostEstimator:
    """Estimates the training time of runs. Cells with the same kind of step are measured once; ``tell`` reports each."""

    def __init__(self, tell: Callable[[str], None] = lambda text: None) -> None:
        self._tell = tell
        self._measured: dict[str, StepTime] = {}

    def cost(self, cell: Cell) -> Cost:
        """Estimate one run of the cell.

        Raises:
            InputError: if the recipe cannot be run, or needs the user's own data and these are missing.
        """
        recipe = cell.recipe
        kind = _kind(recipe)
        if kind not in self._measured:
            self._tell(f"measuring {cell.description}")
            self._measured[kind] = self.measure(recipe)
        found = self._measured[kind]
        steps = plan_of(recipe, found.dataset_size).steps if recipe.steps is None else recipe.steps
        steps = steps if recipe.max_steps is None else min(steps, recipe.max_steps)
        steps = round(steps * recipe.tune.get("expected_runs", 1))
        return Cost(cell, steps, found.seconds(recipe.batch_size))

    def step_time(self, recipe: Recipe, data: LabelledData) -> StepTime:
        """Measure the steps of a recipe whose data are loaded already, on made-up examples; files are read as they are.

        Users are timed as so many examples as a step takes of them at most.
        """
        recipe = replace(recipe, batch_size=recipe.batch_size * (recipe.examples_per_user or 1))
        count = min(recipe.batch_size, size_of(data.train))
        return self._fit_line(recipe, replace(data, train=_made_up(data.train, count)), size_of(data.train))

    def measure(self, recipe: Recipe) -> StepTime:
        """Measure the steps of a recipe, on its own data or, where these are missing, on random images."""
        return self._fit_line(recipe, *data_or_stand_in(recipe, self._tell))

    def _fit_line(self, recipe: Recipe, data: LabelledData, dataset_size: int) -> StepTime:
        """Fit a line through the median step times with one and with three physical batches.

        The physical batch is smaller than the recipe's where that would only take longer.
        """
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


def data_or_stand_in(recipe: Recipe, tell: Callable[[str], None] = lambda text: None) -> tuple[LabelledData, int]:
    """Data for a measurement, random images where the recipe's own are missing, and its number of examples or users."""
    published = known(recipe.data)
    if published.train_size is None or is_here(recipe.data, recipe.data_folder or None):
        data = load_data(recipe)
        return data, number_of_units(recipe, data)
    tell(f"{recipe.data} was not found; timing random images of the same shape, without reading files")
    training, _ = split(
        published.train_size,
        recipe.validation_fraction,
        recipe.split_seed,
        size=recipe.validation_size,
        train_size=recipe.train_size,
    )
    count = min(_LARGER * recipe.physical_batch_size, recipe.batch_size)
    return synthetic_images(recipe.data, count, image_size=recipe.image_size, **recipe.data_options), len(training)


def _median_step(recipe: Recipe, data: LabelledData, count: int, chunk: int) -> float:
    """Median seconds between steps of exactly ``count`` examples, without the first step, which includes set-up.

    The data are cut to ``count`` examples and sampled at rate one, so that every step has the same size.
    """
    short = replace(
        recipe,
        batch_size=count,
        physical_batch_size=chunk,
        epsilon=None,
        noise_multiplier=1.0 if recipe.protected else None,
        steps=_STEPS + 1,
        plan=None,
        bands=1,
        max_steps=None,
        max_batch_size=None,
        unit="example",
        examples_per_user=None,
        tune={},
        evaluate_every=10**9,
        checkpoint_every=10**9,
        checkpoint_minutes=10**6,
        validation_size=size_of(data.validation),
    )
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        experiment = assemble(
            short,
            Path(folder) / "run",
            data=replace(data, train=_first(data.train, count)),
            show_progress=False,
            features_folder=Path(folder) / "features",
        )
        experiment.trainer.callbacks = (lambda report: ends.append(time.perf_counter()),)
        if not experiment.trainer.fit(experiment.training_part()).finished:
            raise KeyboardInterrupt  # the trainer finishes its step first, and this one was not timed completely
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def _first(examples: Examples, count: int) -> Examples:
    if isinstance(examples, tuple):
        return examples[0][:count], examples[1][:count]
    return examples.part(torch.arange(count).numpy()) if isinstance(examples, ImageFolder) else Subset(examples, range(count))


def _made_up(examples: Examples, count: int) -> Examples:
    """Random inputs of the same shape and type, and one label; Datasets stay as they are."""
    if not isinstance(examples, tuple):
        return examples
    inputs, labels = examples
    shape = (count, *inputs.shape[1:])
    made = (
        torch.rand(shape, dtype=inputs.dtype) if inputs.is_floating_point() else torch.randint(0, 128, shape).to(inputs.dtype)
    )
    return made, torch.zeros(count, dtype=labels.dtype)


def _kind(recipe: Recipe) -> str:
    """A key shared by recipes whose steps cost the same."""
    return json.dumps(
        {key: value for key, value in asdict(recipe).items() if key not in _WITHOUT_EFFECT_ON_TIME}, sort_keys=True
    )
