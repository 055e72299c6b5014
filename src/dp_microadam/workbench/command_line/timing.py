"""Times a few steps of a recipe with smaller batches, to say how long a run takes on this machine."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from dp_microadam.workbench.data.catalogue import is_here, known
from dp_microadam.workbench.data.dataset import Examples, LabelledData, size_of, split
from dp_microadam.workbench.data.images import ImageFolder
from dp_microadam.workbench.data.published import synthetic_images
from dp_microadam.workbench.recipes.assemble import assemble, load_data, number_of_units
from dp_microadam.workbench.recipes.recipe import Recipe

_STEPS = 3
_TRIAL = 4
_ENOUGH_SECONDS = 2.0


@dataclass(frozen=True)
class StepTime:
    """Seconds per step as a linear function of the number of examples in it."""

    per_step: float
    per_example: float

    def seconds(self, recipe: Recipe, batch_size: int | None = None) -> float:
        """Of a step of the recipe, or of another batch size; users are taken with as many examples as a step may have."""
        units = recipe.batch_size if batch_size is None else batch_size
        return self.per_step + self.per_example * units * (recipe.examples_per_user or 1)


def step_time(recipe: Recipe, data: LabelledData) -> StepTime:
    """Fit a line through the median step times of two batches, the larger of which takes seconds at most.

    Examples are made up, so that nothing depends on private ones; files are read as they are.
    """
    most = min(recipe.physical_batch_size, recipe.batch_size * (recipe.examples_per_user or 1), size_of(data.train))
    data = replace(data, train=_made_up(data.train, most))
    small = min(_TRIAL, most)
    seconds = _median_step(recipe, data, small)
    large = min(most, int(_ENOUGH_SECONDS / seconds * small))
    if large <= small:
        return StepTime(0.0, seconds / small)
    per_example = max(0.0, _median_step(recipe, data, large) - seconds) / (large - small)
    return StepTime(max(0.0, seconds - per_example * small), per_example)


def data_or_stand_in(recipe: Recipe, tell: Callable[[str], None] = lambda text: None) -> tuple[LabelledData, int]:
    """The recipe's data, or random images where they are missing, and the number of examples or users."""
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
    count = min(recipe.physical_batch_size, recipe.batch_size)
    return synthetic_images(recipe.data, count, image_size=recipe.image_size), len(training)


def _median_step(recipe: Recipe, data: LabelledData, count: int) -> float:
    """Median seconds between steps of exactly ``count`` examples, without the first step, which includes set-up.

    The data are cut to ``count`` examples and sampled at rate one, so that every step has the same size.
    """
    short = replace(
        recipe,
        batch_size=count,
        physical_batch_size=count,
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
        optimizer=_with_number_of_public(recipe.optimizer),
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
    floats = inputs.is_floating_point()
    made = torch.rand(shape, dtype=inputs.dtype) if floats else torch.randint(0, 128, shape).to(inputs.dtype)
    return made, torch.zeros(count, dtype=labels.dtype)


def _with_number_of_public(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Replace indices of public examples, which refer to the whole data set, by their number, at the same cost."""
    positions = optimizer.get("public")
    return {**optimizer, "public": len(positions)} if isinstance(positions, list) else optimizer
