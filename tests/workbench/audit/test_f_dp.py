"""Lower bounds from one run, by the analysis of f-differential privacy, and numbers that others published."""

import numpy as np
import pytest
from scipy.special import betaincinv
from scipy.stats import norm

from dp_microadam.accounting.costs import SubsampledGaussian
from dp_microadam.accounting.trade_off import trade_off
from dp_microadam.workbench.audit.f_dp import curve_of, epsilon_of_gaussian, gaussian_curve, one_run_mu, refutes
from dp_microadam.workbench.audit.statistics import one_run_epsilon, one_run_p_value

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


def best(shift: float, bound, exceeds) -> float:
    """The largest bound over all thresholds, each at its share of 5 %; most are ruled out by a single test."""
    pairs, thresholds = guesses_at_thresholds(shift)
    confidence = 1 - 0.05 / thresholds
    found = 0.0
    # Those first whose share of right guesses has a large lower bound: later ones seldom raise the result.
    for guesses, correct in sorted(pairs, key=lambda pair: -betaincinv(pair[1], pair[0] - pair[1] + 1, 1 - confidence)):
        if exceeds(found, 20_000, guesses, correct, 1 - confidence):
            found = max(found, bound(20_000, guesses, correct, confidence))
    return found


@pytest.mark.parametrize(
    ("shift", "published"),
    [(1, 1.13346), pytest.param(2, 2.311945, marks=pytest.mark.slow), pytest.param(4, 4.395568, marks=pytest.mark.slow)],
)
def test_the_one_run_bound_is_that_of_jax_privacy(shift, published):
    found = best(
        shift,
        lambda canaries, guesses, correct, confidence: one_run_epsilon(canaries, guesses, correct, DELTA, confidence),
        lambda low, canaries, guesses, correct, level: all(
            one_run_p_value(canaries, guesses, correct, low, delta) < level for delta in (0.0, DELTA)
        ),
    )
    assert found == pytest.approx(published, rel=1e-5)


@pytest.mark.parametrize(("shift", "published"), [(1, 2.164749), (2, 4.7218075), (4, 9.133752)])
def test_the_f_dp_bound_is_that_of_jax_privacy(shift, published):
    found = best(
        shift,
        one_run_mu,
        lambda low, canaries, guesses, correct, level: refutes(gaussian_curve(low), canaries, guesses, correct, level),
    )
    assert epsilon_of_gaussian(found, DELTA) == pytest.approx(published, rel=1e-5)


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


def test_honest_guesses_refute_the_truth_almost_never_and_half_of_it_most_times():
    """At 1 − 1e-8 for each of 20 runs a false alarm has a probability below 1e-6."""
    draw = np.random.default_rng(5)
    found = []
    for _ in range(20):
        present = draw.random(4_000) < 0.5
        order = np.argsort(draw.standard_normal(4_000) + 2.0 * present)
        correct = int((~present[order[:800]]).sum() + present[order[-800:]].sum())
        assert not refutes(gaussian_curve(2.0), 4_000, 1_600, correct, 1e-8)
        found.append(one_run_mu(4_000, 1_600, correct, 0.95))
    assert np.median(found) > 1.0


def test_epsilon_of_a_gaussian_is_that_of_dp_accounting():
    import dp_accounting

    for mu in (0.01, 0.5, 2.0, 20.0):
        exact = dp_accounting.get_epsilon_gaussian(1 / mu, 1e-6)
        assert epsilon_of_gaussian(mu, 1e-6) == pytest.approx(exact, rel=1e-6)
    assert epsilon_of_gaussian(0.0, 1e-6) == 0
