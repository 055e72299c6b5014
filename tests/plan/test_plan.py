"""The plan: the paper's numbers, the promise about the budget, and what is refused."""

import json
import math
import warnings
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from thoroughness import examples

from dp_microadam import InputError, PrivacyPlan
from dp_microadam.accounting.costs import NOISE_RESOLUTION, SubsampledGaussian, epsilon
from dp_microadam.accounting.one_step import Cap
from dp_microadam.errors import PrivacyWarning
from dp_microadam.plan.bands import band_table

CIFAR = {"dataset_size": 45_000, "batch_size": 4096, "delta": 1e-5}
IMAGENET = {"dataset_size": 1_271_167, "batch_size": 16_384, "delta": 8e-7}


@pytest.mark.parametrize(
    ("setting", "noise_multiplier", "steps"),
    [
        (CIFAR, 3, 2480),
        (CIFAR, 4, 4556),
        (CIFAR, 5, 7227),
        (CIFAR, 6, 10492),
        (CIFAR, 8, 18803),
        (IMAGENET, 2.5, 71587),
    ],
)
def test_the_paper_is_reproduced(setting, noise_multiplier, steps):
    plan = PrivacyPlan.solve(**setting, epsilon=8, noise_multiplier=noise_multiplier, accountant="rdp")
    assert plan.steps == steps
    assert plan.epsilon <= 8 < plan.epsilon_after(steps + 1)


@examples(30)
@given(
    dataset_size=st.integers(100, 10**7),
    share=st.floats(1e-5, 1.0),
    noise_multiplier=st.floats(0.4, 30),
    target=st.floats(0.05, 30),
)
def test_solved_steps_never_exceed_the_target_and_one_more_would(dataset_size, share, noise_multiplier, target):
    setting = {"dataset_size": dataset_size, "batch_size": max(1, int(share * dataset_size)), "delta": 1e-8}
    one_step = SubsampledGaussian(setting["batch_size"] / dataset_size, noise_multiplier, 1)
    assume(epsilon([one_step], setting["delta"], "rdp") <= target)
    plan = PrivacyPlan.solve(**setting, epsilon=target, noise_multiplier=noise_multiplier, accountant="rdp")
    assert plan.epsilon <= target < plan.epsilon_after(plan.steps + 1)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(("target", "steps"), [(8.0, 2480), (1.0, 1), (0.5, 600)])
def test_solved_noise_never_exceeds_the_target_and_less_would(accountant, target, steps):
    plan = PrivacyPlan.solve(**CIFAR, epsilon=target, steps=steps, accountant=accountant)
    assert plan.epsilon <= target
    less = SubsampledGaussian(plan.sample_rate, plan.noise_multiplier - NOISE_RESOLUTION, steps)
    assert epsilon([less], plan.delta, accountant) > target


def test_epochs_are_steps_in_which_each_example_is_sampled_once_on_average():
    assert PrivacyPlan.solve(**CIFAR, noise_multiplier=2.2, epochs=10) == PrivacyPlan.solve(
        **CIFAR, noise_multiplier=2.2, steps=110
    )  # 10 · 45,000 / 4,096 = 109.9
    whole = {"dataset_size": 60_000, "batch_size": 600, "delta": 1e-5, "noise_multiplier": 2.0}
    assert PrivacyPlan.solve(**whole, epochs=8.3).steps == 830


def test_solving_back_and_forth_returns_the_same_plan():
    spent = PrivacyPlan.solve(**CIFAR, noise_multiplier=2.2, steps=777)
    assert PrivacyPlan.solve(**CIFAR, noise_multiplier=2.2, epsilon=spent.epsilon) == spent


def test_the_plan_is_frozen_and_its_epsilon_cannot_be_claimed():
    plan = PrivacyPlan.solve(**CIFAR, noise_multiplier=2.2, steps=777)
    for name in ("noise_multiplier", "epsilon"):
        with pytest.raises(FrozenInstanceError):
            setattr(plan, name, 0.1)
    with pytest.raises(InputError, match="does not take epsilon"):
        PrivacyPlan(45_000, 4096, 1.0, 100, 1e-5, epsilon=0.1)  # type: ignore[call-arg]


