"""What an attacker can reach: the trade-off curve of a run, and μ of Gaussian differential privacy."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm
from thoroughness import examples

from dp_microadam.accounting.costs import SubsampledGaussian, epsilon
from dp_microadam.accounting.one_step import Cap
from dp_microadam.accounting.trade_off import SMALLEST_RATE, gaussian_bound, trade_off

PAPER = SubsampledGaussian(sample_rate=4096 / 45000, noise_multiplier=3.0, steps=2480)
RATES = (0.4, 0.1, 0.01, 0.001, 1e-4, 1e-5)


def gaussian_true_positives(mu: float, rate: float) -> float:
    return float(norm.cdf(mu + norm.ppf(rate)))


def gaussian_delta(mu: float, eps: float) -> float:
    """Balle and Wang 2018, theorem 8."""
    return float(norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu))


def test_three_gaussians_are_one_of_mu_one():
    three = [SubsampledGaussian(sample_rate=1.0, noise_multiplier=math.sqrt(3), steps=3)]
    curve = trade_off(three)
    assert curve.delta(1.0) == pytest.approx(0.126936, abs=1e-5)
    assert curve.true_positives(0.1) == pytest.approx(0.38914, abs=1.5e-5)
    bound = gaussian_bound(curve)
    assert 1.0 <= bound.mu <= 1.01


@examples(50, quick=6)
@given(noise=st.floats(0.4, 500.0), steps=st.integers(1, 3_000))
@example(3.25, 578)
@example(4.0, 586)
@example(500.0, 1)
def test_without_subsampling_the_curve_is_gaussian_and_never_below_the_truth(noise, steps):
    mu = math.sqrt(steps) / noise
    curve = trade_off([SubsampledGaussian(1.0, noise, steps)])
    for rate in RATES:
        exact = gaussian_true_positives(mu, rate)
        assert exact <= curve.true_positives(rate) <= exact * (1 + 1e-4) + 1e-12, rate
    for eps in (0.0, mu / 2, mu, 2 * mu):
        exact = gaussian_delta(mu, eps)
        assert exact * (1 - 1e-9) <= curve.delta(eps) <= exact * (1 + 1e-3) + 1e-8, eps
    bound = gaussian_bound(curve)
    if mu < 7:
        assert mu <= bound.mu <= mu * 1.001 + 0.01
        assert bound.smallest_rate <= SMALLEST_RATE


def best_attack_on_one_step(q: float, sigma: float, rate: float) -> float:
    """True positives of the best attack, which is a threshold: on those who took part, or on those who did not."""
    taking_part = (1 - q) * rate + q * norm.sf(norm.isf(rate) - 1 / sigma)
    threshold = brentq(
        lambda x: (1 - q) * norm.cdf(x / sigma) + q * norm.cdf((x - 1) / sigma) - rate, -12 * sigma, 12 * sigma + 1, xtol=1e-12
    )
    return max(float(taking_part), float(norm.cdf(threshold / sigma)))


@pytest.mark.parametrize(("q", "sigma"), [(0.3, 0.8), (0.01, 1.0), (0.9, 3.0), (1e-3, 0.5)])
def test_no_attack_on_a_single_step_beats_its_curve(q, sigma):
    curve = trade_off([SubsampledGaussian(q, sigma, 1)])
    for rate in RATES:
        assert best_attack_on_one_step(q, sigma, rate) * (1 - 1e-9) <= curve.true_positives(rate), rate
    # The curve is symmetric in the two kinds of error, which the best attack need not be, and so not far above it.
    assert curve.true_positives(0.3) <= best_attack_on_one_step(q, sigma, 0.3) * 1.05


@pytest.mark.parametrize(
    ("part", "interval"),
    [
        (SubsampledGaussian(0.05, 1.2, 200), 1e-3),
        pytest.param(SubsampledGaussian(0.004, 0.7, 1_000), 1e-3, marks=pytest.mark.slow),
        pytest.param(PAPER, 1e-3, marks=pytest.mark.slow),
        pytest.param(SubsampledGaussian(0.5, 8.0, 500), 1e-3, marks=pytest.mark.slow),
    ],
)
def test_the_profile_is_between_the_two_estimates_of_dp_accounting(part, interval):
    """Its optimistic estimate is below the truth, its pessimistic one above; ours is above the truth and closer."""
    low, high = (
        privacy_loss_distribution.from_gaussian_mechanism(
            part.noise_multiplier,
            sampling_prob=part.sample_rate,
            value_discretization_interval=interval,
            pessimistic_estimate=pessimistic,
            use_connect_dots=pessimistic,
        ).self_compose(part.steps)
        for pessimistic in (False, True)
    )
    curve = trade_off([part])
    for eps in np.linspace(0, epsilon([part], 1e-6, "pld"), 9):
        assert low.get_delta_for_epsilon(eps) <= curve.delta(eps) * (1 + 1e-9), eps
        assert curve.delta(eps) <= high.get_delta_for_epsilon(eps) * 1.005 + 1e-9, eps


@examples(40, quick=4)
@given(
    rate=st.floats(1e-3, 1.0),
    noise=st.floats(0.5, 10.0),
    steps=st.integers(1, 2_000),
    chosen=st.floats(0.0, 1.0),
)
def test_mu_lies_above_the_curve_for_all_rates_it_is_stated_for_and_is_the_least(rate, noise, steps, chosen):
    curve = trade_off([SubsampledGaussian(rate, noise, steps)])
    bound = gaussian_bound(curve)
    if bound is None:
        assert curve.true_positives(SMALLEST_RATE) > 0.99
        return
    low = math.log(bound.smallest_rate)
    alpha = math.exp(low + chosen * (math.log(0.5) - low))
    if curve.false_negatives(alpha) >= bound.smallest_rate:
        assert curve.true_positives(alpha) <= gaussian_true_positives(bound.mu, alpha) * (1 + 1e-9)
    assert bound.smallest_rate <= SMALLEST_RATE
    if bound.mu > 0.01:
        alphas = np.concatenate([[SMALLEST_RATE], curve.corners()[0]])
        wanted = [a for a in alphas if a >= SMALLEST_RATE]
        assert any(curve.true_positives(a) > gaussian_true_positives(bound.mu - 0.01, a) for a in wanted)


def test_a_cap_that_is_reached_tells_more():
    plain, tight = (trade_off([SubsampledGaussian(0.1, 2.0, 50, cap=cap)]) for cap in (None, Cap(50, 500)))
    for rate in RATES:
        assert plain.true_positives(rate) < tight.true_positives(rate)
