"""Recipes whose unit of privacy is the user: from a table with a column of users to the statement."""

import json
import re

import numpy as np
import pytest
import torch

from dp_microadam.errors import InputError
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.recipes import load_recipe
from dp_microadam.workbench.recipes.assemble import assemble, public_examples

SIZES = [1, 2, 3, 5, 8, 13] * 5
"""Examples of thirty users: 160 in all."""

OWN_NUMBERS = {str(number) for number in (*SIZES, sum(SIZES)) if number > 3}


@pytest.fixture
def recipe(tmp_path):
    """A recipe for a table in which the users' rows do not lie together."""
    users = np.repeat(np.arange(30), SIZES)
    np.random.default_rng(0).shuffle(users)
    path = tmp_path / "patients.csv"
    path.write_text("x,patient,y,label\n" + "".join(f"{n % 7},p{user:03d},{n % 5},{n % 2}\n" for n, user in enumerate(users)))
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f'data = "table"\ndata_folder = "{path}"\nmodel = "mlp"\nunit = "user"\nexamples_per_user = 2\nepsilon = 7.0\n'
        'steps = 9\nbatch_size = 4\ndelta = 0.01\nevaluate_every = 4\n[data_options]\nclasses = 2\nuser_column = "patient"\n'
    )
    return str(recipe)


def test_a_table_of_patients_is_trained_and_stated_for_users(recipe, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", recipe, "--run-dir", str(run)]) == 0
    shown = capsys.readouterr()
    assert "for a user with all their examples at δ = 0.01" in shown.out
    plan = read_ledger(run).plan
    assert (plan.unit, plan.dataset_size, plan.examples_per_user) == ("user", 22, 2)  # of 30: a fifth for tests, then a tenth
    statement = (run / "privacy.txt").read_text()
    for words in (
        "-differentially private for one user with all their training examples",
        "each of 22 users in each step with probability 0.181818",
        "of each, at most 2 examples, drawn anew in every step, enter as their mean",
        "which 0.1 of the users of table is held out",
    ):
        assert words in statement, words
    assert not re.search(r"one example|one training example", statement)
    assert main(["budget", str(run), "--group-size", "2"]) == 0
    assert re.search(r"up to 2 users together: ε = ", capsys.readouterr().out)


@pytest.mark.slow
def test_nothing_that_is_written_or_shown_depends_on_anyones_number_of_examples(recipe, tmp_path, capsys):
    """Users with one example each and users with many: with the same seed for all else, all that is public is the same."""
    shown = []
    for number, repeats in enumerate((1, 4)):
        table = tmp_path / "patients.csv"
        lines = [f"{n % 7},p{n:03d},{n % 5},{n % 2}\n" for n in range(30)]
        table.write_text(
            "x,patient,y,label\n" + "".join(line for line in lines for _ in range(repeats if "p00" in line else 1))
        )
        run = tmp_path / f"run{number}"
        assert main(["train", recipe, "--run-dir", str(run), "--set", "seed=1"]) == 0
        assert main(["data", "check", recipe]) == 0
        captured = capsys.readouterr()
        words = re.sub(r"run\d|[0-9a-f]{32}|\d+(\.\d+)? %", "", captured.out + (run / "privacy.txt").read_text())
        statistics = {key: value for key, value in json.loads((run / "run.json").read_text()).items() if "memory" not in key}
        shown.append((words, statistics["dataset_size"], statistics["expected_batch_size"], (run / "config.toml").read_text()))
    assert shown[0] == shown[1]


def test_held_out_users_are_not_trained_on_and_public_examples_are_theirs(recipe, tmp_path):
    loaded = assemble(load_recipe(recipe), tmp_path / "run", show_progress=False)
    data = loaded.data
    assert set(data.train_users).isdisjoint(data.validation_users)
    assert torch.equal(public_examples(loaded.recipe, data, 2).data[0], data.validation[0][:2])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["examples_per_user=none"], "examples_per_user is missing"),
        (["unit=example"], "examples_per_user is 2, but unit is 'example'"),
        (["unit=patient"], "unit is 'patient'; it must be one of"),
        (["examples_per_user=0"], "examples_per_user is 0"),
        (["audit_canaries=100"], "audit_canaries is 100, but unit is 'user'"),
        (["data_options.user_column=none"], r"nothing says whose each example of table is; use data_options\.user_column"),
        (
            ["data=digits", "data_options={}", "data_folder="],
            "nothing says whose each example of digits is; use data 'table'",
        ),
        (["batch_size=23"], "batch_size is 23, more than the 22 users"),
        (["validation_size=24"], "validation_size is 24; of 24 users"),
    ],
)
def test_users_that_do_not_fit_are_refused_in_one_sentence(recipe, tmp_path, overrides, message):
    with pytest.raises(InputError, match=message) as refusal:
        assemble(load_recipe(recipe, overrides), tmp_path / "run")
    assert "\n" not in str(refusal.value)
    assert not OWN_NUMBERS & set(re.findall(r"\d+", str(refusal.value)))
    assert not (tmp_path / "run").exists()
