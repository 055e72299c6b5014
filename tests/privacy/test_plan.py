"""The plan: the paper's numbers, the promise about the budget, and what is refused."""

import dataclasses
import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from thoroughness import examples

from dp_microadam import InputError, PrivacyPlan
from dp_microadam.errors import PrivacyWarning
from dp_microadam.privacy.accounting import NOISE_RESOLUTION, SubsampledGaussian, epsilon

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
    plan = PrivacyPlan.solve(**setting, epsilon=8, noise_multiplier=noise_multiplier)
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
    assume(epsilon([one_step], setting["delta"]) <= target)
    plan = PrivacyPlan.solve(**setting, epsilon=target, noise_multiplier=noise_multiplier)
    assert plan.epsilon <= target < plan.epsilon_after(plan.steps + 1)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(("target", "steps"), [(8.0, 2480), (1.0, 1), (0.5, 600)])
def test_solved_noise_never_exceeds_the_target_and_less_would(accountant, target, steps):
    plan = PrivacyPlan.solve(**CIFAR, epsilon=target, steps=steps, accountant=accountant)
    assert plan.epsilon <= target
    less = SubsampledGaussian(plan.sample_rate, plan.noise_multiplier - NOISE_RESOLUTION, steps)
    assert epsilon([less], plan.delta, accountant) > target


def test_solved_steps_by_pld_never_exceed_the_target_and_one_more_would():
    plan = PrivacyPlan.solve(**CIFAR, epsilon=8, noise_multiplier=3, accountant="pld")
    assert plan.epsilon <= 8 < plan.epsilon_after(plan.steps + 1)
    assert plan.steps > 2480


def test_solving_back_and_forth_returns_the_same_plan():
    spent = PrivacyPlan.solve(**CIFAR, noise_multiplier=2.2, steps=777)
    assert PrivacyPlan.solve(**CIFAR, noise_multiplier=2.2, epsilon=spent.epsilon) == spent


def test_the_plan_is_frozen_and_its_epsilon_cannot_be_claimed():
    plan = PrivacyPlan.solve(**CIFAR, noise_multiplier=2.2, steps=777)
    for name in ("noise_multiplier", "epsilon"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, name, 0.1)
    with pytest.raises(TypeError):
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


def test_noise_of_the_mean_follows_from_the_plan():
    plan = PrivacyPlan.solve(**CIFAR, noise_multiplier=3.0, steps=10)
    assert plan.noise_deviation(0.5) == pytest.approx(3.0 * 0.5 / 4096)


TWO = {"epsilon": 8.0, "noise_multiplier": 3.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({**CIFAR, "epsilon": 0.0, "steps": 5}, "epsilon is 0.0"),
        ({**CIFAR, "epsilon": -1.0, "steps": 5}, "epsilon is -1.0"),
        ({**CIFAR, "epsilon": math.nan, "steps": 5}, "epsilon is nan"),
        ({**CIFAR, "noise_multiplier": 0.0, "steps": 5}, "noise_multiplier is 0.0"),
        ({**CIFAR, "noise_multiplier": -2.0, "steps": 5}, "noise_multiplier is -2.0"),
        ({**CIFAR, "noise_multiplier": 1.0, "steps": 0}, "steps is 0"),
        ({**CIFAR, "noise_multiplier": 1.0, "steps": 2.5}, "steps is 2.5"),
        ({**CIFAR, **TWO, "delta": 1.0}, "delta is 1.0"),
        ({**CIFAR, **TWO, "delta": 0.0}, "delta is 0.0"),
        ({**CIFAR, **TWO, "batch_size": 45_001}, "batch_size is 45001, more than the 45000"),
        ({**CIFAR, **TWO, "batch_size": 0}, "batch_size is 0"),
        ({**CIFAR, **TWO, "dataset_size": 0}, "dataset_size is 0"),
        ({**CIFAR, **TWO, "accountant": "moments"}, "accountant is 'moments'"),
        ({**CIFAR, **TWO, "steps": 5}, "exactly two of"),
        ({**CIFAR, "epsilon": 8.0}, "exactly two of"),
        ({**CIFAR, "epsilon": 0.001, "steps": 5}, "no noise_multiplier up to"),
        ({**CIFAR, "epsilon": 8.0, "noise_multiplier": 0.3}, "noise_multiplier 0.3 spends epsilon"),
        ({**CIFAR, "epsilon": 8.0, "noise_multiplier": 1e5, "accountant": "pld"}, "never runs out"),
    ],
)
def test_bad_input_is_refused_in_one_sentence_that_names_the_value(arguments, message):
    with pytest.raises(InputError, match=message) as refusal:
        PrivacyPlan.solve(**arguments)
    assert "\n" not in str(refusal.value)


def test_a_delta_above_one_in_n_is_a_warning():
    with pytest.warns(PrivacyWarning, match="delta is 0.001, above 1/45000"):
        PrivacyPlan.solve(dataset_size=45_000, batch_size=4096, delta=1e-3, epsilon=8, noise_multiplier=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrivacyPlan.solve(dataset_size=45_000, batch_size=4096, delta=1 / 45_000, epsilon=8, noise_multiplier=3)


@pytest.mark.parametrize("noise", [1e-4, 1e-158, 1e6, 1e200])
def test_a_noise_multiplier_out_of_range_is_refused(noise):
    with pytest.raises(InputError, match=r"noise_multiplier is .*; it must be from 0.001 to 100000"):
        PrivacyPlan.solve(dataset_size=1000, batch_size=10, delta=1e-5, noise_multiplier=noise, steps=10)
