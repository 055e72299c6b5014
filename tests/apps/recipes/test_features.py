"""Recipes with ``cache_features``: the same run, computed once; evaluated, resumed and exported like any other."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_text_models import LENGTH, save_bert, write_messages

from dp_microadam.apps.command_line.cli import main
from dp_microadam.apps.recipes import load_recipe
from dp_microadam.errors import InputError

pytest.importorskip("transformers")

COMMON = """
name = "small"
method = "dp-sgd"
learning_rate = 1.0
noise_multiplier = 1.0
steps = 4
batch_size = 16
physical_batch_size = 8
seed = 1
"""


def write_images(folder):
    """Made-up images in CIFAR-10's format."""
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        records = random.integers(0, 256, (8, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())


@pytest.fixture
def recipe_of(tmp_path, monkeypatch):
    """Writes the recipe of a head on a frozen model; features go to a cache of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(kind):
        if kind == "images":
            write_images(tmp_path)
            own = f'data = "cifar10"\nverify_data = false\ndata_folder = "{tmp_path}"\nmodel = "vit-tiny"\n'
            options = '[model_options]\nresolution = 16\ntrainable = "head"\n'
        else:
            write_messages(tmp_path / "texts")
            own = f'data = "sms-spam"\ndata_folder = "{tmp_path / "texts"}"\nmodel = "hugging-face"\n'
            options = f'[model_options]\npretrained = "{save_bert(tmp_path / "bert")}"\ntrainable = "head"\n'
            options += f"[data_options]\nmax_length = {LENGTH}\n"
        path = tmp_path / "small.toml"
        path.write_text(COMMON + own + options)
        return path

    return write


def run(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def weights_of(capsys, folder, target):
    assert main(["export", str(folder), "--output", str(target)]) == 0
    capsys.readouterr()
    return load_file(sorted(target.rglob("*.safetensors"))[0])


@pytest.mark.parametrize("kind", ["texts", pytest.param("images", marks=pytest.mark.slow)])
def test_a_recipe_on_features_is_the_same_run_and_exports_the_whole_model(recipe_of, tmp_path, capsys, kind):
    recipe = recipe_of(kind)
    slow, fast = tmp_path / "slow", tmp_path / "fast"
    expected = run(capsys, "train", recipe, "--quiet", "--run-dir", slow)
    stopped = ["--set", "cache_features=true", "--set", "max_steps=2"]
    run(capsys, "train", recipe, *stopped, "--quiet", "--run-dir", fast)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npy")}
    assert len(kept) == 2 * 3  # features and labels of training, validation and test part

    (fast / "config.toml").write_text((fast / "config.toml").read_text().replace("max_steps = 2\n", ""))
    found = run(capsys, "resume", fast, "--quiet")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npy")} == kept
    for name in ("validation_loss", "test_accuracy", "epsilon", "steps_done"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name

    assert run(capsys, "data", "clean")["freed_bytes"] > 0
    assert not list((tmp_path / "cache").rglob("*.npy"))
    assert run(capsys, "evaluate", fast)["test_accuracy"] == found["test_accuracy"]
    whole, other = weights_of(capsys, slow, tmp_path / "a"), weights_of(capsys, fast, tmp_path / "b")
    assert whole.keys() == other.keys()
    assert len(whole) > 20  # the frozen part too
    for name, value in whole.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("flip=true", "flip changes images from step to step"),
        ("crop_padding=4", "crop_padding changes images"),
        ("model_options.trainable=all", "all of model 'vit-tiny' trains; set model_options.trainable to 'head'"),
        ("tune={expected_runs=2, learning_rate=[1, 2]}", r"\[tune\] is given"),
        ("cache_features=1", "it must be true or false"),
    ],
)
def test_features_that_cannot_be_kept_are_refused_before_anything_is_read(recipe_of, override, message):
    with pytest.raises(InputError, match=message):
        load_recipe(str(recipe_of("images")), ["cache_features=true", override])
