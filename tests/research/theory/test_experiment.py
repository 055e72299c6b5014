"""The experiment of research/theory.md in small: T up to 3,162 instead of 100,000, and half as many seeds."""

import math

import pytest
from research.theory.bounds import corrected_bound
from research.theory.experiment import ALGORITHMS, ALL_STEPS, NOISE_MULTIPLIER, measure, setting_of
from research.theory.problem import CauchyRegression

STEPS = (100, 316, 1000, 3162)
ONE_IN_THREE_MILLION = 5
"""Standard errors: a normal mean lies further off on one side with probability 2.9e-7."""


@pytest.mark.parametrize("noise_multiplier", [0.0, NOISE_MULTIPLIER])
def test_the_conditions_hold_and_one_over_root_t_is_the_step_size_from_a_hundred_steps_on(noise_multiplier):
    setting = setting_of(CauchyRegression.drawn(), noise_multiplier)
    assert setting.applies
    for steps in ALL_STEPS:
        assert corrected_bound(setting, steps).step_size == 1 / math.sqrt(steps)


@pytest.mark.parametrize("noise_multiplier", [0.0, NOISE_MULTIPLIER])
def test_algorithm_3_stays_under_the_bound_at_the_rate_the_theorem_promises(noise_multiplier):
    curve = measure(CauchyRegression.drawn(), ALGORITHMS[0], noise_multiplier, STEPS, seeds=32)
    for mean, error, bound in zip(curve.means, curve.standard_errors, curve.bounds, strict=True):
        assert mean + ONE_IN_THREE_MILLION * error < bound
    slope, error = curve.slope(since=316)
    # Not above −½ as far as the seeds can tell, and they tell to within 0.05.
    assert slope - ONE_IN_THREE_MILLION * error <= -0.5
    assert ONE_IN_THREE_MILLION * error < 0.05


@pytest.mark.parametrize("noise_multiplier", [0.0, NOISE_MULTIPLIER])
def test_algorithm_1_stays_under_the_same_bound_though_nothing_says_it_must(noise_multiplier):
    curve = measure(CauchyRegression.drawn(), ALGORITHMS[1], noise_multiplier, STEPS[:3], seeds=16)
    assert curve.bounds is None
    setting = setting_of(CauchyRegression.drawn(), noise_multiplier)
    for steps, mean, error in zip(curve.steps, curve.means, curve.standard_errors, strict=True):
        assert mean + ONE_IN_THREE_MILLION * error < corrected_bound(setting, steps).total


def test_a_run_with_too_large_a_step_for_too_long_would_be_seen():
    """The measurement can tell: without any descent the mean stays at ‖∇f(θ₁)‖², which has slope 0."""
    curve = measure(CauchyRegression.drawn(), ALGORITHMS[0], 0.0, (10, 30), seeds=8)
    slope, _ = curve.slope(since=10)
    assert slope > -0.4
