"""What (ε, δ) means: ε if one example is replaced by another, and what statements and plans say."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples

from dp_microadam import PrivacyPlan
from dp_microadam.accounting.costs import SubsampledGaussian, epsilon
from dp_microadam.accounting.meaning import meaning, meaning_in_words, percent, replace_one_epsilon
from dp_microadam.accounting.one_step import Cap
from dp_microadam.accounting.selection import Repetitions, SelectedRun

PAPER = SubsampledGaussian(sample_rate=4096 / 45000, noise_multiplier=3.0, steps=2480)


@pytest.mark.parametrize(
    "part",
    [
        SubsampledGaussian(0.05, 1.2, 200),
        pytest.param(SubsampledGaussian(0.004, 0.7, 1_000), marks=pytest.mark.slow),
        pytest.param(PAPER, marks=pytest.mark.slow),
    ],
)
def test_replacing_agrees_with_dp_accounting(part):
    independent = privacy_loss_distribution.from_gaussian_mechanism(
        part.noise_multiplier,
        sampling_prob=part.sample_rate,
        value_discretization_interval=1e-3,
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE,
    ).self_compose(part.steps)
    assert replace_one_epsilon([part], 1e-5) == pytest.approx(independent.get_epsilon_for_delta(1e-5), rel=2e-3)


@examples(40, quick=6)
@given(noise=st.floats(0.5, 100.0), steps=st.integers(1, 5_000))
def test_without_subsampling_replacing_is_twice_the_sensitivity(noise, steps):
    exact = dp_accounting.get_epsilon_gaussian(noise / 2 / math.sqrt(steps), 1e-6)
    assert exact * (1 - 1e-6) <= replace_one_epsilon([SubsampledGaussian(1.0, noise, steps)], 1e-6) <= exact * 1.0005


@examples(30, quick=4)
@given(rate=st.floats(1e-4, 1.0), noise=st.floats(0.4, 20.0), steps=st.integers(1, 2_000))
def test_replacing_costs_at_least_adding_or_removing_and_at_most_both_in_turn(rate, noise, steps):
    part = SubsampledGaussian(rate, noise, steps)
    replaced = replace_one_epsilon([part], 1e-5)
    assert epsilon([part], 1e-5, "pld") * (1 - 1e-4) <= replaced
    # Removing one and adding another, each with (ε, δ'), is (2ε, δ'(1 + e^ε)).
    inside = 1e-5
    for _ in range(60):
        inside = 1e-5 / (1 + math.exp(min(600.0, epsilon([part], inside, "pld"))))
        if inside < 1e-250:
            return
    assert replaced <= 2 * epsilon([part], inside * (1 - 1e-3), "pld") * (1 + 1e-3)


def hockey_stick(q: float, sigma: float, u: np.ndarray, v: np.ndarray, eps: float) -> float:
    """δ(ε) of one step in the plane, by summing over a fine grid."""
    side = np.arange(-1 - 7 * sigma, 1 + 7 * sigma, sigma / 12)
    points = np.stack(np.meshgrid(side, side), axis=-1)

    def density(mean: np.ndarray) -> np.ndarray:
        return np.exp(-0.5 * ((points - mean) ** 2).sum(-1) / sigma**2) / (2 * math.pi * sigma**2)

    still = (1 - q) * density(np.zeros(2))
    gap = (still + q * density(u)) - math.exp(eps) * (still + q * density(v))
    return float(np.maximum(gap, 0).sum() * (sigma / 12) ** 2)


@examples(60, quick=8)
@given(
    q=st.floats(0.01, 1.0),
    sigma=st.floats(0.5, 2.0),
    eps=st.floats(0.0, 2.0),
    lengths=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    angle=st.floats(0, math.pi),
)
def test_no_two_contributions_tell_more_than_opposite_ones(q, sigma, eps, lengths, angle):
    u = np.array([lengths[0], 0.0])
    v = lengths[1] * np.array([math.cos(angle), math.sin(angle)])
    opposite = hockey_stick(q, sigma, np.array([1.0, 0.0]), np.array([-1.0, 0.0]), eps)
    assert hockey_stick(q, sigma, u, v, eps) <= opposite * (1 + 1e-6) + 1e-9


def test_with_bands_replacing_is_that_of_the_steps_of_one_group():
    banded = PrivacyPlan(10_000, 100, 1.5, 400, 1e-5, bands=4).spent_after(400)
    assert replace_one_epsilon([banded], 1e-5) == replace_one_epsilon([SubsampledGaussian(0.04, 1.5, 100)], 1e-5)


def test_a_cap_that_is_reached_costs_more_and_one_that_cannot_be_nothing():
    plain = replace_one_epsilon([SubsampledGaussian(0.1, 2.0, 50)], 1e-5)
    roomy = SubsampledGaussian(0.1, 2.0, 50, cap=Cap(500, 500))
    tight = SubsampledGaussian(0.1, 2.0, 50, cap=Cap(50, 500))
    assert replace_one_epsilon([roomy], 1e-5) == plain < replace_one_epsilon([tight], 1e-5)
    # Twice the sensitivity in every step would cost more.
    assert replace_one_epsilon([tight], 1e-5) < replace_one_epsilon([SubsampledGaussian(0.1, 1.0, 50)], 1e-5)


def test_a_selection_among_runs_claims_no_curve_of_a_single_run():
    one = SubsampledGaussian(0.1, 3.0, 10)
    found = meaning([SelectedRun((one,), Repetitions(10))], 1e-5)
    assert found.keys() == {"not_computed"}
    ((_, words),) = meaning_in_words(found, 1e-5)
    assert "a selection among runs" in words


def test_without_subsampling_mu_is_exact_and_holds_for_all_rates():
    found = meaning([SubsampledGaussian(1.0, math.sqrt(3), 3)], 1e-5)
    assert (found["mu"], found["mu_smallest_rate"]) == (1.0, 0.0)
    assert dict(meaning_in_words(found, 1e-5))["Gaussian privacy"].startswith("μ ≤ 1.00; ")


def test_nothing_spent_is_stated_as_guessing():
    found = meaning([], 1e-5)
    assert (found["mu"], found["replace_one_epsilon"]) == (0.0, 0.0)
    assert [row["true_positive_rate"] for row in found["attacks"]] == pytest.approx([0.1, 0.01, 0.001])


@pytest.mark.parametrize(("share", "shown"), [(0.38914, "38.92 %"), (0.00001, "0.01 %"), (0.5, "50.00 %"), (0.99995, "100 %")])
def test_shares_are_never_rounded_down(share, shown):
    assert percent(share) == shown
