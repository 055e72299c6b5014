"""Plans for a group: ε limits what somebody with several examples spends, and the solution is not wasteful."""

import json

import pytest

from dp_microadam import PrivacyPlan
from dp_microadam.accounting.costs import group_epsilon
from dp_microadam.errors import InputError
from dp_microadam.plan.group_plan import solve_for_group
from dp_microadam.workbench.command_line.cli import main

SIZES = {"dataset_size": 2_000, "batch_size": 100, "delta": 1e-4}


def spent_by_group(plan, size):
    return group_epsilon([plan.spent_after(plan.steps)], plan.delta, size)


@pytest.mark.parametrize("more", [{}, {"bands": 2}, {"max_batch_size": 130}, {"unit": "user", "examples_per_user": 3}])
def test_the_solved_noise_keeps_the_group_within_epsilon_and_little_less_does_not(more):
    plan = solve_for_group(3, epsilon=6.0, steps=40, **SIZES, **more)
    assert spent_by_group(plan, 3) <= 6.0
    less = PrivacyPlan.solve(noise_multiplier=plan.noise_multiplier * 0.998, steps=40, **SIZES, **more)
    assert spent_by_group(less, 3) > 6.0


def test_the_solved_steps_are_the_most_that_keep_the_group_within_epsilon():
    plan = solve_for_group(3, epsilon=6.0, noise_multiplier=2.0, **SIZES)
    one_more = PrivacyPlan.solve(noise_multiplier=2.0, steps=plan.steps + 1, **SIZES)
    assert spent_by_group(plan, 3) <= 6.0 < spent_by_group(one_more, 3)


def test_a_group_of_one_is_the_plan_itself():
    assert solve_for_group(1, epsilon=6.0, steps=40, **SIZES) == PrivacyPlan.solve(epsilon=6.0, steps=40, **SIZES)
    given = {"noise_multiplier": 2.0, "steps": 40}
    assert solve_for_group(3, **given, **SIZES) == PrivacyPlan.solve(**given, **SIZES)


@pytest.mark.parametrize(
    ("size", "given", "message"),
    [
        (0, {"epsilon": 6.0, "steps": 40}, "group_size is 0"),
        (3, {"epsilon": 6.0}, "exactly two of epsilon, noise_multiplier and steps"),
        (3, {"epsilon": 6.0, "steps": 40, "bands": "least"}, "bands is 'least'"),
        (60, {"epsilon": 6.0, "noise_multiplier": 0.7}, "a group of 60 in its first steps"),
    ],
)
def test_groups_that_cannot_be_planned_for_are_one_sentence(size, given, message):
    with pytest.raises(InputError, match=message):
        solve_for_group(size, **given, **SIZES)


def test_the_command_says_epsilon_for_the_group_and_for_one(capsys):
    arguments = ["--dataset-size", "2000", "--batch-size", "100", "--delta", "1e-4", "--epsilon", "6", "--steps", "40"]
    assert main(["plan", *arguments, "--group-size", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["group_size"] == 3
    assert 5.9 < found["group_epsilon"] <= 6.0
    assert found["epsilon"] < 3.0
    assert main(["plan", *arguments, "--group-size", "3"]) == 0
    out = capsys.readouterr().out
    assert "ε for somebody with up to 3 examples" in out
    assert f"in a recipe: noise_multiplier = {found['noise_multiplier']:g}, steps = 40, bands = 1" in out
