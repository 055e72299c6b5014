"""The bounds audits rest on, against published examples, closed forms and exact enumeration."""

import math

import dp_accounting
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import betaincinv
from scipy.stats import binom, binomtest, norm
from thoroughness import examples

from dp_microadam.accounting.costs import SubsampledGaussian
from dp_microadam.accounting.trade_off import trade_off
from dp_microadam.errors import InputError
from dp_microadam.workbench.audit.statistics import (
    curve_of,
    gaussian_curve,
    one_run_epsilon,
    one_run_mu,
    one_run_p_value,
    rate_upper_bound,
    refutes,
    two_world_epsilon,
)
from dp_microadam.workbench.audit.two_world import Probe, audit_two_worlds, strength


def gaussian_epsilon(noise_multiplier, delta):
    """Closed form of the Gaussian mechanism (Balle and Wang 2018, theorem 8)."""
    mu = 1 / noise_multiplier

    def gap(epsilon):
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    return brentq(gap, 0, 100) if gap(0) > 0 else 0.0


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "published"),
    [
        (1000, 100, 75, 1e-4, 0.673),  # appendix D of the paper
        (100_000, 1510, 1439, 1e-5, 2.675),  # its section 7
    ],
)
def test_the_published_examples_of_one_run_are_reproduced(canaries, guesses, correct, delta, published):
    assert one_run_epsilon(canaries, guesses, correct, delta, 0.95) == pytest.approx(published, abs=1e-3)


def test_without_delta_all_right_guesses_give_the_closed_form():
    # (e^ε/(1+e^ε))^r = 1 − confidence, solved for ε.
    accuracy = 0.05 ** (1 / 200)
    assert one_run_epsilon(500, 200, 200, 0.0, 0.95) == pytest.approx(math.log(accuracy / (1 - accuracy)), rel=1e-9)


def test_guesses_no_better_than_a_coin_show_nothing():
    assert one_run_epsilon(1000, 500, 250, 1e-5, 0.95) == 0.0


@examples(40)
@given(st.data())
def test_the_p_value_is_the_published_formula_summed_term_by_term(data):
    guesses = data.draw(st.integers(1, 40))
    correct = data.draw(st.integers(0, guesses))
    canaries = data.draw(st.integers(guesses, 100))
    epsilon, delta = data.draw(st.floats(0, 5)), data.draw(st.floats(0, 0.01))
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    mass = [math.comb(guesses, k) * q**k * (1 - q) ** (guesses - k) for k in range(guesses + 1)]
    slopes = [sum(mass[correct - i : correct]) / i for i in range(1, correct + 1)]
    expected = min(1.0, sum(mass[correct:]) + 2 * canaries * delta * max(slopes, default=0.0))
    assert one_run_p_value(canaries, guesses, correct, epsilon, delta) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_randomized_response_is_never_accused():
    """The worst ε-private mechanism reports each membership truthfully with probability e^ε/(1+e^ε). The chance that the bound
    exceeds ε, summed exactly over all numbers of right guesses, stays below 5 %."""
    for epsilon in (0.2, 1.0, 3.0):
        chances = binom.pmf(range(101), 100, 1 / (1 + math.exp(-epsilon)))
        bounds = [one_run_epsilon(100, 100, right, 0.0, 0.95) for right in range(101)]
        accused = sum(chance for chance, bound in zip(chances, bounds, strict=True) if bound > epsilon * (1 + 1e-9))
        assert 0.005 < accused <= 0.05


@examples(40)
@given(st.data())
def test_rates_are_bounded_as_by_clopper_and_pearson(data):
    trials = data.draw(st.integers(1, 500))
    events = data.draw(st.integers(0, trials))
    confidence = data.draw(st.floats(0.5, 0.9999999))
    other = binomtest(events, trials, alternative="less").proportion_ci(confidence, method="exact").high
    assert float(rate_upper_bound(events, trials, confidence)) == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("noise", [0.7, 1.5])
@pytest.mark.parametrize("delta", [0.01, 0.1, 0.2])
def test_the_best_threshold_reaches_the_curve(noise, delta):
    epsilon = gaussian_epsilon(noise, delta)
    threshold = epsilon * noise**2 + 0.5  # where the likelihood ratio is e^ε
    trials = 10**14
    alarms = round(norm.sf(threshold / noise) * trials)
    misses = round(norm.cdf((threshold - 1) / noise) * trials)
    assert float(two_world_epsilon(alarms, misses, trials, trials, delta, 0.95)) == pytest.approx(epsilon, rel=1e-3)


def gaussian_worlds(seed, repetitions, noise=0.7):
    rng = np.random.default_rng(seed)
    without, present = noise * rng.standard_normal((2, repetitions, 1, 1))
    return without, present + 1


def test_many_samples_of_the_gaussian_mechanism_come_close_to_its_curve_and_stay_below():
    """False alarm below 1e-7, by the confidence; the bound is within a tenth of the truth."""
    probe = Probe("strength", "", strength, delta=0.1)
    truth = gaussian_epsilon(0.7, 0.1)
    found = audit_two_worlds(*gaussian_worlds(3, 400_000), probe, truth, confidence=1 - 1e-7)
    assert 0.9 * truth < found.bound < truth
    assert not found.violated


