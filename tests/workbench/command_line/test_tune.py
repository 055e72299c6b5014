"""``dp-microadam tune`` as a user runs it, and as a killed machine leaves it."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dp_microadam.accounting.selection import Repetitions
from dp_microadam.errors import InputError
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.plan.selection_plan import SelectionPlan
from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.recipes.recipe import Recipe
from dp_microadam.workbench.recipes.recipe_files import load_recipe
from dp_microadam.workbench.recipes.tuning import values_of, with_values

WORKER = Path(__file__).parents[2] / "training" / "search_worker.py"
RECIPE = """
name = "small"
method = "dp-threshold"
data = "digits"
model = "mlp"
epsilon = 8.0
steps = 3
batch_size = 32
evaluate_every = 1

[model_options]
hidden = 4

[tune]
expected_runs = 3
distance = [0.5, 1.5]
max_grad_norm = [0.5, 2.0]
optimizer.threshold = [2.0, 2.5]
"""
PUBLISHED = {
    "config.toml",
    "report.html",
    "ledger.jsonl",
    "log.txt",
    "metrics.jsonl",
    "privacy.json",
    "privacy.txt",
    "run.json",
    "selection.json",
    "test.json",
    "checkpoints",
}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return str(path)


def test_a_search_publishes_its_best_run_whose_epsilon_covers_it(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Repetitions, "draw", lambda self: 2)
    assert main(["tune", recipe, "--run-dir", "best", "--json", "--quiet"]) == 0
    printed = json.loads(capsys.readouterr().out)
    record = read_ledger("best")
    assert isinstance(record.plan, SelectionPlan)
    assert printed["epsilon"] == record.epsilon() == record.plan.epsilon <= 8.0
    assert printed["chosen"].keys() == {"distance", "max_grad_norm", "optimizer.threshold"}
    chosen = with_values(load_recipe(recipe), printed["chosen"])
    found = Recipe.from_toml(Path("best/config.toml").read_text())
    assert (found.distance, found.max_grad_norm, found.optimizer) == (chosen.distance, chosen.max_grad_norm, chosen.optimizer)
    assert (found.bands, found.accountant) == (1, "rdp")
    assert set(os.listdir("best")) | {"report.html"} == PUBLISHED
    assert set(os.listdir()) == {"best", "small.toml"}
    assert main(["budget", "best", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == record.epsilon()
    assert main(["tune", recipe, "--run-dir", "best"]) == 2
    assert "where a search has published its best run; use a new folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_published_run_can_be_evaluated_exported_reported_and_is_not_resumed(recipe, capsys):
    assert main(["tune", recipe, "--run-dir", "best", "--quiet"]) == 0
    assert main(["evaluate", "best"]) == 0
    assert main(["export", "best", "--output", "exported"]) == 0
    card = Path("exported/README.md").read_text()
    assert "`dp-microadam tune`: the best of a random number of runs" in card
    assert "ε covers the choice" in card
    assert main(["report", "best"]) == 0
    page = Path("best/report.html").read_text()
    assert "PRIVATE. Training, with the choice among runs, was" in page
    assert re.search(r"Chosen by a search</th><td[^>]*>distance = 0\.\d+, max_grad_norm = [\d.]+, optimizer", page)
    assert "peak memory" not in page  # of all runs of the search
    assert main(["resume", "best"]) == 0
    assert "run best is finished" in capsys.readouterr().out


@pytest.mark.slow
def test_runs_after_a_search_add_up_and_train_says_so(recipe, capsys):
    assert main(["tune", recipe, "--run-dir", "runs/best", "--quiet"]) == 0
    assert main(["train", recipe, "--run-dir", "runs/single", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert "[tune] is left out" in shown.out
    assert "the search in runs/best has spent privacy of the same data; both add up" in shown.err
    assert not isinstance(read_ledger("runs/single").plan, SelectionPlan)
    assert main(["budget", "runs/best", "runs/single", "--group-size", "2"]) == 0
    table = capsys.readouterr().out
    assert "runs/best is the best of a random number of runs; its ε covers the search" in table
    assert "by pld" not in table
    assert main(["budget", "runs/best", "--accountant", "pld"]) == 2
    assert "accountant is 'pld', which has no account of a selection" in capsys.readouterr().err


@pytest.mark.slow
def test_the_expected_cost_is_shown_first_and_does_not_depend_on_the_draw(recipe, capsys):
    assert main(["tune", recipe, "--estimate", "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)
    plan = SelectionPlan.solve(dataset_size=3600, batch_size=32, delta=1e-5, epsilon=8.0, steps=3, expected_runs=3)
    assert cost["noise_multiplier"] == plan.noise_multiplier > cost["noise_multiplier_without_a_search"]
    assert cost["epsilon_of_one_run"] < cost["epsilon"] == plan.epsilon
    assert cost["expected_hours"] > 0
    assert cost["runs_in_nine_of_ten_searches_at_most"] == 6
    assert os.listdir() == ["small.toml"], "an estimate leaves nothing behind"
    assert main(["tune", recipe, "--estimate"]) == 0
    words = capsys.readouterr().out
    assert "3 runs expected (geometric; nine of ten searches take at most 6)" in words
    assert "a single run without a search: noise multiplier" in words


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("tune={}", "recipe 'small' has no [tune] table; name there what to choose among"),
        ("tune=3", "tune is 3; it must be a table of keys to tune"),
        ("tune.expected_runs=1", "tune.expected_runs is 1.0; it must lie in (1, 1000]"),
        ("tune.distribution=poisson", "tune.distribution is 'poisson'; it must be one of 'geometric', 'logarithmic'"),
        ("tune={expected_runs=3}", "tune names no key to tune; it must have at least one list"),
        ("tune.batch_size=[32,64]", "tune.batch_size decides the privacy of a run, which must be the same for all"),
        ("tune.optimizer.public=[1,2]", "tune.optimizer.public cannot be tuned"),
        ("tune.learning_rate=0.1", "tune.learning_rate is 0.1; it must be a list of values"),
        ("tune.learning_rate=[]", "tune.learning_rate is []; it must be a list of values"),
        ("tune.learning_rate=[[1]]", "tune.learning_rate holds [1]; it must hold numbers, strings, true or false"),
        ("tune.learning_rate=[-1.0]", "learning_rate is -1.0; it must be a number above 0"),
        ("tune.optimizer.densty=[0.1]", "recipe key optimizer.densty = 0.1 is unknown"),
        ("tune.method=['dp-sgd','non-private']", "recipe key optimizer.threshold = 2.0 is unknown"),
        (
            f"tune.learning_rate={[*range(1, 102)]} tune.distance={[*range(1, 101)]}".replace(", ", ","),
            "tune has 40400 combinations; it must have at most 10000",
        ),
        ("tune.ema_decay=[0,0.9]", "tune.ema_decay holds 0, which keeps no average to compare"),
        ("audit_canaries=1000", "audit_canaries is 1000, but tune is "),
        ("seed=3", "seed is 3, with which a run is not private; a search must be"),
        ("method=non-private", "method is 'non-private', with which a run is not private; a search must be"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(recipe, change, sentence, capsys):
    assert main(["tune", recipe, *(word for one in change.split() for word in ("--set", one))]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"dp-microadam: {sentence}")
    assert said.err.count("\n") == 1
    assert os.listdir() == ["small.toml"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("accountant=pld", "accountant is 'pld'; for a selection among runs it must be 'rdp'"),
        ("epsilon=0.001", "no noise_multiplier up to 100000 keeps"),
    ],
)
def test_plans_that_cannot_be_get_one_sentence_and_exit_code_2(recipe, change, sentence, capsys):
    assert main(["tune", recipe, "--set", change]) == 2
    assert capsys.readouterr().err.startswith(f"dp-microadam: {sentence}")
    assert os.listdir() == ["small.toml"]


def test_a_search_in_several_processes_is_refused(recipe, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["tune", recipe]) == 2
    assert "the search was started in 4 processes; it must be one" in capsys.readouterr().err


def test_a_recipe_with_a_search_reads_back_equal(recipe):
    found = load_recipe(recipe, ["tune.distance=[0.01, 0.1, 1.0]"])
    assert values_of(found) == {
        "distance": [0.01, 0.1, 1.0],
        "max_grad_norm": [0.5, 2.0],
        "optimizer.threshold": [2.0, 2.5],
    }
    assert Recipe.from_toml(found.to_toml()) == found
    one = with_values(found, {"distance": 0.1, "optimizer.threshold": 2.5})
    assert (one.distance, one.optimizer, one.tune) == (0.1, {"threshold": 2.5}, found.tune)
    with pytest.raises(InputError, match="distance is 'high'"):
        with_values(found, {"distance": "high"})


def start(arguments, notes, runs):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), str(notes), str(runs), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def noted(notes, what):
    return (notes / what).read_text().count("once") if (notes / what).exists() else 0


@pytest.mark.slow
def test_a_search_killed_at_ten_random_moments_draws_once_and_leaves_only_the_winner(recipe, tmp_path):
    chance, notes, runs = random.Random(os.getpid()), tmp_path / "notes", 6
    notes.mkdir()
    changes = ["--set", "steps=40", "--set", "checkpoint_every=7", "--set", "evaluate_every=50"]
    command = ["tune", recipe, *changes, "--run-dir", "best", "--quiet"]
    for _ in range(10):
        began = noted(notes, "began")
        process = start(command, notes, runs)
        while noted(notes, "began") == began and process.poll() is None:
            time.sleep(0.002)
        time.sleep(chance.random() * 2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        command = ["resume", "best", "--quiet"]
    process = start(command, notes, runs)
    output, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    assert noted(notes, "draws") == 1
    assert runs - 10 <= noted(notes, "completed") <= runs
    assert noted(notes, "began") >= runs
    assert set(os.listdir()) == {"best", "notes", "small.toml"}
    record = read_ledger("best")
    assert record.steps == 40
    assert record.epsilon() == record.plan.epsilon <= 8.0
    assert set(os.listdir("best")) | {"report.html"} == PUBLISHED
    assert os.listdir("best/checkpoints") == ["step-000000040.ckpt"]
    assert "opened" not in Path("best/ledger.jsonl").read_text()
    assert "test accuracy" in output
