"""The audit of one's own run: canaries in its training data, and what they show."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dp_microadam.accounting.costs import SubsampledGaussian
from dp_microadam.errors import InputError
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.training.distributed import Ranks
from dp_microadam.training.evaluation import class_loss
from dp_microadam.workbench.audit.own_run import CANNOT_SHOW, audit_own_run, canary_scores
from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.data.dataset import LabelledData
from dp_microadam.workbench.recipes import Recipe, load_recipe
from dp_microadam.workbench.recipes.assemble import assemble
from dp_microadam.workbench.recipes.canaries import NO_LABEL, add_canaries, with_canary_key

# An honest run is accused with a probability of 1e-7.
SURE = "0.9999999"
SMALL = ["model=mlp", "batch_size=64", "steps=2", "evaluate_every=2", "audit_canaries=100"]


def overrides(*changes):
    return [part for change in changes for part in ("--set", change)]


def recipe(*changes) -> Recipe:
    return load_recipe("demo", [*SMALL, *changes])


def some_data(count: int = 30, shape=(1, 4, 4)) -> LabelledData:
    images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8) if len(shape) == 3 else torch.randn(count, *shape)
    part = images, torch.randint(0, 10, (count,))
    constants = ((0.25,), (0.5,)) if len(shape) == 3 else ((3.0,) * shape[0], (0.1,) * shape[0])
    return LabelledData("some", 10, shape, *constants, part, part, part)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / "run"
    assert main(["train", "demo", *overrides(*SMALL), "--quiet", "--run-dir", str(folder)]) == 0
    return folder


def test_every_canary_has_a_place_and_about_half_of_them_take_part(run):
    plan = read_ledger(run).plan
    assert plan.dataset_size == 3_600 + 100
    experiment = assemble(Recipe.from_toml((run / "config.toml").read_text("utf-8")), run, show_progress=False)
    labels = experiment.data.train[1][3_600:]
    present = experiment.canaries.present
    assert (labels[present] == experiment.canaries.labels[present]).all()
    assert (labels[~present] == NO_LABEL).all()
    assert 22 <= int(present.sum()) <= 78  # beyond with a probability below 1e-7


def test_a_run_that_goes_on_has_the_same_canaries_and_another_run_others(run):
    kept = Recipe.from_toml((run / "config.toml").read_text("utf-8"))
    first, again = (add_canaries(with_canary_key(kept, Ranks()), some_data())[1].present for _ in range(2))
    assert (first == again).all()
    other = add_canaries(with_canary_key(recipe(), Ranks()), some_data())[1].present
    assert (first != other).any()  # alike with a probability of 2^-100
    assert with_canary_key(recipe("seed=3"), Ranks()) == with_canary_key(recipe("seed=3"), Ranks())


def test_a_canary_that_does_not_take_part_has_no_loss_and_no_gradient():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 10))
    losses = class_loss(model, (torch.randn(3, 1, 4, 4), torch.tensor([NO_LABEL] * 3)))
    losses.sum().backward()
    assert (losses == 0).all()
    assert all((p.grad == 0).all() for p in model.parameters())


@pytest.mark.parametrize("shape", [(1, 4, 4), (5,)])
def test_canaries_have_the_mean_of_normalized_data_and_the_type_of_the_data(shape):
    own = some_data(shape=shape)
    data, canaries = add_canaries(with_canary_key(recipe("audit_canaries=20000"), Ranks()), own)
    assert data.train[0].dtype == own.train[0].dtype
    assert len(data.train[0]) == len(data.train[1]) == 30 + 20_000
    assert (data.train[0][:30] == own.train[0]).all()
    scale = 255.0 if len(shape) == 3 else 1.0
    # Six deviations of the mean of all numbers of the canaries.
    mean, deviation = (0.25, math.sqrt(0.25 * 0.75)) if len(shape) == 3 else (3.0, 0.1)
    seen = float(canaries.inputs.double().mean()) / scale
    assert abs(seen - mean) < 6 * deviation / math.sqrt(canaries.inputs.numel())


def test_the_statement_lists_the_canaries(run):
    assert "100 canaries for an audit (noise with a label at random)" in (run / "privacy.txt").read_text("utf-8")


def test_an_honest_run_is_not_accused_and_what_the_audit_cannot_show_is_said(run, capsys):
    assert main(["audit", str(run), "--confidence", SURE]) == 0
    shown = capsys.readouterr().out
    assert "no violation found" in shown
    assert f"This cannot show {CANNOT_SHOW[0]}." in shown
    assert main(["audit", str(run), "--confidence", SURE, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((run / "audit.json").read_text("utf-8"))
    assert told["epsilon"] == read_ledger(run).epsilon(accountant="pld")
    assert told["epsilon_bound"] <= told["epsilon"]
    assert (told["canaries"], told["violated"], told["curve_refuted"]) == (100, False, False)


def test_the_weights_that_are_published_are_attacked(run, tmp_path, monkeypatch):
    def scores(model, canaries, prepare):
        attacked.append({name: value.detach().clone() for name, value in model.named_parameters()})
        return canary_scores(model, canaries, prepare)

    attacked = []
    monkeypatch.setattr("dp_microadam.workbench.audit.own_run.canary_scores", scores)
    assert main(["audit", str(run), "--confidence", SURE]) == 0
    assert main(["export", str(run), "--output", str(tmp_path / "export")]) == 0
    torch.testing.assert_close(attacked[0], load_file(tmp_path / "export" / "model_ema.safetensors"), rtol=0, atol=0)


@pytest.mark.slow
def test_a_run_without_noise_is_caught_by_its_own_canaries(tmp_path, plant, capsys):
    plant("no noise")
    changes = ["method=dp-adam", "learning_rate=0.005", "batch_size=1024", "physical_batch_size=2048", "steps=80", "epsilon=1"]
    train = [
        "train",
        "demo",
        *overrides(*SMALL, *changes, "audit_canaries=1000"),
        "--quiet",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    assert main(train) == 0
    assert main(["audit", str(tmp_path / "run"), "--confidence", SURE]) == 1
    assert "VIOLATION" in capsys.readouterr().out


def test_a_run_without_canaries_and_options_of_the_pipeline_are_refused(run, tmp_path, capsys):
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.toml").write_text(recipe("audit_canaries=none").to_toml(), encoding="utf-8")
    assert main(["audit", str(plain)]) == 2
    assert "was trained without canaries; train with --set audit_canaries=1000" in capsys.readouterr().err
    assert main(["audit", str(run), "--epsilon", "1"]) == 2
    assert "--epsilon is for audits of the pipeline" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change", ["method=non-private", "class_weights=[1.0, 2.0]", "tune={expected_runs=10, learning_rate=[0.1, 1]}"]
)
def test_canaries_are_refused_where_they_would_not_be_what_they_seem(change):
    with pytest.raises(InputError, match=r"canaries are .* in single private runs whose unit is an example"):
        recipe(change)


def test_scores_that_tell_everything_refute_a_claim_by_both_analyses():
    present = torch.from_numpy(np.random.default_rng(1).random(1_000) < 0.5)
    found = audit_own_run(present, present.double(), [SubsampledGaussian(1.0, 5.0, 1)], 1e-5)
    assert found.more["curve_refuted"]
    assert found.findings[0].violated
    assert found.more["mu_bound"] > found.more["mu"] == 0.2
    assert found.summary.startswith("VIOLATION")


def test_scores_of_an_honest_mechanism_refute_nothing():
    """Noise of the claimed size in the score of each canary; an accusation has a probability of 1e-8 in each of 20 trials."""
    draw = np.random.default_rng(2)
    for _ in range(20):
        present = draw.random(1_000) < 0.5
        scores = torch.from_numpy(present + 1.5 * draw.standard_normal(1_000))
        found = audit_own_run(torch.from_numpy(present), scores, [SubsampledGaussian(1.0, 1.5, 1)], 1e-5, confidence=1 - 1e-8)
        assert not found.violated
        assert found.more["mu_bound"] <= 1 / 1.5


def test_a_score_is_the_logarithm_of_the_odds_of_the_label():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 10), torch.nn.Dropout(0.5))
    _, canaries = add_canaries(with_canary_key(recipe(), Ranks()), some_data())
    scores = canary_scores(model, canaries, lambda batch: (batch[0] / 255, batch[1]), batch_size=7)
    assert model.training
    own = torch.softmax(model.eval()(canaries.inputs / 255).double(), 1).gather(1, canaries.labels[:, None]).squeeze(1)
    torch.testing.assert_close(scores, (own / (1 - own)).log(), rtol=1e-4, atol=1e-4)
