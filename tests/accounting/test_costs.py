"""The accountants against quadrature, closed forms and independent implementations."""

import math
from functools import partial

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_events import as_dp_event
from hypothesis import given
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant as OpacusAccountant
from opacus.accountants.analysis.rdp import compute_rdp
from thoroughness import examples

from dp_microadam.accounting import costs as accounting
from dp_microadam.accounting import privacy_loss
from dp_microadam.accounting.costs import (
    ORDERS,
    SubsampledGaussian,
    epsilon,
    first_non_negative,
    group_epsilon,
    least_noise_multiplier,
)
from dp_microadam.accounting.meaning import replace_one_epsilon
from dp_microadam.accounting.one_step import ADDED, REMOVED, REPLACED, loss_of_one_step, rdp_of_one_step
from dp_microadam.accounting.trade_off import trade_off
from dp_microadam.errors import InputError

PAPER = SubsampledGaussian(4096 / 45_000, 3.0, 2480)
IMAGENET = SubsampledGaussian(16_384 / 1_271_167, 2.5, 71_587)
SMALL_NOISE = SubsampledGaussian(0.01, 0.8, 4500)


def divergence_by_quadrature(sample_rate: float, noise_multiplier: float, order: float) -> mpmath.mpf:
    """E[(1 + q(w − 1))^α] by the trapezoid rule in 40 digits, which converges geometrically for this integrand."""
    with mpmath.workdps(40):
        q, sigma, alpha = mpmath.mpf(sample_rate), mpmath.mpf(noise_multiplier), mpmath.mpf(order)
        spacing = sigma * min(mpmath.mpf("0.25"), sigma / 4)
        first, last = -14 * sigma, alpha + 14 * sigma
        total = mpmath.mpf(0)
        for k in range(int((last - first) / spacing) + 1):
            z = first + k * spacing
            ratio = 1 + q * mpmath.expm1((2 * z - 1) / (2 * sigma**2))
            total += mpmath.npdf(z, 0, sigma) * (ratio**alpha - 1)
        return mpmath.log1p(total * spacing) / (alpha - 1)


@pytest.mark.parametrize("noise_multiplier", [0.4, 1.0, 3.0, 40.0])
@pytest.mark.parametrize("sample_rate", [1e-6, 0.01, 4096 / 45_000, 0.499, 0.5, 0.95])
def test_rdp_agrees_with_quadrature_to_nine_digits(sample_rate, noise_multiplier):
    orders = (1.1, 1.5, 2.0, 3.7, 10.9, 32.0)
    ours = rdp_of_one_step(sample_rate, noise_multiplier, orders)
    for order, value in zip(orders, ours, strict=True):
        expected = divergence_by_quadrature(sample_rate, noise_multiplier, order)
        assert float(abs(value / expected - 1)) < 1e-9, order


@pytest.mark.parametrize("part", [PAPER, IMAGENET, SMALL_NOISE], ids=["paper", "imagenet", "small noise"])
def test_rdp_agrees_with_opacus(part):
    orders = ORDERS[:-1]  # Opacus overflows at 1024
    theirs = compute_rdp(q=part.sample_rate, noise_multiplier=part.noise_multiplier, steps=1, orders=list(orders))
    np.testing.assert_allclose(rdp_of_one_step(part.sample_rate, part.noise_multiplier)[:-1], theirs, rtol=1e-7)

    opacus = OpacusAccountant()
    opacus.history = [(part.noise_multiplier, part.sample_rate, part.steps)]
    assert epsilon([part], 1e-5, "rdp") == pytest.approx(opacus.get_epsilon(1e-5), rel=1e-7)


def test_without_subsampling_rdp_is_that_of_the_gaussian():
    np.testing.assert_allclose(rdp_of_one_step(1.0, 2.5), np.array(ORDERS) / (2 * 2.5**2), rtol=1e-15)
    np.testing.assert_allclose(rdp_of_one_step(1 - 1e-9, 2.5), rdp_of_one_step(1.0, 2.5), rtol=1e-6)


def test_orders_are_the_papers_and_go_on_to_1024():
    paper = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    np.testing.assert_allclose(ORDERS[: len(paper)], paper, rtol=1e-15)
    assert max(ORDERS) == 1024
    assert list(ORDERS) == sorted(set(ORDERS))