def test_bounds_of_small_samples_exceed_the_truth_no_more_often_than_stated():
    """400 audits at 90 %: above the truth at most 40 times on average; 75 or more has probability 6e-8."""
    probe = Probe("strength", "", strength, delta=0.1)
    truth = gaussian_epsilon(0.7, 0.1)
    above = sum(audit_two_worlds(*gaussian_worlds(seed, 400), probe, truth, confidence=0.9).violated for seed in range(400))
    assert binom.sf(74, 400, 0.1) < 1e-7
    assert above < 75


def test_the_threshold_is_chosen_on_the_half_that_is_not_judged():
    """The judged half decides alone: with it shuffled into one world the bound is zero, whatever the first half shows."""
    probe = Probe("strength", "", strength, delta=0.1)
    apart = np.concatenate([np.zeros(500), np.ones(500)])[:, None, None]
    assert audit_two_worlds(-apart, 5 - apart, probe, 1.0).violated  # worlds differ in both halves
    same_when_judged = np.concatenate([np.ones(500), np.zeros(500)])[:, None, None]
    assert audit_two_worlds(0 * same_when_judged, same_when_judged, probe, 1.0).bound == 0.0


DELTA = 1e-6


def guesses_at_thresholds(shift: float, count: int = 10_000) -> tuple[list[tuple[int, int]], int]:
    """Guesses and right guesses for each threshold, if ``count`` scores out are normal and as many in are shifted.

    The scores are quantiles, and thresholds those on the concave hull of the receiver operating characteristic, as in the tests
    of JAX-Privacy (tests/auditing_test.py, test_epsilon_one_run_close).
    """
    scores = norm.ppf(np.linspace(0, 1, count, endpoint=False) + 1 / (2 * count))
    thresholds = np.append(np.union1d(scores, scores + shift), np.inf)
    missed, cleared = (np.searchsorted(np.sort(own), thresholds, side="left") for own in (scores + shift, scores))
    hull: list[tuple[int, int]] = []
    for point in zip(missed.tolist(), cleared.tolist(), strict=True):
        while len(hull) > 1:
            (a, b), (c, d) = hull[-2:]
            if (d - b) * (point[0] - c) > (point[1] - d) * (c - a):
                break
            hull.pop()
        hull.append(point)
    return [(2 * count - a - b, count - a) for a, b in hull if a + b < 2 * count], len(hull)


@pytest.mark.parametrize(("shift", "published"), [(1, 2.164749), (2, 4.7218075), (4, 9.133752)])
def test_the_f_dp_bound_is_that_of_jax_privacy(shift, published):
    """The largest bound over all thresholds, each at its share of 5 %; most are ruled out by a single test."""
    pairs, thresholds = guesses_at_thresholds(shift)
    level = 0.05 / thresholds
    found = 0.0
    # Those first whose share of right guesses has a large lower bound: later ones seldom raise the result.
    for guesses, correct in sorted(pairs, key=lambda pair: -betaincinv(pair[1], pair[0] - pair[1] + 1, level)):
        if refutes(gaussian_curve(found), 20_000, guesses, correct, level):
            found = max(found, one_run_mu(20_000, guesses, correct, 1 - level))
    assert dp_accounting.get_epsilon_gaussian(1 / found, DELTA) == pytest.approx(published, rel=1e-5)


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
def test_a_single_guess_is_right_as_often_as_the_middle_of_the_curve_allows(mu):
    """The best guess between N(0, 1) and N(μ, 1) is right with probability Φ(μ/2)."""
    most = float(norm.cdf(mu / 2))
    assert not refutes(gaussian_curve(mu), 1, 1, 1, most - 1e-9)
    assert refutes(gaussian_curve(mu), 1, 1, 1, most + 1e-9)


def test_the_curve_of_a_run_without_subsampling_refutes_as_the_gaussian_one():
    claimed = curve_of(trade_off([SubsampledGaussian(1.0, 2.0, 4)]))
    for correct in range(100, 200, 5):
        exact = refutes(gaussian_curve(1.0), 1_000, 200, correct, 0.01)
        assert refutes(claimed, 1_000, 200, correct, 0.01) <= exact
        assert refutes(claimed, 1_000, 200, correct, 0.01) == refutes(gaussian_curve(1.0001), 1_000, 200, correct, 0.01)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: one_run_p_value(10, 11, 5, 1.0, 0.0), "guesses is 11"),
        (lambda: one_run_p_value(10, 10, 11, 1.0, 0.0), "correct is 11"),
        (lambda: one_run_p_value(10, 10, 5, -1.0, 0.0), "epsilon is -1.0"),
        (lambda: one_run_epsilon(10, 10, 5, 1.0, 0.9), "delta is 1.0"),
        (lambda: one_run_epsilon(10, 10, 5, 0.0, 1.0), "confidence is 1.0"),
        (lambda: two_world_epsilon(0, 0, 10, 10, -0.1, 0.9), "delta is -0.1"),
        (lambda: rate_upper_bound(0, 0, 0.9), "trials is 0"),
    ],
)
def test_what_cannot_be_a_count_or_a_probability_is_refused(call, named):
    with pytest.raises(InputError, match=named):
        call()
