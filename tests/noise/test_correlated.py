"""Correlated noise, one step at a time. False-alarm rates of the statistical tests are below 1e-6."""

import copy
import io
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from thoroughness import examples

from dp_microadam import GaussianMechanism, PrivacyError, PrivacyPlan
from dp_microadam.noise.correlated import CorrelatedNoise
from dp_microadam.noise.randomness import Randomness
from dp_microadam.plan.bands import banded_square_root

ALARM = 1e-7


def correlated_reference(coefficients, white):
    """C⁻¹z for all steps at once, ``white`` with one row per step."""
    steps = len(white)
    matrix = sum(np.diag(np.full(steps - age, c), -age) for age, c in enumerate(coefficients[:steps]))
    return np.linalg.solve(matrix, white)


def mixed(coefficients, noise):
    """C·noise, a row per step."""
    found = np.zeros_like(noise)
    for age, coefficient in enumerate(coefficients[: len(noise)]):
        found[age:] += coefficient * noise[: len(noise) - age]
    return found


def run(chain, white, first=0):
    """The chain's noise for the rows of ``white``, given as a vector and a matrix of two tensors."""
    found = []
    for step, row in enumerate(white, start=first):
        tensors = {"a": row[:3].clone(), "b": row[3:].clone().view(-1, 1)}
        chain.correlate_(tensors, step=step)
        found.append(torch.cat([tensors["a"], tensors["b"].view(-1)]))
    return torch.stack(found)


@examples(40)
@given(
    bands=st.integers(1, 20),
    steps=st.integers(1, 60),
    size=st.integers(3, 8),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**32 - 1),
)
def test_one_step_at_a_time_is_the_inverse_of_the_dense_matrix_and_c_times_it_is_white(bands, steps, size, dtype, seed):
    white = torch.from_numpy(np.random.default_rng(seed).standard_normal((steps, size))).to(dtype)
    coefficients = banded_square_root(bands)
    noise = run(CorrelatedNoise(coefficients), white).double().numpy()
    close = 1e-6 if dtype == torch.float32 else 1e-13
    np.testing.assert_allclose(mixed(coefficients, noise), white.double().numpy(), rtol=close, atol=5 * close)
    np.testing.assert_allclose(noise, correlated_reference(coefficients, white.double().numpy()), rtol=close, atol=20 * close)


@pytest.mark.parametrize("how", ["forget", "a step is left out", "another size", "another name", "another dtype"])
def test_the_chain_begins_anew_so_that_no_two_participations_come_closer(how):
    """After an interruption the noise is that of a new chain, and C is block diagonal."""
    white = torch.randn(12, 7, dtype=torch.float64)
    chain = CorrelatedNoise(banded_square_root(4))
    run(chain, white[:6])
    if how == "forget":
        chain.forget()
        assert chain.memory == 0
    elif how == "another size":
        chain.correlate_({"a": torch.randn(3).double(), "b": torch.randn(1, 1).double()}, step=6)
    elif how == "another name":
        chain.correlate_({"a": torch.randn(3).double(), "c": torch.randn(4, 1).double()}, step=6)
    elif how == "another dtype":
        chain.correlate_({"a": torch.randn(3), "b": torch.randn(4, 1)}, step=6)
    noise = run(chain, white[6:], first=7 if how != "forget" else 6)
    np.testing.assert_allclose(noise.numpy(), correlated_reference(banded_square_root(4), white[6:].numpy()), atol=1e-12)


def test_the_chain_is_neither_saved_nor_copied_nor_shown():
    chain = CorrelatedNoise(banded_square_root(3))
    chain.correlate_({"a": torch.full((2,), 0.123456)}, step=0)
    mechanism = GaussianMechanism(PrivacyPlan(100, 10, 1.0, 10, 1e-5, bands=3), 1.0)
    mechanism.privatize({"a": torch.zeros(2)}, step=0)
    for holder in (chain, mechanism):
        for attempt in (pickle.dumps, copy.deepcopy, lambda value: torch.save(value, io.BytesIO())):
            with pytest.raises(PrivacyError, match="cannot be saved or copied"):
                attempt(holder)
    with pytest.raises(PrivacyError, match="cannot be saved or copied"):
        copy.copy(chain)
    assert repr(chain) == "CorrelatedNoise(bands=3)"
    assert "tensor" not in repr(mechanism)


