"""Truncated Poisson sampling: its ε against published values, dp-accounting, and the mechanism itself enumerated."""

import math
from itertools import combinations

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_events import as_dp_event
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr
from thoroughness import examples

from dp_microadam.accounting import costs as accounting
from dp_microadam.accounting.costs import (
    SubsampledGaussian,
    epsilon,
    group_epsilon,
)
from dp_microadam.accounting.one_step import ADDED, REMOVED, Cap, PrivacyLoss, loss_of_one_step, rdp_of_capped_step
from dp_microadam.errors import InputError

ISSUE = {"sample_rate": 1024 / 45_000, "noise_multiplier": 1.7084, "steps": 2000}


def by_dp_accounting(parts: list[SubsampledGaussian], delta: float, grid: float) -> float:
    accountant = PLDAccountant(value_discretization_interval=grid)
    accountant.compose(as_dp_event(parts))
    return accountant.get_epsilon(delta)


def test_the_value_of_dp_accountings_own_test_is_met():
    """``test_truncated_subsampled_gaussian_basic`` of dp-accounting's pld_privacy_accountant_test.py: 17.904330 at δ = 1e-6."""
    parts = [SubsampledGaussian(0.5, 1.0, 3, cap=Cap(2, 4)), SubsampledGaussian(0.5, 1.0, 2, cap=Cap(2, 3))]
    assert 17.904330 * (1 - 1e-5) <= epsilon(parts, 1e-6, "pld") <= 17.904330 * (1 + 2e-5)


@pytest.mark.parametrize(("cap", "published"), [(None, 2.7543), (Cap(1120, 45_000), 2.8034)])
def test_the_published_price_of_a_cap_of_1120_is_met(cap, published):
    """Published on a grid of 1e-3, which reads up to a thousandth high."""
    part = SubsampledGaussian(**ISSUE, cap=cap)
    assert by_dp_accounting([part], 1e-5, 1e-3) == pytest.approx(published, abs=5e-5)
    assert published * (1 - 5e-4) <= epsilon([part], 1e-5, "pld") <= published


RANGE = {
    "population": st.integers(4, 5_000),
    "rate": st.floats(0.01, 0.9),
    "deviations": st.floats(0.0, 5.0),
    "noise": st.floats(0.6, 8.0),
    "steps": st.integers(1, 100),
}


def capped(population: int, rate: float, deviations: float, noise: float, steps: int) -> SubsampledGaussian:
    """A cap so many standard deviations above the expected batch."""
    expected = population * rate
    units = max(1, math.ceil(expected + deviations * math.sqrt(expected * (1 - rate))))
    return SubsampledGaussian(rate, noise, steps, cap=Cap(units, population))


@pytest.mark.slow
@examples(25, quick=25)
@given(**RANGE, delta=st.sampled_from([1e-3, 1e-5, 1e-7]))
def test_pld_agrees_with_dp_accounting(population, rate, deviations, noise, steps, delta):
    part = capped(population, rate, deviations, noise, steps)
    theirs = by_dp_accounting([part], delta, 1e-3)
    ours = accounting._pld_group_epsilon((part,), delta, 1)
    assert theirs * 0.99 - 2e-3 <= ours <= theirs * 1.0005 + 1e-3


@examples(60, quick=4)
@given(**RANGE, delta=st.sampled_from([1e-3, 1e-5, 1e-7]))
def test_pld_is_never_above_rdp_and_a_cap_that_nobody_can_reach_costs_nothing(
    population, rate, deviations, noise, steps, delta
):
    part = capped(population, rate, deviations, noise, steps)
    assert 0 < epsilon([part], delta, "pld") <= epsilon([part], delta, "rdp")
    free, out_of_reach = (SubsampledGaussian(rate, noise, steps, cap=cap) for cap in (None, Cap(population, population)))
    for accountant in ("rdp", "pld"):
        assert epsilon([out_of_reach], delta, accountant) == epsilon([free], delta, accountant)


def exact_delta(values: list[float], rate: float, cap: int, sigma: float, bound: float, *, removed: bool) -> float:
    """δ at ε = ``bound`` of one step on numbers, with the first number against without it, by enumerating all samples."""
    axis = np.linspace(-60 * sigma, 60 * sigma, 200_001)

    def density(units: list[float]) -> np.ndarray:
        weights: dict[float, float] = {}
        for size in range(len(units) + 1):
            for drawn in combinations(units, size):
                probability = rate**size * (1 - rate) ** (len(units) - size)
                kept = list(combinations(drawn, min(size, cap)))
                for part in kept:
                    total = round(sum(part), 12)
                    weights[total] = weights.get(total, 0.0) + probability / len(kept)
        return sum((w * np.exp(-0.5 * ((axis - m) / sigma) ** 2) for m, w in weights.items()), np.zeros_like(axis)) / (
            sigma * math.sqrt(2 * math.pi)
        )

    first, second = density(values), density(values[1:])
    if not removed:
        first, second = second, first
    return float(np.sum(np.maximum(0.0, first - math.exp(bound) * second)) * (axis[1] - axis[0]))


