"""Every full-scale recipe of the paper starts and is right: two steps on synthetic images of the right shape."""

import io
from dataclasses import asdict, replace

import numpy as np
import pytest
from PIL import Image
from research.experiments.study import load_study

from dp_microadam.workbench.recipes.assemble import assemble

STUDIES = ("sigma-sweep", "epsilon-sweep", "validation-curves", "imagenet", "finetune", "runtime")
# What the test sets itself, and what changes numbers and no code.
ALIKE = {"epsilon", "noise_multiplier", "steps", "batch_size", "physical_batch_size", "validation_size", "num_workers", "name"}
SHAPES = {"cifar10": (32, 10), "cifar100": (32, 100), "imagenet": (224, 1000)}


def untrained(recipe):
    """The model's options without the weights it starts from, which would have to be downloaded."""
    return {key: value for key, value in recipe.model_options.items() if key != "pretrained"}


def different_recipes():
    """One cell for each recipe that differs in more than that."""
    found = {}
    for cell in (cell for name in STUDIES for cell in load_study(name, "paper").cells):
        settings = asdict(replace(cell.recipe, evaluate_every=1, model_options=untrained(cell.recipe)))
        found.setdefault(str({key: value for key, value in settings.items() if key not in ALIKE}), cell)
    return [pytest.param(cell, id=f"{cell.recipe.name}: {cell.description}") for cell in found.values()]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Writes random images in the format of a data set, once, and gives their folder."""
    root, random = tmp_path_factory.mktemp("synthetic"), np.random.default_rng(0)

    def records(path, count, classes):
        rows = random.integers(0, 256, (count, 3072 + len(classes)), dtype=np.uint8)
        rows[:, : len(classes)] %= np.array(classes, dtype=np.uint8)
        path.write_bytes(rows.tobytes())

    def folder(name):
        place = root / name
        if place.exists():
            return place
        place.mkdir()
        if name == "cifar10":
            for part in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
                records(place / f"{part}.bin", 80, [10])
        elif name == "cifar100":
            for part, count in (("train", 400), ("test", 80)):
                records(place / f"{part}.bin", count, [20, 100])
        for inner in (place / part / f"n{n:08d}" for part in ("train", "val") for n in range(1000 * (name == "imagenet"))):
            inner.mkdir(parents=True)
            content = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(content, "JPEG")
            (inner / "one.JPEG").write_bytes(content.getvalue())
        return place

    return folder


@pytest.mark.slow
@pytest.mark.parametrize("cell", different_recipes())
def test_a_full_scale_recipe_takes_two_steps(cell, folder_of, tmp_path):
    recipe = replace(
        cell.recipe,
        data_folder=str(folder_of(cell.recipe.data)),
        verify_data=False,
        validation_size=20,
        num_workers=0,
        batch_size=8,
        physical_batch_size=8,
        max_steps=2,
        model_options=untrained(cell.recipe),
    )
    experiment = assemble(recipe, tmp_path / "run", show_progress=False)
    side, classes = SHAPES[recipe.data]
    side = recipe.image_size or side
    assert (experiment.data.num_classes, experiment.data.example_shape) == (classes, (3, side, side))
    result = experiment.fit()
    assert (result.steps_done, result.finished) == (2, True)
    assert result.private is recipe.private
    assert result.epsilon is None or 0 < result.epsilon <= 8.0
