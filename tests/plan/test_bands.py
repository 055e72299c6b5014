"""The banded matrix of correlated noise: coefficients, inverse, closed forms, the choice of bands and what ε they have."""

import math
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest
from dp_events import as_dp_event
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples

from dp_microadam import InputError, PrivacyPlan
from dp_microadam.accounting.costs import SubsampledGaussian, epsilon, group_epsilon
from dp_microadam.plan import bands as module
from dp_microadam.plan.bands import (
    band_table,
    banded_square_root,
    inverse_coefficients,
    noise_ratios,
    square_root_coefficients,
)


def toeplitz(coefficients, steps):
    matrix = np.zeros((steps, steps))
    for age, value in enumerate(coefficients[:steps]):
        matrix += np.diag(np.full(steps - age, value), -age)
    return matrix


def test_the_coefficients_are_the_central_binomials_over_powers_of_four():
    exact = [Fraction(math.comb(2 * k, k), 4**k) for k in range(200)]
    assert exact[:5] == [1, Fraction(1, 2), Fraction(3, 8), Fraction(5, 16), Fraction(35, 128)]
    np.testing.assert_allclose(square_root_coefficients(200), [float(value) for value in exact], rtol=1e-13)


@pytest.mark.parametrize("bands", [1, 2, 3, 8, 128, 2000])
def test_no_column_is_longer_than_one(bands):
    """Computed exactly: rounding must not make the sensitivity larger than ε assumes."""
    length = sum(Fraction(value) ** 2 for value in banded_square_root(bands).tolist())
    assert 1 - Fraction(1, 10**13) < length <= 1