@pytest.mark.parametrize("change", [REMOVED, ADDED])
@examples(60, quick=4)
@given(
    others=st.lists(st.sampled_from([-1.0, -0.5, 0.0, 1.0]), min_size=1, max_size=5),
    first=st.sampled_from([1.0, 0.3]),
    rate=st.floats(0.1, 1.0),
    share=st.floats(0.0, 1.0),
    sigma=st.floats(0.4, 2.0),
    bound=st.floats(0.0, 4.0),
)
def test_epsilon_is_never_understated_for_the_mechanism_itself(change, others, first, rate, share, sigma, bound):
    """One step enumerated: every sample, and everyone who may be dropped from it. Both pairs of the theorem bound its δ."""
    population = 1 + len(others)
    cap = Cap(max(1, round(share * population)), population)
    exact = exact_delta([first, *others], rate, cap.units, sigma, bound, removed=change == REMOVED)
    for law in (loss_of_one_step(rate, sigma, 12.0, change, cap), tighter_law(rate, sigma, cap, change)):
        assert delta_of(law, bound) >= exact - 1e-9
    divergence = rdp_of_capped_step(rate, sigma, cap)
    alphas = np.array(accounting.ORDERS)
    with np.errstate(over="ignore"):
        converted = np.exp((alphas - 1) * (divergence - bound) + (alphas - 1) * np.log1p(-1 / alphas) - np.log(alphas))
    assert converted.min() >= exact - 1e-9


def tighter_law(rate: float, sigma: float, cap: Cap, change: str) -> PrivacyLoss:
    """The pair of the theorem that RDP uses, as a privacy loss distribution."""
    full, kept = cap.reached(rate), cap.kept(rate)
    parts = [(loss_of_one_step(rate, sigma, 12.0, change), 1 - full)]
    if full:
        parts.append((loss_of_one_step(kept, sigma / 2, 12.0, change), full))
    with np.errstate(divide="ignore"):
        return PrivacyLoss(
            np.concatenate([law.losses for law, _ in parts]),
            np.concatenate([law.log_masses + np.log(share) for law, share in parts]),
            parts[0][0].log_infinite,
        )


def delta_of(law: PrivacyLoss, bound: float) -> float:
    return math.exp(law.log_infinite) + float(np.sum(np.exp(law.log_masses) * -np.expm1(np.minimum(0, bound - law.losses))))


def test_the_bound_is_nearly_attained_when_the_cap_is_always_reached():
    """Everyone is drawn, one of two is kept, and they are opposite: the sum is moved by 2 with probability one half."""
    cap = Cap(1, 2)
    assert (cap.reached(1.0), cap.kept(1.0)) == (1.0, pytest.approx(0.5))
    exact = exact_delta([1.0, -1.0], 1.0, 1, 1.0, 1.0, removed=True)
    assert delta_of(tighter_law(1.0, 1.0, cap, REMOVED), 1.0) == pytest.approx(exact, abs=1e-5)


@examples(100)
@given(population=st.integers(2, 60), share=st.floats(0, 1), rate=st.floats(0.001, 1.0), group=st.integers(1, 6))
def test_probabilities_of_the_cap_are_those_of_the_binomial_distribution_rounded_up(population, share, rate, group):
    units = max(1, round(share * population))
    cap = Cap(units, population)
    with mpmath.workdps(40):
        q = mpmath.mpf(rate)

        def pmf(trials, count):
            return mpmath.binomial(trials, count) * q**count * (1 - q) ** (trials - count)

        if group < population:
            others = population - group
            exact = mpmath.fsum(pmf(others, k) for k in range(max(0, units - group + 1), others + 1))
            assert exact <= cap.reached(rate, group) <= exact * (1 + mpmath.mpf("3e-9")) + mpmath.mpf("1e-300")
        exact = mpmath.fsum(pmf(population - 1, k) for k in range(units, population))
        if exact > 1e-290:
            kept = mpmath.fsum(pmf(population - 1, k) * q * units / (k + 1) for k in range(units, population)) / exact
            assert kept * (1 - mpmath.mpf("1e-15")) <= cap.kept(rate) <= kept * (1 + mpmath.mpf("3e-9"))


