"""``max_batch_size`` in plans, ledgers, statements, recipes and on the command line."""

import json
from dataclasses import replace

import pytest
from scipy.stats import binom

from dp_microadam import InputError, PrivacyPlan
from dp_microadam.accounting.costs import SubsampledGaussian, epsilon
from dp_microadam.accounting.one_step import Cap
from dp_microadam.ledger.ledger import PrivacyLedger, RunSettings, read_ledger, spent_together
from dp_microadam.ledger.statement import privacy_report, statement_in_words
from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.recipes.assemble import plan_of, unprotected_plan_of
from dp_microadam.workbench.recipes.recipe import Recipe

SETTINGS = RunSettings(private=True, randomness="operating system's entropy", sensitivity=1.0)
FREE = PrivacyPlan(1000, 50, 2.0, 100, 1e-5)
CAPPED = replace(FREE, max_batch_size=60)


def test_a_plan_with_a_cap_costs_more_and_one_of_everyone_costs_the_same():
    assert CAPPED.epsilon > FREE.epsilon == replace(FREE, max_batch_size=1000).epsilon
    assert CAPPED.epsilon == epsilon([SubsampledGaussian(0.05, 2.0, 100, cap=Cap(60, 1000))], 1e-5)
    cyclic = replace(CAPPED, bands=3)
    assert cyclic.cap == Cap(60, 334), "as many places as the largest group has members"
    assert cyclic.epsilon > replace(FREE, bands=3).epsilon


@pytest.mark.slow
@pytest.mark.parametrize("bands", [1, 4])
def test_noise_and_steps_are_solved_for_with_a_cap(bands):
    given = {"dataset_size": 1000, "batch_size": 50, "delta": 1e-5, "max_batch_size": 75}
    plan = PrivacyPlan.solve(**given, epsilon=2.0, steps=100, bands=bands)
    assert plan.epsilon <= 2.0 < replace(plan, noise_multiplier=plan.noise_multiplier - 1e-4).epsilon
    free = PrivacyPlan.solve(**{**given, "max_batch_size": None}, epsilon=2.0, steps=100, bands=plan.bands)
    assert free.noise_multiplier < plan.noise_multiplier
    longest = PrivacyPlan.solve(**given, epsilon=2.0, noise_multiplier=3.0, bands=bands)
    assert longest.epsilon <= 2.0 < longest.epsilon_after(longest.steps + 1)


@pytest.mark.parametrize(
    ("cap", "sentence"),
    [
        (49, "max_batch_size is 49, less than the expected batch_size 50"),
        (0, "max_batch_size is 0"),
        (60.5, "max_batch_size is 60.5"),
    ],
)
def test_caps_that_cannot_be_get_one_sentence(cap, sentence):
    with pytest.raises(InputError, match=sentence):
        replace(FREE, max_batch_size=cap)
    with pytest.raises(InputError, match=sentence):
        PrivacyPlan.solve(dataset_size=1000, batch_size=50, delta=1e-5, epsilon=2.0, steps=100, max_batch_size=cap)


def test_a_noise_multiplier_that_a_cap_makes_too_small_is_refused():
    assert replace(CAPPED, noise_multiplier=0.002).epsilon < float("inf")
    with pytest.raises(InputError, match=r"noise_multiplier is 0\.0015; it must be from 0\.002 to 100000"):
        replace(CAPPED, noise_multiplier=0.0015)


def record(folder, plan, steps=3):
    with PrivacyLedger.create(folder, plan, SETTINGS) as ledger:
        for _ in range(steps):
            ledger.record_step()
    return read_ledger(folder)


def test_budget_composes_runs_with_and_without_caps(tmp_path, capsys):
    records = [record(tmp_path / name, plan) for name, plan in (("a", CAPPED), ("b", FREE), ("c", CAPPED))]
    together = spent_together(records)
    assert together == (SubsampledGaussian(0.05, 2.0, 6, cap=Cap(60, 1000)), SubsampledGaussian(0.05, 2.0, 3))
    assert main(["budget", *(str(tmp_path / name) for name in "abc"), "--json", "--group-size", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["epsilon"] == epsilon(together, 1e-5)
    assert [run["max_batch_size"] for run in printed["runs"]] == [60, None, 60]
    assert printed["group_epsilon"] > printed["epsilon"]


def test_the_statement_says_the_cap_and_what_it_assumes(tmp_path):
    report = privacy_report(record(tmp_path, CAPPED), group_size=2)
    assert report["sampling"] == {
        "kind": "Poisson, truncated",
        "sample_rate": 0.05,
        "dataset_size": 1000,
        "expected_batch_size": 50,
        "max_batch_size": 60,
    }
    words = statement_in_words(report)
    assert "50 expected per step and 60 at most: of more, so many are kept at random, and ε accounts for it" in words
    assert "the larger of the two has the 1000 units of the plan" in words
    assert report["group_epsilon"] > report["epsilon"]


@pytest.mark.slow
def test_the_command_line_plans_with_a_cap(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    given = {"dataset-size": 1000, "batch-size": 600, "delta": 1e-5, "noise-multiplier": 3.0, "steps": 2}
    arguments = ["plan", *(word for name, value in given.items() for word in (f"--{name}", f"{value}"))]
    assert main([*arguments, "--max-batch-size", "650", "--accountant", "pld", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["max_batch_size"] == 650
    assert printed["epsilon"] == PrivacyPlan(1000, 600, 3.0, 2, 1e-5, "pld", max_batch_size=650).epsilon
    assert main([*arguments, "--max-batch-size", "650"]) == 0
    share = 100 * binom.sf(650, 1000, 0.6)
    assert f"650, exceeded by a sample in {share:.2g} % of the steps" in capsys.readouterr().out
    assert main([*arguments, "--max-batch-size", "500"]) == 2
    assert "max_batch_size is 500, less than the expected batch_size 600" in capsys.readouterr().err


def test_recipes_have_the_cap_and_unprotected_runs_keep_to_it():
    recipe = Recipe(name="mine", data="digits", model="mlp", epsilon=8, steps=9, batch_size=16, max_batch_size=30)
    assert plan_of(recipe, 1000).max_batch_size == 30
    assert unprotected_plan_of(replace(recipe, method="non-private"), 1000).max_batch_size == 30
    assert Recipe.from_toml(recipe.to_toml()) == recipe
