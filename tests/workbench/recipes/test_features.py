"""Recipes with ``cache_features``: the same run, computed once; evaluated, resumed and exported like any other."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_text_models import LENGTH, save_bert, write_messages

from dp_microadam.errors import InputError
from dp_microadam.layers.fixed_norm import FEATURE_NORM
from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.command_line.running import open_run
from dp_microadam.workbench.models.hugging_face import saved_classifier, text_encoder
from dp_microadam.workbench.recipes import load_recipe
from dp_microadam.workbench.recipes.recipe_files import located

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


@pytest.fixture
def recipe_of(tmp_path, monkeypatch, cifar10):
    """Writes the recipe of a head on a frozen model; features go to a cache of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(kind, pooling="own"):
        if kind == "images":
            own = f'data = "cifar10"\nverify_data = false\ndata_folder = "{tmp_path}"\nmodel = "vit-tiny"\n'
            options = '[model_options]\nresolution = 16\ntrainable = "head"\n'
        else:
            write_messages(tmp_path / "texts")
            own = f'data = "sms-spam"\ndata_folder = "{tmp_path / "texts"}"\nmodel = "hugging-face"\n'
            options = f'[model_options]\npretrained = "{save_bert(tmp_path / "bert")}"\ntrainable = "head"\n'
            options += f'pooling = "{pooling}"\n'
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
    assert len(kept) == 3  # training, validation and test part

    (fast / "config.toml").write_text((fast / "config.toml").read_text().replace("max_steps = 2\n", ""))
    found = run(capsys, "resume", fast, "--quiet")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npy")} == kept
    for name in ("validation_loss", "test_accuracy", "epsilon", "steps_done"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name

    if kind == "images":
        features = torch.from_numpy(np.load(next((tmp_path / "cache").rglob("*.npy")))["0"])
        torch.testing.assert_close(features.norm(dim=1), torch.full((len(features),), FEATURE_NORM), atol=1e-4, rtol=0)
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
        ("flip=true", "but flip is True: .* must not change from step to step"),
        ("crop_padding=4", "but crop_padding is 4"),
        ("model_options.trainable=all", "but model_options is {'resolution': 16, 'trainable': 'all'}: .* of a frozen backbone"),
        ("tune={expected_runs=2, learning_rate=[1, 2]}", "but tune is"),
        ("model_options.lora_rank=2", "but model_options is"),
        ("cache_features=1", "it must be true or false"),
    ],
)
def test_features_that_cannot_be_kept_are_refused_before_anything_is_read(recipe_of, override, message):
    with pytest.raises(InputError, match=message):
        load_recipe(str(recipe_of("images")), ["cache_features=true", override])


ADAPTED = ("--set", "model_options.trainable=all", "--set", "model_options.lora_rank=2")


def test_features_before_a_frozen_head_have_one_norm(recipe_of):
    def options(kind, *settings):
        return load_recipe(str(recipe_of(kind)), settings).resolved_model_options

    for settings in ((), ADAPTED[1::2], ("model_options.trainable=biases",)):
        assert options("images", *settings)["normalize_features"] is True
    assert options("images", "model_options.normalize_features=false")["normalize_features"] is False
    assert "normalize_features" not in options("images", "model_options.trainable=all")
    assert "normalize_features" not in options("texts", *ADAPTED[1::2])


@pytest.mark.slow
def test_a_vision_transformer_with_adapters_is_trained_resumed_evaluated_and_exported(recipe_of, tmp_path, capsys, monkeypatch):
    """The export checks that its program, which needs no peft, agrees with evaluation."""
    recipe, folder, exported = recipe_of("images"), tmp_path / "run", tmp_path / "exported"
    run(capsys, "train", recipe, *ADAPTED, "--set", "max_steps=2", "--quiet", "--run-dir", folder)
    (folder / "config.toml").write_text((folder / "config.toml").read_text().replace("max_steps = 2\n", ""))
    trained = run(capsys, "resume", folder, "--quiet")
    assert run(capsys, "evaluate", folder)["test_accuracy"] == trained["test_accuracy"]
    whole = run(capsys, "train", recipe, *ADAPTED, "--quiet", "--run-dir", tmp_path / "whole")
    assert trained["validation_loss"] == pytest.approx(whole["validation_loss"], rel=1e-4)
    assert main(["export", str(folder), "--output", str(exported)]) == 0
    assert "program checked on" in capsys.readouterr().out
    blocks = re.findall(r"```python\n(.*?)```", (exported / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(exported)
    names = {}
    code = next(code for code in blocks if "models.build" in code)
    assert "pip install peft" in code
    exec(code, names)
    experiment = open_run(folder)
    experiment.trainer.peek()
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(names["model"](images), experiment.best_model().eval()(images))
    assert main(["export", str(folder), "--output", str(tmp_path / "adapters"), "--adapters"]) == 2
    assert "the run is no text model with LoRA" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("settings", [("--set", "cache_features=true"), ("--set", "model_options.trainable=all"), ADAPTED])
def test_the_code_of_a_sentence_classifiers_card_gives_the_scores_of_the_run(
    recipe_of, tmp_path, capsys, monkeypatch, settings
):
    recipe = recipe_of("texts", pooling="mean")
    folder, exported = tmp_path / "run", tmp_path / "exported"
    run(capsys, "train", recipe, *settings, "--quiet", "--run-dir", folder)
    assert main(["export", str(folder), "--output", str(exported)]) == 0
    code = re.search(r"```python\n(.*?)```", (exported / "README.md").read_text(), re.DOTALL)[1]
    monkeypatch.chdir(exported)
    names = {}
    exec(code, names)
    texts = ["win cash now", "hello mum see you at home tonight", "free"]
    experiment = open_run(folder)
    experiment.trainer.peek()
    with torch.no_grad():
        expected = experiment.best_model().eval()(text_encoder(str(tmp_path / "bert"), LENGTH)(texts))
        torch.testing.assert_close(names["model"](names["encoder"](texts)), expected)
    assert names["classes"] == ("ham", "spam")
    if settings is ADAPTED:
        assert main(["export", str(folder), "--output", str(tmp_path / "adapters"), "--adapters"]) == 2
        assert "whose head no class of transformers or peft computes" in capsys.readouterr().err
    (exported / "head.safetensors").write_bytes(b"x")
    with pytest.raises(InputError, match=r"head\.safetensors cannot be read, export the model again"):
        saved_classifier(exported)


def test_weights_are_found_by_name_beside_the_data(tmp_path, monkeypatch):
    monkeypatch.setenv("DP_MICROADAM_DATA", str(tmp_path))
    assert located("small-vit") == "small-vit"
    (tmp_path / "small-vit").mkdir()
    weights = tmp_path / "small-vit" / "any.safetensors"
    weights.touch()
    assert located("small-vit") == str(weights)
    (tmp_path / "small-vit" / "config.json").touch()
    assert located("small-vit") == str(tmp_path / "small-vit")
    assert located("facebook/deit-tiny-patch16-224") == "facebook/deit-tiny-patch16-224"
