"""Every slip that research/theory.md names is one."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from research.theory.bounds import Setting, corrected_bound, printed_bound
from research.theory.many_seeds import rounded, top_k
from scipy import integrate, stats


def coefficient(eta: Fraction, c0: Fraction, smoothness: Fraction, eps: Fraction, factor: int) -> Fraction:
    """Of Σ E‖∇f‖² once terms I, III and IV are summed, with ρ = ε_s/(2C₀)."""
    return -eta / c0 + factor * eta**2 * smoothness / eps + eta * (eps / (2 * c0)) / (2 * eps)


def test_with_the_factor_three_of_term_iii_the_printed_step_size_proves_nothing():
    c0, smoothness, eps = Fraction(7, 2), Fraction(5, 3), Fraction(1, 10)
    printed = eps / (4 * smoothness * c0)
    assert coefficient(printed, c0, smoothness, eps, factor=3) == 0
    repaired = eps / (12 * smoothness * c0)
    assert coefficient(repaired, c0, smoothness, eps, factor=3) == -repaired / (2 * c0)
    # The printed sum has no factor 3; orthogonality of g, noise and rounding gives that too, and then ε_s/(4LC₀) is enough.
    assert coefficient(printed, c0, smoothness, eps, factor=1) == -printed / (2 * c0)


def test_the_expectation_of_a_product_is_below_the_product_of_expectations():
    """f = θ²/2 from θ₁ = 0 under pure noise: after one step a large |η₁| makes both ∇f(θ₂)² and v̂₁ large."""
    lr, eps, beta_1, beta_2 = 0.1, 1e-3, 0.9, 0.999

    def expectation(function):
        return integrate.quad(lambda z: function(z) * stats.norm.pdf(z), -12, 12, points=[0], limit=200)[0]

    def root(z):
        return math.sqrt((1 - beta_2) * z**2 + eps)

    def squared(z):
        return (lr * (1 - beta_1) * z / root(z)) ** 2

    together = expectation(lambda z: squared(z) / root(z))
    apart = expectation(squared) * expectation(lambda z: 1 / root(z))
    assert together < 0.9 * apart


def test_the_bound_on_the_expected_v_hat_fails_since_its_index_is_random():
    """Without compression, one coordinate, G ≈ 0: the lemma says E[v̂] ≤ 4σ², and a thousand steps of pure noise exceed it.

    The mean over 400 seeds lies more than 20 standard errors above 4, so chance has no part in it.
    """
    beta_2 = 0.1
    noise = np.random.default_rng(0).standard_normal((1000, 400))
    second, largest = np.zeros(400), np.zeros(400)
    for row in noise:
        second = beta_2 * second + (1 - beta_2) * row**2
        largest = np.maximum(largest, second)
    assert (largest.mean() - 4) / (largest.std(ddof=1) / math.sqrt(400)) > 20


def test_the_noise_term_does_not_vanish_because_v_hat_contains_the_noise():
    """First step, one coordinate, gradient g > 0: noise that adds to g is divided by more than noise that cancels it."""
    gradient, beta_2, eps = 1.0, 0.999, 1e-8

    def integrand(z):
        return z / math.sqrt((1 - beta_2) * (gradient + z) ** 2 + eps) * stats.norm.pdf(z)

    value = integrate.quad(integrand, -10, 10, points=[-1], limit=400)[0]
    assert value < -1
    repaired = integrate.quad(lambda z: z / math.sqrt(eps) * stats.norm.pdf(z), -10, 10)[0]
    assert repaired == pytest.approx(0, abs=1e-6)


def test_the_inequality_for_one_plus_two_q_is_false_everywhere_and_two_covers_its_square():
    q = np.linspace(0, 1, 10_001)[1:-1]
    left, right = 1 + 2 * q / (1 - q**2), (1 + q**2) / (1 - q**2)
    assert (left > right).all()
    assert (left**2 <= 2 * right**2 * (1 + 1e-12)).all()
    worst = math.sqrt(2) - 1
    assert 1 + 2 * worst / (1 - worst**2) == pytest.approx(math.sqrt(2) * (1 + worst**2) / (1 - worst**2), rel=1e-14)


@pytest.mark.parametrize("d", [1, 2, 10, 1000])
def test_the_fourth_moment_of_the_noise_is_d_times_d_plus_two(d):
    assert stats.chi2(d).moment(2) == pytest.approx(d * (d + 2), rel=1e-12)
    assert stats.chi2(d).moment(2) ** 0.25 > math.sqrt(d)


SETTING = Setting(2.3, 1.7, 1.0, 0.6, 0.02, 100, 0.9, 0.5, 0.6, 0.2)


@pytest.mark.parametrize("factor", [0.1, 7.0])
def test_a_bound_in_other_units_is_the_same_bound(factor):
    """f → a·f with ε_s → a²·ε_s changes no iterate, so a bound on ‖∇f‖² must grow by a², term by term.

    The printed second-order term does not: a root of ε_s has been lost on the way.
    """
    names = ("initial_gap", "smoothness", "gradient_bound", "gradient_deviation", "noise_deviation")
    scaled = replace(SETTING, eps=factor**2 * SETTING.eps, **{name: factor * getattr(SETTING, name) for name in names})
    for steps in (10, 10**6):
        before, after = corrected_bound(SETTING, steps), corrected_bound(scaled, steps)
        assert after.step_size == pytest.approx(before.step_size)
        for name, value in before.terms.items():
            assert after.terms[name] == pytest.approx(factor**2 * value), name
    before, after = printed_bound(SETTING, 10**6), printed_bound(scaled, 10**6)
    wrong = {name for name, value in before.terms.items() if not math.isclose(after.terms[name], factor**2 * value)}
    assert wrong == {"adaptivity, second order"}


@pytest.mark.parametrize("noise_in_error", [True, False])
def test_the_virtual_iterates_of_the_proof_need_the_noise_in_the_error(noise_in_error):
    """x_{t+1} = x_t − ηA_t(g_t + ζ_t + η_t) + ηD_t·S_t holds with line 5 as the proof reads it, and not as it is printed."""
    rng = np.random.default_rng(0)
    lr, eps, beta_1, beta_2, d = 0.05, 0.2, 0.9, 0.99, 10
    theta, error, first, second, v_hat = (np.zeros((1, d)) for _ in range(5))
    clean_first, error_average, x = np.zeros((1, d)), np.zeros((1, d)), np.zeros((1, d))
    worst = 0.0
    for _ in range(60):
        gradient, noise = rng.standard_normal((1, d)), rng.standard_normal((1, d))
        compressed = top_k(gradient + noise + error, 3)
        exact = error + gradient + (noise if noise_in_error else 0) - compressed
        new_error = rounded(exact, 4, rng.random((1, d)))
        rounding = new_error - exact
        before = 1 / np.sqrt(v_hat + eps)
        second = beta_2 * second + (1 - beta_2) * compressed**2
        v_hat = np.maximum(v_hat, second)
        after = 1 / np.sqrt(v_hat + eps)
        late = beta_1 / (1 - beta_1) * clean_first + error_average
        predicted = x - lr * after * (gradient + rounding + noise) + lr * (before - after) * late
        first = beta_1 * first + (1 - beta_1) * compressed
        theta = theta - lr * after * first
        clean_first = beta_1 * clean_first + (1 - beta_1) * (gradient + rounding + noise)
        error_average = beta_1 * error_average + (1 - beta_1) * new_error
        x = theta - lr * after * (beta_1 / (1 - beta_1) * clean_first + error_average)
        worst = max(worst, float(np.abs(x - predicted).max()))
        error = new_error
    assert worst < 1e-12 if noise_in_error else worst > 1e-3