def test_a_plan_survives_a_dictionary_and_a_forged_epsilon_does_not():
    plan = PrivacyPlan.solve(**CIFAR, noise_multiplier=2.2, steps=777)
    described = plan.to_dict()
    assert described["sample_rate"] == plan.sample_rate == 4096 / 45_000
    assert described["epsilon"] == plan.epsilon
    back = PrivacyPlan.from_dict({**described, "epsilon": 0.001})
    assert back == plan
    assert back.epsilon == plan.epsilon
    with pytest.raises(InputError, match="needs steps"):
        PrivacyPlan.from_dict({name: value for name, value in described.items() if name != "steps"})


def test_numbers_of_other_libraries_become_plain_ones():
    plan = PrivacyPlan.solve(
        dataset_size=np.int64(45_000),
        batch_size=np.int32(4096),
        delta=np.float64(1e-5),
        noise_multiplier=3,
        steps=np.int64(9),
    )
    assert PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


TWO = {"epsilon": 8.0, "noise_multiplier": 3.0}
SMALL = {"dataset_size": 1000, "batch_size": 10, "delta": 1e-5}
NOISE = {**SMALL, "epsilon": 3.0, "steps": 50}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({**CIFAR, "epsilon": 0.0, "steps": 5}, "epsilon is 0.0"),
        ({**CIFAR, "epsilon": math.nan, "steps": 5}, "epsilon is nan"),
        ({**CIFAR, "noise_multiplier": -2.0, "steps": 5}, "noise_multiplier is -2.0"),
        ({**CIFAR, "noise_multiplier": 1e-4, "steps": 5}, "noise_multiplier is 0.0001; it must be from 0.001 to 100000"),
        ({**CIFAR, "noise_multiplier": 1e6, "steps": 5}, r"noise_multiplier is 1e\+06; it must be from 0.001 to 100000"),
        ({**CIFAR, "noise_multiplier": 1.0, "steps": 0}, "steps is 0"),
        ({**CIFAR, "noise_multiplier": 1.0, "steps": 2.5}, "steps is 2.5"),
        ({**CIFAR, **TWO, "delta": 1.0}, "delta is 1.0"),
        ({**CIFAR, **TWO, "batch_size": 45_001}, "batch_size is 45001, more than the 45000"),
        ({**CIFAR, **TWO, "dataset_size": 0}, "dataset_size is 0"),
        ({**CIFAR, **TWO, "examples_per_user": 0}, "examples_per_user is 0"),
        ({**CIFAR, **TWO, "examples_per_user": 2, "batch_size": 45_001}, "more than the 45000 users"),
        ({**CIFAR, **TWO, "accountant": "moments"}, "accountant is 'moments'"),
        ({**CIFAR, **TWO, "steps": 5}, "exactly two of"),
        ({**CIFAR, "epsilon": 8.0, "steps": 5, "epochs": 2}, "epochs is 2 and steps is 5"),
        ({**CIFAR, "epsilon": 8.0, "epochs": 0}, "epochs is 0"),
        ({**CIFAR, "epsilon": 10**400, "steps": 1}, "epsilon is a whole number of 1329 bits; it must have at most 63"),
        ({**CIFAR, "epsilon": 8.0, "steps": 1, "dataset_size": 10**400}, "dataset_size is a whole number of 1329 bits"),
        ({**CIFAR, "epsilon": 8.0, "epochs": 1e308}, r"epochs is 1e\+308; it must be at most 1e\+30"),
        ({**CIFAR, "epsilon": 8.0}, "exactly two of"),
        ({**CIFAR, "epsilon": 0.001, "steps": 5, "accountant": "rdp"}, "no noise_multiplier up to"),
        ({**CIFAR, "epsilon": 8.0, "noise_multiplier": 0.3}, "noise_multiplier 0.3 spends epsilon"),
        ({**CIFAR, "epsilon": 8.0, "noise_multiplier": 1e5}, "never runs out"),
        ({**NOISE, "bands": 0}, "bands is 0; it must be a whole number at least 1"),
        ({**NOISE, "bands": "many"}, "bands is 'many'; it must be a whole number of at least 1, or 'auto'"),
        ({**NOISE, "bands": 101}, "bands is 101, but a group of 1000/101 examples cannot give an expected batch of 10"),
        ({**NOISE, "bands": 60}, "bands is 60, more than the 50 steps"),
        (
            {**NOISE, "bands": 8, "parameters": 10**9},
            "bands is 8, which keeps 26.1 GiB of noise for 1000000000 param",
        ),
        ({**NOISE, "bands": 8, "parameters": 100, "noise_memory_gib": 0}, "noise_memory_gib is 0; it must be"),
        ({**NOISE, "bands": "auto", "parameters": 0}, "parameters is 0; it must be"),
        ({**NOISE, "max_batch_size": 9}, "max_batch_size is 9, less than the expected batch_size 10"),
        ({**NOISE, "max_batch_size": 60.5}, "max_batch_size is 60.5"),
        (
            {**SMALL, "noise_multiplier": 0.0015, "steps": 5, "max_batch_size": 20},
            r"is 0\.0015; it must be from 0\.002 to 100000",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence_that_names_the_value(arguments, message):
    with pytest.raises(InputError, match=message) as refusal:
        PrivacyPlan.solve(**arguments)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("delta", [1e-40, 1e-77, 5e-324])
def test_a_delta_that_no_generator_honours_is_refused(delta):
    with pytest.raises(
        InputError, match=r"delta is .*; it must be at least 3e-39, the smallest that a generator of noise can honour"
    ):
        PrivacyPlan(1000, 10, 1.0, 100, delta)
    assert PrivacyPlan(1000, 10, 1.0, 100, 2.0**-128).epsilon > 0


def test_a_delta_above_one_in_n_is_a_warning():
    with pytest.warns(PrivacyWarning, match="delta is 0.001, above 1/45000"):
        PrivacyPlan.solve(dataset_size=45_000, batch_size=4096, delta=1e-3, epsilon=8, noise_multiplier=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrivacyPlan.solve(dataset_size=45_000, batch_size=4096, delta=1 / 45_000, epsilon=8, noise_multiplier=3)


def test_bands_are_automatic_only_where_epsilon_steps_and_the_size_of_the_model_are_known():
    several = PrivacyPlan.solve(**SMALL, epsilon=8.0, steps=400, parameters=1000)
    assert several.bands > 1
    assert PrivacyPlan.solve(**SMALL, epsilon=8.0, steps=400) == PrivacyPlan.solve(**SMALL, epsilon=8.0, steps=400, bands=1)
    for two in ({"epsilon": 8.0, "noise_multiplier": 1.0}, {"noise_multiplier": 1.0, "steps": 400}):
        assert PrivacyPlan.solve(**SMALL, **two, parameters=1000).bands == 1


def test_automatic_bands_are_at_most_sixteen_and_stay_within_the_memory():
    setting = {**SMALL, "epsilon": 8.0, "steps": 400}
    assert min(band_table(**setting), key=lambda choice: choice.running_sum).bands > 16
    assert PrivacyPlan.solve(**setting, parameters=1000).bands <= 16
    limited = PrivacyPlan.solve(**setting, parameters=10**8, noise_memory_gib=2.0)
    assert 1 < limited.bands <= 1 + 2 * 2**30 // (4 * 10**8) == 6
    assert PrivacyPlan.solve(**setting, parameters=10**9, noise_memory_gib=1.0).bands == 1


@pytest.mark.parametrize(("batch_size", "target"), [(10, 8.0), (40, 8.0), (100, 3.0), (20, 0.5)])
def test_automatic_bands_leave_at_most_eight_tenths_of_the_noise_or_are_one(batch_size, target):
    setting = {**SMALL, "batch_size": batch_size, "epsilon": target, "steps": 100}
    plan, one = PrivacyPlan.solve(**setting, parameters=1000), PrivacyPlan.solve(**setting, bands=1)
    noise = plan.noise_multiplier / one.noise_multiplier * plan.noise_ratios.running_sum
    assert plan == one or noise < 0.805  # the choice knows noise multipliers to half a percent
    table = band_table(**setting, most=10)  # for each ten steps one
    least = min(choice.running_sum for choice in table)
    assert (plan.bands > 1) == (least < 0.8) or abs(least - 0.8) < 0.005
    if plan.bands > 1:
        assert noise < 1.11 * least


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_steps_solved_for_bands_are_whole_cycles_and_one_more_would_exceed(accountant):
    plan = PrivacyPlan.solve(**SMALL, epsilon=3.0, noise_multiplier=1.5, bands=8, accountant=accountant)
    assert plan.steps % 8 == 0
    assert plan.epsilon <= 3.0 < plan.epsilon_after(plan.steps + 1)


def test_noise_solved_for_bands_never_exceeds_the_target_and_less_would():
    plan = PrivacyPlan.solve(**SMALL, epsilon=3.0, steps=100, bands=8)
    assert (plan.sample_rate, plan.spent_after(100).steps) == (0.08, 13)
    assert plan.epsilon <= 3.0 < replace(plan, noise_multiplier=plan.noise_multiplier - NOISE_RESOLUTION).epsilon


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
