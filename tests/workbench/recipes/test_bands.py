"""Correlated noise in recipes and on the command line: optimised coefficients, and what MicroAdam keeps beside it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dp_microadam import PrivacyPlan
from dp_microadam.errors import InputError
from dp_microadam.plan.banded import banded_square_root, optimised_coefficients, workload_error
from dp_microadam.training.schedules import Schedule
from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.recipes.assemble import plan_of
from dp_microadam.workbench.recipes.recipe_files import load_recipe

SHORT = ("steps=60", "bands=4", "band_coefficients=optimised")
SMALL = ["--dataset-size", "3600", "--batch-size", "64", "--delta", "1e-5", "--epsilon", "8", "--steps", "60"]


def coefficients(*settings):
    plan = plan_of(load_recipe("demo", [*SHORT, *settings]), 3600)
    assert isinstance(plan, PrivacyPlan)
    return plan.coefficients


@pytest.mark.parametrize(("settings", "momentum"), [
    (("method=dp-sgd",), 0.0),
    (("method=dp-sgd", "optimizer.momentum=0.8"), 0.8),
    (("method=dp-sgd", "optimizer.momentum=0.8", "band_momentum=0.3"), 0.3),
    (("method=dp-adam",), 0.9),
    (("method=dp-adam", "optimizer.betas=[0.7, 0.999]"), 0.7),
    (("method=dp-adam", "band_momentum=0"), 0.0),
])  # fmt: skip
def test_coefficients_are_optimised_for_the_momentum_of_the_optimizer_or_the_declared_one(settings, momentum):
    assert coefficients(*settings) == tuple(optimised_coefficients(4, 60, momentum=momentum))


def test_coefficients_are_optimised_for_the_schedule_of_the_recipe():
    rates = [Schedule("cosine", 60, 0.1).factor(step) for step in range(60)]
    found = coefficients("method=dp-sgd", "schedule=cosine", "warmup=0.1")
    assert found == tuple(optimised_coefficients(4, 60, rates=rates))
    own, root = (workload_error(c, 60, rates=rates)[0] for c in (found, banded_square_root(4)))
    assert own < root
    assert workload_error(coefficients("method=dp-sgd"), 60, rates=rates)[0] > own


def test_coefficients_change_neither_epsilon_nor_noise_multiplier_nor_bands():
    plan = PrivacyPlan.solve(dataset_size=3600, batch_size=64, delta=1e-5, epsilon=8.0, steps=60, bands=4)
    other = plan.optimised_for(momentum=0.9)
    assert other.coefficients
    assert replace(other, coefficients=()) == plan
    assert (other.epsilon, other.spent_after(60)) == (plan.epsilon, plan.spent_after(60))
    assert other.weight_noise(momentum=0.9) < 1 == plan.weight_noise(momentum=0.9)


def test_one_band_has_nothing_to_optimise():
    plan = PrivacyPlan.solve(dataset_size=3600, batch_size=64, delta=1e-5, epsilon=8.0, steps=60)
    assert plan.optimised_for(momentum=0.9) is plan


def test_the_square_root_is_what_is_taken_without_a_word():
    for settings in ((), ("band_coefficients=square-root",)):
        plan = plan_of(load_recipe("demo", ["steps=60", "bands=4", *settings]), 3600)
        assert plan == PrivacyPlan.solve(dataset_size=3600, batch_size=128, delta=1e-5, epsilon=8.0, steps=60, bands=4)


def test_the_plan_on_the_command_line_shows_the_noise_in_the_weights(capsys):
    arguments = [*SMALL, "--bands", "4", "--band-coefficients", "optimised", "--momentum", "0.9", "--schedule", "linear"]
    assert main(["plan", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rates = [Schedule("linear", 60).factor(step) for step in range(60)]
    np.testing.assert_allclose(found["coefficients"], optimised_coefficients(4, 60, momentum=0.9, rates=rates), rtol=1e-12)
    errors = [workload_error(c, 60, momentum=0.9, rates=rates)[0] for c in (found["coefficients"], banded_square_root(4))]
    assert found["weight_noise"] == pytest.approx((errors[0] / errors[1]) ** 0.5)
    assert main(["plan", *arguments]) == 0
    assert f"optimised coefficients leave {found['weight_noise']:.3f} of the noise" in capsys.readouterr().out


@pytest.mark.parametrize(("settings", "said"), [
    (["bands=1", "band_coefficients=square-root"], "band_coefficients is 'square-root', but there is one band"),
    (["bands=4", "band_coefficients=best"], "band_coefficients is 'best'"),
    (["bands=4", "band_momentum=0.9"], "band_momentum is 0.9, which is for optimised coefficients"),
    (["bands=4", "band_coefficients=optimised", "band_momentum=1.0"], "band_momentum is 1.0"),
])  # fmt: skip
def test_bad_settings_of_a_recipe_are_refused_in_one_sentence(settings, said):
    with pytest.raises(InputError) as raised:
        load_recipe("demo", settings)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("arguments", "said"), [
    (["--momentum", "0.9"], "momentum is 0.9, which is for --band-coefficients optimised"),
    (["--band-coefficients", "square-root", "--schedule", "cosine"], "schedule is cosine, which is for"),
    (["--band-coefficients", "optimised"], "the plan has one band; give --bands"),
    (["--bands", "4", "--band-coefficients", "optimised", "--momentum", "1"], "momentum is 1.0"),
    (["--bands", "4", "--band-coefficients", "optimised", "--warmup", "-1"], "warmup is -1.0"),
])  # fmt: skip
def test_bad_input_of_plan_is_refused_in_one_sentence(arguments, said, capsys):
    assert main(["plan", *SMALL, *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
