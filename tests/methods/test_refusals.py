"""Settings a method cannot use are refused in one sentence, before any example is used or anything is written."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
from flat import flat
from torch import nn
from torch.utils.data import Subset, TensorDataset

from dp_microadam import InputError, PrivacyPlan, PrivateTrainer
from dp_microadam.methods import PublicExamples, dp_bitfit, dp_sgd, scale_then_privatize, sparta
from dp_microadam.methods.registry import build, refuse_bad_options
from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.recipes.recipe import Recipe

NETWORK = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
PUBLIC = PublicExamples(torch.zeros(1, 2), lambda model, batch: model(batch).sum(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["method=sparta", "optimizer.keep=0"], "keep is 0; it must lie in (0, 1]"),
        (["method=sparta", "optimizer.keep=1.5"], "keep is 1.5; it must lie in (0, 1]"),
        (["method=sparta", "optimizer.keep=much"], "keep is 'much'; it must be a number"),
        (["method=sparta", "optimizer.scores=mean"], "scores is 'mean'; it must be one of 'sum', 'norms'"),
        (["method=sparta", "optimizer.first_phase=1.0"], "first_phase is 1.0"),
        (["method=sparta", "optimizer.scoring_epochs=0"], "scoring_epochs is 0"),
        (["method=sparta", "optimizer.scoring_epochs=100"], "steps is 12; sparta's first phase takes 2 and scoring"),
        (["method=sparta", "optimizer.head=nothing"], "head is 'nothing'; it must name a module"),
        (["method=sparta", "optimizer.betas=[0.9,0.99]"], "sgd does not take betas"),
        (["method=dp-bitfit", "optimizer.base_optimizer=lion"], "base_optimizer is 'lion'"),
        (["method=dp-adam", "optimizer.momentum=0.9"], "optimizer.momentum = 0.9 is unknown"),
        (["method=dp-adam", "optimizer.betas=[2.0,0.9]"], "adam does not accept betas"),
        (["method=dp-adambc", "optimizer.floor=0"], "floor is 0; it must be a finite number above 0"),
        (["method=dp-adambc", "optimizer.noise_variance=1"], "optimizer.noise_variance = 1 is unknown"),
        (["method=scale-then-privatize", "optimizer.source=psychic"], "source is 'psychic'"),
        (
            ["method=scale-then-privatize", "optimizer.base_optimizer=sgd"],
            "base_optimizer is 'sgd', which estimates no second moment",
        ),
        (["method=scale-then-privatize", "optimizer.scale_eps=0"], "scale_eps is 0"),
        (["method=scale-then-privatize", "optimizer.source=delayed", "optimizer.interval=0"], "interval is 0"),
        (
            ["method=scale-then-privatize", "optimizer.norm_ratio=-1.0"],
            "norm_ratio is -1.0, but source 'previous' does not use it",
        ),
        (["method=scale-then-privatize", "optimizer.source=public"], "source is 'public', but no public examples are given"),
        (["method=scale-then-privatize", "optimizer.public=3"], "public is given, but source 'previous' does not use it"),
        (["method=scale-then-privatize", "optimizer.source=public", "optimizer.public=0"], "optimizer.public is 0"),
        (
            ["method=scale-then-privatize", "optimizer.source=public", "optimizer.public=[1,2,3]"],
            "optimizer.public is [1, 2, 3]; it must be a number",
        ),
        (["method=scale-then-privatize", "optimizer.source=public", "optimizer.public=9999"], "only 400 examples are held out"),
        (["method=dp-microadam", "optimizer.density=2"], "density is 2"),
        (["method=dp-threshold", "optimizer.threshold=-1"], "threshold is -1"),
        (["method=dp-sgd", "base=dp-adam"], "base is 'dp-adam', but method is 'dp-sgd'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_settings_get_one_sentence_exit_code_2_and_nothing_written(settings, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = [part for setting in ("model=mlp", "steps=12", "batch_size=64", *settings) for part in ("--set", setting)]
    assert main(["train", "demo", *overrides]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert message in captured.err
    assert not any(tmp_path.iterdir())


def test_bad_options_are_refused_before_data_is_read(tmp_path, capsys, monkeypatch):
    """There is no such folder; the option is what is complained about."""
    monkeypatch.chdir(tmp_path)
    settings = ["data=mnist", "data_folder=/no/such/folder", "method=sparta", "optimizer.keep=0"]
    assert main(["train", "demo", *(part for setting in settings for part in ("--set", setting))]) == 2
    assert "keep is 0" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["same tensors", "slice", "dataset", "subsets"])
def test_public_examples_that_are_training_examples_are_refused_by_the_trainer(kind, tmp_path):
    torch.manual_seed(0)
    inputs = torch.randn(20, 2)
    dataset = TensorDataset(inputs)
    train, public = {
        "same tensors": ((inputs,), (inputs,)),
        "slice": (inputs[5:], inputs[:6]),
        "dataset": (dataset, dataset),
        "subsets": (Subset(dataset, range(5, 20)), Subset(dataset, range(6))),
    }[kind]
    count = 15 if kind in ("slice", "subsets") else 20
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    examples = PublicExamples(public, lambda model, batch: model(batch).sum(1))
    method = scale_then_privatize(model, source="public", public=examples)
    seen = []

    def loss(model, batch):
        seen.append(batch)
        return model(batch[0] if isinstance(batch, tuple | list) else batch).sum(1)

    trainer = PrivateTrainer(
        model, method, PrivacyPlan(count, 10, 1.0, 2, 1e-2), loss, run_dir=tmp_path / "run", **flat(show_progress=False)
    )
    with pytest.raises(InputError, match="public examples must be held out of training"):
        trainer.fit(train)
    assert not seen
    assert not (tmp_path / "run").exists()


def test_an_optimizer_that_lacks_trainable_parameters_is_refused_by_name(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    plan, loss = PrivacyPlan(20, 10, 1.0, 9, 1e-2), lambda m, b: m(b).sum(1)
    with pytest.raises(InputError, match=r"does not hold the parameter '0\.weight'.*requires_grad_\(False\)"):
        PrivateTrainer(model, torch.optim.SGD(model[1].parameters(), lr=0.1), plan, loss, run_dir=tmp_path / "run")
    model[0].requires_grad_(False)
    PrivateTrainer(model, torch.optim.SGD(model[1].parameters(), lr=0.1), plan, loss, run_dir=tmp_path / "run")


def test_neighbouring_slices_of_one_tensor_are_no_overlap(tmp_path):
    inputs = torch.randn(20, 2)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    loss = lambda model, batch: model(batch).square().sum(1)  # noqa: E731
    method = scale_then_privatize(model, lr=0.1, source="public", public=PublicExamples(inputs[:5], loss))
    plan = PrivacyPlan(15, 10, 1.0, 2, 1e-2)
    trainer = PrivateTrainer(model, method, plan, loss, run_dir=tmp_path / "run", **flat(show_progress=False))
    assert trainer.fit(inputs[5:]).finished
    assert any("public examples" in item for item in trainer.step.account._settings().public)


FROZEN = nn.Sequential(nn.Linear(2, 3).requires_grad_(False), nn.Linear(3, 1))


@pytest.mark.parametrize(
    ("make", "model", "sentence"),
    [
        (dp_bitfit, nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1)), "no trainable bias outside its head"),
        (dp_bitfit, nn.Linear(2, 3), "no trainable bias outside its head"),
        (dp_bitfit, nn.Linear(2, 3).requires_grad_(False), "no trainable parameter"),
        (sparta, nn.Linear(2, 3), "sparta needs rows to choose from"),
        (sparta, FROZEN, "sparta needs rows to choose from"),
        (sparta, nn.Linear(2, 3).requires_grad_(False), "no trainable parameter"),
    ],
)
def test_a_model_without_what_a_method_trains_is_refused(make, model, sentence):
    with pytest.raises(InputError, match=sentence):
        make(model)


def test_the_head_can_be_named():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    chosen = dp_bitfit(model, head="0").phases(PrivacyPlan(10, 5, 1.0, 2, 1e-2))[0].trainable
    assert chosen == {"0.weight", "0.bias", "1.bias", "2.bias"}


def test_options_of_another_optimizer_are_refused():
    with pytest.raises(InputError, match=r"methods.dp_sgd does not take density"):
        dp_sgd(NETWORK, density=0.1)
    with pytest.raises(InputError, match=r"adam does not take density"):
        build("scale-then-privatize", NETWORK, {"density": 0.1}, lr=0.1)
    with pytest.raises(InputError, match="method is 'dp-muon'; it must be one of 'dp-threshold'"):
        build("dp-muon", NETWORK, {}, lr=0.1)


def test_every_ablation_that_the_documentation_lists_is_taken_by_a_recipe():
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\|[^|]+\| (`\w+ = [^|]+) \|", page.partition("## DP-MicroAdam and its ablations")[2], re.MULTILINE)
    assert "`quantize = false`" in cells
    for cell in cells:
        options = tomllib.loads("\n".join(re.findall(r"`(\w+ = [^`]+)`", cell)))
        base = {"name": "x", "data": "digits", "model": "mlp", "epsilon": 8.0, "steps": 12, "batch_size": 64}
        recipe = Recipe(**base, method="dp-microadam", optimizer=options)
        refuse_bad_options(
            recipe.algorithm, recipe.optimizer, lr=recipe.resolved_learning_rate, distance=recipe.resolved_distance
        )
