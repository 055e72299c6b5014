"""Recipes with every kind of data: each trains, is stamped, and refuses what does not fit."""

import io
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from dp_microadam.errors import InputError
from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.recipes import load_recipe
from dp_microadam.workbench.recipes.assemble import assemble

SMALL_NETWORK = ["model_options.depth=10", "model_options.width=1", "batch_size=8", "physical_batch_size=8", "steps=2"]


PERCEPTRON = ["model=mlp", "model_options={}", "batch_size=8", "physical_batch_size=8", "steps=2"]
"""Where the way of the data to the model is the subject."""


def arguments(overrides):
    return [part for override in overrides for part in ("--set", override)]


def train(recipe, overrides, run, capsys):
    assert main(["train", recipe, *arguments(overrides), "--quiet", "--json", "--run-dir", str(run)]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def image_folder(tmp_path):
    random = np.random.default_rng(0)
    for part, count in (("train", 10), ("val", 3)):
        for name in ("ant", "bee"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                size = random.integers(20, 50, 2)
                pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{number}.jpg")
    return tmp_path


@pytest.fixture
def table(tmp_path):
    text = io.StringIO()
    text.write("x,y,label\n")
    for n in range(60):
        text.write(f"{n % 7},{n % 5},{n % 2}\n")
    path = tmp_path / "all.csv"
    path.write_text(text.getvalue())
    recipe = tmp_path / "table.toml"
    recipe.write_text(
        f'data = "table"\ndata_folder = "{path}"\nmodel = "mlp"\nepsilon = 8.0\nsteps = 3\nbatch_size = 16\n'
        "[data_options]\nclasses = 2\nmean = [3.0, 2.0]\nstd = [2.0, 1.5]\n"
    )
    return str(recipe)


WAYS = ([], ["multiplicity=2"], ["crop_padding=0", "resized_crop=true"])


@pytest.mark.parametrize(
    ("network", "more"),
    [
        (SMALL_NETWORK, []),
        (PERCEPTRON, WAYS[-1]),
        *(pytest.param(PERCEPTRON, more, marks=pytest.mark.slow) for more in WAYS[1:-1]),
        *(pytest.param(SMALL_NETWORK, more, marks=pytest.mark.slow) for more in WAYS[1:]),
    ],
)
def test_the_cifar10_recipe_trains_on_files_of_its_format(cifar10, tmp_path, capsys, network, more):
    result = train("cifar10", [*cifar10, *network, *more], tmp_path / "run", capsys)
    assert result["private"] is True
    assert result["steps_done"] == 2
    assert 0 <= result["test_accuracy"] <= 1


@pytest.mark.parametrize(("workers", "network"), [pytest.param(0, SMALL_NETWORK, marks=pytest.mark.slow), (1, PERCEPTRON)])
def test_the_imagenet_recipe_trains_on_a_folder_of_images_decoded_in_workers(image_folder, tmp_path, capsys, workers, network):
    overrides = [f"data_folder={image_folder}", "verify_data=false", f"num_workers={workers}", "validation_size=4"]
    result = train("imagenet", [*overrides, *network, "image_size=16", "delta=1e-5"], tmp_path / "run", capsys)
    assert result["private"] is True
    assert result["steps_done"] == 2


def test_augmentation_is_for_training_data_alone(cifar10, tmp_path):
    experiment = assemble(load_recipe("cifar10", [*cifar10, *PERCEPTRON]), tmp_path / "run", show_progress=False)
    seen = []
    augment = experiment.trainer.step.loading.augment
    object.__setattr__(experiment.trainer.step.loading, "augment", lambda batch: seen.append(batch) or augment(batch))
    # The independence check sees synthetic images, the steps see training images; evaluation augments none.
    experiment.trainer.validation(experiment.data.validation)
    experiment.test_results()
    assert seen == []
    experiment.fit()
    augmented = {image.numpy().tobytes() for images, _ in seen for image in images}
    held_out = (*experiment.data.validation[0], *experiment.data.test[0])
    assert augmented & {image.numpy().tobytes() for image in experiment.data.train[0]}
    assert augmented.isdisjoint(image.numpy().tobytes() for image in held_out)


def test_a_damaged_training_image_stops_the_run_without_being_named(image_folder, tmp_path, capsys):
    for path in (image_folder / "train").rglob("*.jpg"):
        path.write_bytes(path.read_bytes()[:100])
    overrides = [f"data_folder={image_folder}", "verify_data=false", "num_workers=0", "validation_size=4", "image_size=16"]
    code = main(["train", "imagenet", *arguments([*overrides, *PERCEPTRON, "delta=1e-5"]), "--run-dir", str(tmp_path / "run")])
    assert code == 1
    said = capsys.readouterr().err
    assert "cannot be decoded; which one is private, find it with dp-microadam data check" in said
    assert not re.search(r"\d\.jpg", said)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["crop_padding=4", "resized_crop=true"], "only one of the two crops"),
        (["crop_padding=0", "flip=false", "multiplicity=4"], "all views are the same"),
        (["data_options.labels=coarse"], "cifar10 has none"),
        (["model=tanh-cnn", "model_options={}"], "tanh-cnn takes 28×28"),
        (["validation_size=40"], "validation_size is 40; of 40 examples"),
    ],
)
def test_settings_that_do_not_fit_are_refused(cifar10, tmp_path, overrides, message):
    with pytest.raises(InputError, match=message):
        assemble(load_recipe("cifar10", [*cifar10, *SMALL_NETWORK, *overrides]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=small-cnn"], "model is 'small-cnn', which takes images; for the rows of a table it must be 'mlp'"),
        (["flip=true"], "data is 'table', not images; .* are for images"),
        (["multiplicity=2"], "are for images"),
        (["data_options.classes=none"], "data_options.classes is None"),
        (["data_options.mean=[1.0]"], "data_options.mean has 1 numbers; there must be 2"),
    ],
)
def test_settings_that_do_not_fit_a_table_are_refused(table, tmp_path, overrides, message):
    with pytest.raises(InputError, match=message):
        assemble(load_recipe(table, overrides), tmp_path / "run")


def test_worker_processes_draw_from_the_operating_systems_entropy():
    from dp_microadam.training.torch_randomness import UnpredictableWorker

    with torch.random.fork_rng():
        states = []
        for _ in range(2):
            torch.manual_seed(0)
            UnpredictableWorker()(0)
            states.append(torch.get_rng_state())
    words = [state[24 : 24 + 8 * 624] for state in states]
    assert (words[0] != words[1]).float().mean() > 0.4  # every other four bytes are zero


def test_pretrained_weights_get_the_constants_they_expect_and_stand_in_the_statement(cifar10, tmp_path):
    from transformers import ViTForImageClassification

    from dp_microadam.workbench.models.vit import SIZES, config_of

    weights = tmp_path / "weights"
    ViTForImageClassification(config_of(SIZES["tiny"], 16, 32)).save_pretrained(weights)
    options = ["model=vit-tiny", "model_options.resolution=32", f"model_options.pretrained={weights}"]
    experiment = assemble(load_recipe("cifar10", [*cifar10, "batch_size=8", *options]), tmp_path / "run", show_progress=False)
    black_and_white = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 32, 32)
    prepared, _ = experiment.trainer.step.loading.prepared((black_and_white, torch.zeros(2, dtype=torch.long)))
    assert prepared[:, 0, 0, 0].tolist() == pytest.approx([-1.0, 1.0])  # mean = std = 0.5, not CIFAR-10's
    assert any(f"the pretrained weights '{weights}'" in item for item in experiment.trainer.step.account._settings().public)