def test_probabilities_of_large_populations_are_rounded_up_too():
    with mpmath.workdps(40):
        for population, rate, units in ((1_271_167, 16_384 / 1_271_167, 17_000), (45_000, 1024 / 45_000, 1120)):
            others, odds = population - 1, mpmath.mpf(rate) / (1 - mpmath.mpf(rate))
            term = mpmath.binomial(others, units) * odds**units * (1 - mpmath.mpf(rate)) ** others
            exact, count = mpmath.mpf(0), units
            while term > exact * 1e-30:
                exact += term
                term *= (others - count) * odds / (count + 1)
                count += 1
            assert exact <= Cap(units, population).reached(rate) <= exact * (1 + mpmath.mpf("3e-9"))


def exact_group_delta(size: int, others: int, rate: float, cap: int, sigma: float, bound: float) -> float:
    """δ of adding ``size`` units of value 1 to others of value −1: by the number of each that are drawn and kept."""

    def weights(units: int) -> dict[int, float]:
        found: dict[int, float] = {}
        for drawn in range(units + 1):
            for rest in range(others + 1):
                probability = math.comb(units, drawn) * math.comb(others, rest)
                probability *= rate ** (drawn + rest) * (1 - rate) ** (units + others - drawn - rest)
                keep = min(cap, drawn + rest)
                for kept in range(max(0, keep - rest), min(drawn, keep) + 1):
                    ways = math.comb(drawn, kept) * math.comb(rest, keep - kept) / math.comb(drawn + rest, keep)
                    found[kept - (keep - kept)] = found.get(2 * kept - keep, 0.0) + probability * ways
        return found

    axis = np.linspace(-60 * sigma, 60 * sigma, 100_001)
    first, second = (
        sum((w * np.exp(-0.5 * ((axis - m) / sigma) ** 2) for m, w in weights(units).items()), np.zeros_like(axis))
        / (sigma * math.sqrt(2 * math.pi))
        for units in (size, 0)
    )
    step = axis[1] - axis[0]
    return max(float(np.sum(np.maximum(0.0, a - math.exp(bound) * b)) * step) for a, b in ((first, second), (second, first)))


@examples(40, quick=8)
@given(
    size=st.integers(1, 4),
    others=st.integers(1, 6),
    cap=st.integers(1, 8),
    rate=st.floats(0.1, 1.0),
    sigma=st.floats(0.5, 2.0),
    bound=st.floats(0.0, 4.0),
)
def test_groups_are_never_understated(size, others, cap, rate, sigma, bound):
    exact = exact_group_delta(size, others, rate, cap, sigma, bound)
    laws = [loss_of_one_step(rate, sigma, 12.0, change, Cap(cap, size + others), size) for change in (REMOVED, ADDED)]
    assert max(delta_of(law, bound) for law in laws) >= exact - 1e-9


def test_larger_groups_spend_more_and_one_is_a_group_of_one():
    part = SubsampledGaussian(0.05, 3.0, 100, cap=Cap(70, 1000))
    assert group_epsilon([part], 1e-6, 1) == epsilon([part], 1e-6, "pld")
    found = [group_epsilon([part], 1e-6, size) for size in (1, 2, 3, 5)]
    assert found == sorted(found)
    free = [group_epsilon([SubsampledGaussian(0.05, 3.0, 100)], 1e-6, size) for size in (1, 2, 3, 5)]
    assert all(a > b for a, b in zip(found, free, strict=True))
    both = SubsampledGaussian(0.05, 3.0, 100, bands=4, cap=Cap(70, 1000))
    assert group_epsilon([both], 1e-6, 2) > group_epsilon([SubsampledGaussian(0.05, 3.0, 100, bands=4)], 1e-6, 2)


def test_too_little_noise_for_pld_is_answered_by_rdp_and_refused_for_groups():
    part = SubsampledGaussian(0.05, 0.08, 3, cap=Cap(70, 1000))
    assert epsilon([part], 1e-6, "pld") == epsilon([part], 1e-6, "rdp")
    with pytest.raises(InputError, match=r"noise_multiplier is 0.08; for groups it must be at least 0.1 with max_batch_size"):
        group_epsilon([part], 1e-6, 2)
    assert math.isinf(epsilon([SubsampledGaussian(0.5, 1e-3, 3, cap=Cap(5, 10))], 1e-6))


def test_the_threshold_argument_holds():
    """PLD's pair is the looser one: the second distribution exceeds any threshold less often than the unmoved Gaussian."""
    x = np.linspace(-8, 8, 1001)
    for rate in (0.01, 0.5, 1.0):
        assert ((1 - rate) * ndtr(-x) + rate * ndtr(-x - 2) <= ndtr(-x)).all()
    part = SubsampledGaussian(**ISSUE, cap=Cap(1040, 45_000))
    assert epsilon([part], 1e-5, "pld") == epsilon([part], 1e-5, "rdp") < accounting._pld_group_epsilon((part,), 1e-5, 1)