PLAN = PrivacyPlan(1000, 20, 1.3, 40, 1e-5, bands=8)
ONE_BAND = replace(PLAN, bands=1)
ZEROS = {"weight": torch.zeros(40, 50), "bias": torch.zeros(9)}


def noise_of(plan, zeros=ZEROS, **options):
    mechanism = GaussianMechanism(plan, 0.5, **options)
    rows = []
    for step in range(plan.steps):
        means = mechanism.privatize(zeros, step=step)
        rows.append(torch.cat([mean.double().flatten() for mean in means.values()]).numpy())
    return np.stack(rows), mechanism


@pytest.mark.parametrize("secure", [False, True])
def test_c_times_the_published_noise_is_what_one_band_adds(secure):
    """With the same seed, mixing the noise of 8 bands by C gives back the independent noise of 1 band, to 1e-6."""
    banded, mechanism = noise_of(PLAN, randomness=Randomness.seeded(5, secure=secure))
    independent, _ = noise_of(ONE_BAND, randomness=Randomness.seeded(5, secure=secure))
    unit = 1.3 * 0.5 / 20
    grid = 1e-5 if secure else 0  # in secure mode results are rounded to a grid of a millionth of the noise
    np.testing.assert_allclose(mixed(PLAN.noise_coefficients, banded) / unit, independent / unit, atol=1e-6 * 20 + grid)
    assert mechanism.noise_memory == 7 * 2009 * (8 if secure else 4)


def test_single_steps_and_running_sums_have_the_predicted_noise():
    """χ² of the 2,009 coordinates at the last step, each independent and normal; and of the sums over all steps."""
    noise, mechanism = noise_of(PLAN)
    unit = 1.3 * 0.5 / 20
    weights = np.linalg.inv([[PLAN.noise_coefficients[t - s] if 0 <= t - s < 8 else 0.0 for s in range(40)] for t in range(40)])
    for rows, expected in ((noise[-1], weights[-1]), (noise.sum(axis=0), weights.sum(axis=0))):
        statistic = (rows**2).sum() / (unit**2 * (expected @ expected))
        assert ALARM / 2 < stats.chi2.cdf(statistic, df=len(rows)) < 1 - ALARM / 2
    single = PLAN.noise_ratios.single_step
    assert np.linalg.norm(weights) / math.sqrt(40) == pytest.approx(single)
    assert mechanism.noise_deviation == pytest.approx(unit * single)
    assert PLAN.noise_deviation(0.5) == pytest.approx(unit * single)


def test_a_step_that_was_refused_begins_a_new_chain():
    mechanism = GaussianMechanism(PLAN, 0.5, randomness=Randomness.seeded(5))
    for step in range(5):
        mechanism.privatize(ZEROS, step=step)
    with pytest.raises(PrivacyError, match="not finite"):
        mechanism.privatize({"weight": torch.full((40, 50), math.inf), "bias": torch.zeros(9)}, step=5)
    after = mechanism.privatize(ZEROS, step=6)["bias"]
    plain = GaussianMechanism(ONE_BAND, 0.5, randomness=Randomness.seeded(5))
    for step in range(6):
        plain.privatize(ZEROS, step=step)
    alone = plain.privatize(ZEROS, step=6)["bias"] / PLAN.noise_coefficients[0]
    torch.testing.assert_close(after.double(), alone.double(), rtol=1e-5, atol=1e-8)


def test_coefficients_by_which_an_example_would_exceed_the_sensitivity_are_refused():
    with pytest.raises(PrivacyError, match=r"coefficients have length 1\.118; .* must be at most 1"):
        CorrelatedNoise([1.0, 0.5])