@examples(50)
@given(bands=st.integers(1, 12), steps=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_the_inverse_is_the_inverse(bands, steps, seed):
    c = np.random.default_rng(seed).uniform(0.1, 1, bands)
    c = np.sort(c)[::-1]
    product = toeplitz(c, steps) @ toeplitz(inverse_coefficients(c, steps), steps)
    np.testing.assert_allclose(product, np.eye(steps), atol=1e-9)


@examples(50)
@given(bands=st.integers(1, 10), participations=st.integers(1, 5), data=st.data())
def test_participations_a_cycle_apart_move_disjoint_rows_by_at_most_one_each(bands, participations, data):
    """What the theorem rests on: columns of C that are at least ``bands`` steps apart share no row."""
    steps = bands * participations + data.draw(st.integers(0, 5))
    matrix = toeplitz(banded_square_root(bands), steps)
    group = data.draw(st.integers(0, bands - 1))
    columns = matrix[:, group::bands]
    assert (np.count_nonzero(columns, axis=1) <= 1).all()
    assert (np.linalg.norm(columns, axis=0) <= 1).all()
    if bands > 1 and steps > bands:  # one step closer, and they do
        assert np.count_nonzero(matrix[:, [0, bands - 1]], axis=1).max() == 2


@examples(30)
@given(bands=st.integers(1, 20), steps=st.integers(1, 60))
def test_ratios_are_norms_of_the_dense_matrices(bands, steps):
    inverse = np.linalg.inv(toeplitz(banded_square_root(bands), steps))
    sums = np.tri(steps) @ inverse
    found = noise_ratios(bands, steps)
    assert found.single_step == pytest.approx(np.linalg.norm(inverse) / math.sqrt(steps), rel=1e-10)
    assert found.running_sum == pytest.approx(np.linalg.norm(sums) / np.linalg.norm(np.tri(steps)), rel=1e-10)
    assert found.single_step >= 1 - 1e-12


@pytest.mark.parametrize("bands", [2, 16, 64])
def test_what_is_not_computed_of_a_long_run_is_known_in_closed_form(monkeypatch, bands):
    whole = noise_ratios(bands, 20_000)
    monkeypatch.setattr(module, "_COMPUTED", 1)
    noise_ratios.cache_clear()
    cut = noise_ratios(bands, 20_000)
    noise_ratios.cache_clear()
    for name in ("single_step", "running_sum"):
        assert getattr(cut, name) == pytest.approx(getattr(whole, name), rel=1e-12)


@pytest.mark.parametrize(
    ("target", "batch", "ratio", "bands"),
    [
        pytest.param(3, 64, 0.34, 128, marks=pytest.mark.slow),
        pytest.param(3, 128, 0.47, 64, marks=pytest.mark.slow),
        (3, 256, 0.66, 16),
        pytest.param(3, 512, 0.89, 4, marks=pytest.mark.slow),
        (3, 1024, 1.00, 2),
        pytest.param(8, 256, 0.46, 128, marks=pytest.mark.slow),
        pytest.param(8, 1024, 0.85, 8, marks=pytest.mark.slow),
    ],
)
def test_noise_of_the_running_sum_relative_to_independent_noise_is_as_computed_before(target, batch, ratio, bands):
    """For 54,000 examples and 2,000 steps, from a computation that was made before this library had bands."""
    setting = {"dataset_size": 54_000, "batch_size": batch, "steps": 2000, "epsilon": target, "delta": 1e-5}
    table = band_table(**setting, accountant="rdp", most=128)
    best = min(table, key=lambda choice: choice.running_sum)
    assert best.running_sum == pytest.approx(ratio, abs=0.005)
    assert best.bands == bands


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(("target", "bands"), [(20.0, 10), (0.1, 1)])
def test_the_least_noise_is_where_jax_privacy_documents_it(accountant, target, bands):
    """N = 1000, B = 100, 100 steps, δ = 1e-6: at ε = 20 with all 10 bands, at ε = 0.1 with one."""
    setting = {"dataset_size": 1000, "batch_size": 100, "delta": 1e-6, "steps": 100, "accountant": accountant}
    assert min(band_table(**setting, epsilon=target), key=lambda choice: choice.running_sum).bands == bands


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(("bands", "steps"), [(1, 100), (8, 100), (8, 104), (32, 1000)])
def test_epsilon_is_that_of_dp_accounting_s_composition_of_the_steps_of_one_group(accountant, bands, steps):
    plan = PrivacyPlan(54_000, 256, 1.1, steps, 1e-5, accountant, bands)
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(bands * 256 / 54_000, dp_accounting.GaussianDpEvent(1.1)), math.ceil(steps / bands)
    )
    kind = {"rdp": dp_accounting.rdp.RdpAccountant, "pld": dp_accounting.pld.PLDAccountant}[accountant]
    reference = kind().compose(event).get_epsilon(1e-5)
    assert plan.epsilon == pytest.approx(reference, rel=2e-3 if accountant == "pld" else 3e-2)
    assert as_dp_event([plan.spent_after(steps)]) == dp_accounting.ComposedDpEvent([event])


def test_groups_of_examples_get_the_general_bound_when_noise_is_correlated():
    """k·ε at δ·Σ exp(i·ε), checked by hand; it is above what members of one cyclic group get, which is exact."""
    correlated = SubsampledGaussian(0.1, 2.0, 20, bands=8)
    independent = SubsampledGaussian(0.1, 2.0, 20)
    for size in (2, 3, 5):
        found = group_epsilon([correlated], 1e-5, size)
        share = 1e-5 / sum(math.exp(i * found / size) for i in range(size))
        assert found / size >= epsilon([correlated], share, "rdp") * (1 - 1e-9)
        assert found / size <= epsilon([correlated], share, "rdp") * 1.01
        assert found > group_epsilon([independent], 1e-5, size)
        assert found == group_epsilon([correlated, SubsampledGaussian(0.1, 2.0, 0)], 1e-5, size)
    assert group_epsilon([correlated], 1e-5, 1) == group_epsilon([independent], 1e-5, 1)
    # The epsilon of one group of a run that has both kinds covers both.
    assert group_epsilon([correlated, independent], 1e-5, 2) > group_epsilon([correlated], 1e-5, 2)


def test_groups_too_large_for_the_general_bound_are_refused_by_name():
    with pytest.raises(InputError, match="group_size is 1000; "):
        group_epsilon([SubsampledGaussian(0.1, 0.5, 20, bands=8)], 1e-5, 1000)