@pytest.mark.parametrize("sample_rate", [1e-9, 1e-3, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("noise_multiplier", [0.02, 0.3, 10.0, 1e3, 1e5])
def test_rdp_is_finite_positive_and_grows_with_the_order(sample_rate, noise_multiplier):
    divergences = rdp_of_one_step(sample_rate, noise_multiplier)
    assert np.isfinite(divergences).all()
    assert (divergences > 0).all()
    assert (np.diff(divergences) >= -1e-9 * divergences[1:]).all()


@examples(40)
@given(
    sample_rate=st.floats(1e-5, 1.0),
    noise_multiplier=st.floats(0.3, 50),
    steps=st.integers(1, 10_000),
    delta=st.floats(1e-9, 0.1),
)
def test_more_steps_less_noise_more_sampling_never_spend_less(sample_rate, noise_multiplier, steps, delta):
    spent = epsilon([SubsampledGaussian(sample_rate, noise_multiplier, steps)], delta, "rdp")
    slack = 1 - 1e-9
    assert epsilon([SubsampledGaussian(sample_rate, noise_multiplier, steps + 1)], delta, "rdp") >= spent * slack
    assert epsilon([SubsampledGaussian(sample_rate, noise_multiplier * 0.9, steps)], delta, "rdp") >= spent * slack
    assert epsilon([SubsampledGaussian(min(1.0, sample_rate * 1.1), noise_multiplier, steps)], delta, "rdp") >= spent * slack
    assert epsilon([SubsampledGaussian(sample_rate, noise_multiplier, steps)], delta / 2, "rdp") >= spent * slack


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(("rate", "steps", "limit"), [(64 / 54_000, 1000, 3.0), (0.02, 2000, 1.0), (1.0, 1, 8.0)])
def test_a_rough_noise_multiplier_keeps_the_limit_and_is_at_most_a_percent_above_the_least(accountant, rate, steps, limit):
    least = least_noise_multiplier(rate, steps, limit, 1e-5, accountant)
    rough = least_noise_multiplier(rate, steps, limit, 1e-5, accountant, exact=False)
    assert least <= rough <= 1.01 * least
    assert epsilon([SubsampledGaussian(rate, rough, steps)], 1e-5, accountant) <= limit


def epsilon_where(delta_of, delta: float) -> float:
    """The ε at which δ(ε), given in 60 digits and falling, meets ``delta``."""
    with mpmath.workdps(60):
        low, high = mpmath.mpf(0), mpmath.mpf(1)
        if delta_of(low) <= delta:
            return 0.0
        while delta_of(high) > delta:
            high *= 2
        for _ in range(70):
            middle = (low + high) / 2
            low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
        return float(high)


def epsilon_of_gaussian(noise: float, delta: float) -> float:
    """Balle and Wang 2018, theorem 8."""
    mu = 1 / mpmath.mpf(noise)
    return epsilon_where(lambda e: mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu), delta)


def epsilon_of_one_step(rate: float, noise: float, delta: float, removed: bool) -> float:
    """From probabilities of half-lines: the likelihood ratio grows with the noise."""
    q, s = mpmath.mpf(rate), mpmath.mpf(noise)

    def delta_of(e: mpmath.mpf) -> mpmath.mpf:
        ratio = mpmath.exp(e if removed else -e)
        if ratio <= 1 - q:
            return mpmath.mpf(0)
        x = s**2 * mpmath.log((ratio - 1 + q) / q) + mpmath.mpf(1) / 2
        sign = -1 if removed else 1
        alone, mixture = mpmath.ncdf(sign * x / s), q * mpmath.ncdf(sign * (x - 1) / s)
        mixture += (1 - q) * alone
        return mixture - mpmath.exp(e) * alone if removed else alone - mpmath.exp(e) * mixture

    return epsilon_where(delta_of, delta)


GROUPS, REPLACING = partial(group_epsilon, delta=1e-5, group_size=2), partial(replace_one_epsilon, delta=1e-5)

# ε by the inverse Laplace transform of the exact moment generating function.
EXACT = [
    (SubsampledGaussian(1e-5, 0.3, 100_000), 1e-9, 15.5747855),
    (SubsampledGaussian(1e-4, 0.6, 100_000), 1e-7, 1.42923569),
]


@pytest.mark.parametrize(("part", "delta", "exact"), EXACT)
def test_pld_errs_upwards_with_subsampling(part, delta, exact):
    assert exact * (1 - 1e-8) <= epsilon([part], delta, "pld") <= exact * 1.0001


@pytest.mark.parametrize(
    ("noise", "steps", "delta"),
    [
        (50, 100_000, 1e-12),
        (50, 100_000, 1e-15),
        (1000, 10_000_000, 1e-12),
        (0.3, 1, 1e-15),
        (0.3, 1000, 1e-9),
        (100, 1, 1e-15),
        (100, 1, 1e-3),
        (3, 7, 1e-100),
    ],
)
def test_pld_errs_upwards_without_subsampling(noise, steps, delta):
    exact = epsilon_of_gaussian(noise / math.sqrt(steps), delta)
    assert exact <= epsilon([SubsampledGaussian(1.0, noise, steps)], delta, "pld") <= exact * 1.0001


@pytest.mark.parametrize("delta", [1e-3, 1e-9, 1e-15])
@pytest.mark.parametrize(("rate", "noise"), [(1e-6, 0.3), (1e-4, 1.0), (0.1, 3.0), (0.9, 0.5), (0.999999, 2.0), (0.01, 100.0)])
def test_pld_errs_upwards_in_both_directions(rate, noise, delta):
    for change in (REMOVED, ADDED):
        exact = epsilon_of_one_step(rate, noise, delta, change == REMOVED)
        law = loss_of_one_step(rate, noise, privacy_loss.reach_for(delta, 1), change)
        ours = privacy_loss.epsilon_of_composition([(law, 1)], delta)
        # So far out in the tail of one step with (1e-4, 1.0) its loss falls so slowly that bounds of rounding are felt.
        assert exact <= ours <= exact * (1.02 if (rate, delta) == (1e-4, 1e-15) else 1.0005), change


def test_pld_errs_upwards_for_several_runs_and_for_groups():
    parts = [SubsampledGaussian(1.0, 40.0, 30_000), SubsampledGaussian(1.0, 90.0, 70_000), SubsampledGaussian(1.0, 5.0, 3)]
    noise = 1 / math.sqrt(sum(part.steps / part.noise_multiplier**2 for part in parts))
    exact = epsilon_of_gaussian(noise, 1e-13)
    assert exact <= epsilon(parts, 1e-13, "pld") <= exact * 1.0001
    for size in (2, 5):
        exact = epsilon_of_gaussian(noise / size, 1e-13)
        assert exact <= group_epsilon(parts, 1e-13, size) <= exact * 1.0001


def test_a_run_in_two_parts_spends_what_it_spends_in_one():
    part, begin, rest = (SubsampledGaussian(1e-5, 0.3, steps) for steps in (100_000, 33_000, 67_000))
    assert epsilon([begin, rest], 1e-12, "pld") == pytest.approx(epsilon([part], 1e-12, "pld"), rel=1e-8)


@pytest.mark.parametrize("change", [REMOVED, ADDED, REPLACED])
@pytest.mark.parametrize(("rate", "noise"), [(1e-6, 0.3), (0.1, 3.0), (1.0, 50.0), (0.999999, 2.0), (1e-9, 1e4)])
def test_a_discretised_step_keeps_probability_under_both_datasets(rate, noise, change):
    law = loss_of_one_step(rate, noise, 12.0, change)
    for exponents in (law.log_masses, law.log_masses - law.losses):
        assert abs(math.fsum(np.exp(exponents)) - 1) < 1e-13


def test_one_transform_serves_many_numbers_of_steps():
    """ε after every step of a run is asked for by callbacks: a composition begins with a transform, which is kept."""
    before = privacy_loss._transform.cache_info().misses
    spent = [epsilon([SubsampledGaussian(0.05, 2.0, steps)], 1e-5, "pld") for steps in range(400, 500)]
    assert privacy_loss._transform.cache_info().misses - before <= 8  # of 200, two directions of each
    assert (np.diff(spent) > -1e-5 * np.array(spent[1:])).all()
    again = accounting._pld_group_epsilon.cache_info().misses
    assert [epsilon([SubsampledGaussian(0.05, 2.0, steps)], 1e-5, "pld") for steps in range(400, 500)] == spent
    assert accounting._pld_group_epsilon.cache_info().misses == again


def test_different_mechanisms_compose_as_dp_accounting_composes_them():
    parts = [SubsampledGaussian(0.05, 2.0, 300), SubsampledGaussian(0.01, 1.0, 500), SubsampledGaussian(1.0, 20.0, 3)]
    independent = PLDAccountant(value_discretization_interval=1e-4)
    independent.compose(as_dp_event(parts))
    assert epsilon(parts, 1e-6, "pld") == pytest.approx(independent.get_epsilon(1e-6), rel=5e-4)
    opacus = OpacusAccountant()
    opacus.history = [(part.noise_multiplier, part.sample_rate, part.steps) for part in parts]
    assert epsilon(parts, 1e-5) <= opacus.get_epsilon(1e-5) * (1 + 1e-7)


def test_nothing_spent_is_epsilon_zero():
    assert epsilon([], 1e-5) == 0
    assert epsilon([SubsampledGaussian(0.1, 1.0, 0)], 1e-5, "pld") == 0


def test_a_group_without_subsampling_is_a_larger_sensitivity():
    alone = SubsampledGaussian(1.0, 30.0, 100)
    for size in (2, 5):
        exact = dp_accounting.get_epsilon_gaussian(30.0 / size / math.sqrt(100), 1e-6)
        assert exact * (1 - 1e-6) <= group_epsilon([alone], 1e-6, size) <= exact * 1.002


@examples(200)
@given(
    root=st.integers(1, 500),
    guess=st.integers(1, 600),
    stride=st.integers(1, 50),
    power=st.sampled_from([0.2, 1.0, 5.0]),
)
def test_the_search_finds_the_first_number_whatever_the_guess(root, guess, stride, power):
    assert first_non_negative(lambda n: n**power - root**power, guess, stride) == root


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_what_cannot_be_computed_is_never_called_private(accountant):
    # At such noise the series leaves the range of floating point; nothing but infinity, or a huge number, is right.
    for noise in (1e-3, 1e-6, 1e-100, 1e-152, 1e-158, 1e-300):
        assert epsilon([SubsampledGaussian(0.1, noise, 10)], 1e-5, accountant) > 1e5


def test_a_function_that_begins_at_minus_infinity_is_solved():
    for first in (1, 2, 9, 500, 10_000):
        found = first_non_negative(lambda n, first=first: 1.0 if n >= first else -math.inf, 10_000, 10_000)
        assert found == first
    with pytest.raises(LookupError):
        first_non_negative(lambda n: -1.0, 5, 1, largest=1000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((1.5, 1.0, 1), "sample_rate is 1.5"), ((0.1, -1.0, 1), "noise_multiplier is -1"), ((0.1, 1.0, -1), "steps is -1")],
)
def test_impossible_mechanisms_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        SubsampledGaussian(*arguments)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (SubsampledGaussian(0.1, 0.01, 1), "noise_multiplier is 0.01; .* it must be at least 0.05"),
        (SubsampledGaussian(0.1, 100.0, 10**8), "steps is 100000000; .* it must be at most"),
    ],
)
@pytest.mark.parametrize("compute", [GROUPS, trade_off, REPLACING])
def test_what_pld_cannot_compose_is_refused(compute, part, message):
    with pytest.raises(InputError, match=message):
        compute([part])
    assert part.steps > 1 or epsilon([part], 1e-5, "pld") == epsilon([part], 1e-5, "rdp") > 1000


def test_delta_that_double_precision_cannot_hold_is_refused():
    with pytest.raises(InputError, match=r"delta is 1e-300; for pld it must be at least .*e-290 after 2480 steps"):
        epsilon([PAPER], 1e-300, "pld")
    for delta in (0.0, 1.0, -1e-5, math.nan):
        with pytest.raises(InputError, match="delta is"):
            epsilon([PAPER], delta)
