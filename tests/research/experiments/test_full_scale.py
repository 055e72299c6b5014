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
ALIKE = {"epsilon", "noise_multiplier", "steps", "batch_size", "physical_batch_size", "validation_size", "num_workers"}
QUICK = {("sigma-sweep", "DP-MicroAdam")}


def untrained(recipe):
    """The model's options without the weights it starts from, which would have to be downloaded."""
    return {key: value for key, value in recipe.model_options.items() if key != "pretrained"}


def different_recipes():
    """One cell for each recipe that differs in more than that."""
    seen = set()
    for name in STUDIES:
        for cell in load_study(name, "paper").cells:
            settings = asdict(replace(cell.recipe, name="any", evaluate_every=1, model_options=untrained(cell.recipe)))
            kind = str({key: value for key, value in settings.items() if key not in ALIKE})
            if kind not in seen:
                seen.add(kind)
                quick = (name, cell.labels.get("method")) in QUICK
                yield quick, pytest.param(cell, id=f"{name}: {cell.description}")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Writes random images in the format of a data set, once, and gives their folder."""
    root = tmp_path_factory.mktemp("synthetic")
    writers = {"cifar10": write_cifar10, "cifar100": write_cifar100, "imagenet": write_imagenet}

    def folder(name):
        if not (root / name).exists():
            (root / name).mkdir()
            writers[name](root / name, np.random.default_rng(0))
        return root / name

    return folder


def write_cifar10(folder, random):
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        records = random.integers(0, 256, (80, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def write_cifar100(folder, random):
    for name, count in (("train", 400), ("test", 80)):
        records = random.integers(0, 256, (count, 3074), dtype=np.uint8)
        records[:, 0] %= 20
        records[:, 1] %= 100
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def write_imagenet(folder, random):
    for part in ("train", "val"):
        for label in range(1000):
            place = folder / part / f"n{label:08d}"
            place.mkdir(parents=True)
            content = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(content, "JPEG")
            (place / "one.JPEG").write_bytes(content.getvalue())


@pytest.mark.parametrize("cell", [cell for quick, cell in different_recipes() if quick])
def test_a_full_scale_recipe_is_put_together(cell, folder_of, tmp_path):
    put_together(cell, folder_of, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for _, cell in different_recipes()])
def test_a_full_scale_recipe_takes_two_steps(cell, folder_of, tmp_path):
    experiment, recipe = put_together(cell, folder_of, tmp_path)
    result = experiment.fit()
    assert (result.steps_done, result.finished) == (2, True)
    assert result.private is recipe.private
    assert result.epsilon is None or 0 < result.epsilon <= 8.0


def put_together(cell, folder_of, tmp_path):
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
    assert experiment.data.num_classes == {"cifar10": 10, "cifar100": 100, "imagenet": 1000}[recipe.data]
    side = 32 if recipe.data.startswith("cifar") and recipe.image_size is None else 224
    assert experiment.data.example_shape == (3, side, side)
    return experiment, recipe
