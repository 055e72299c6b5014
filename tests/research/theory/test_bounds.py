"""The constants and terms of the theorem, against closed forms, exact arithmetic and a second way of writing them."""

import math
from dataclasses import replace
from decimal import Decimal, getcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from research.theory.bounds import (
    TERMS,
    Setting,
    block_contraction,
    corrected_bound,
    noise_deviation,
    printed_bound,
    stochastic_rounding_error,
    top_k_contraction,
)
from research.theory.many_seeds import rounded
from thoroughness import examples

from dp_microadam.errors import InputError

SETTING = Setting(
    initial_gap=2.3,
    smoothness=1.7,
    gradient_bound=1.0,
    gradient_deviation=0.6,
    noise_deviation=0.01,
    dimension=1000,
    beta_1=0.9,
    eps=0.5,
    contraction=0.6,
    rounding_error=0.2,
)


def settings_of_the_theorem():
    positive = st.floats(0.01, 10.0)
    return st.builds(
        Setting,
        initial_gap=positive,
        smoothness=positive,
        gradient_bound=positive,
        gradient_deviation=positive,
        noise_deviation=st.floats(0.0, 1.0),
        dimension=st.integers(1, 10_000),
        beta_1=st.floats(0.0, 0.99),
        eps=positive,
        contraction=st.floats(0.0, 0.7),
        rounding_error=st.floats(0.0, 0.4),
    )


@examples(50)
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30), st.data())
def test_no_vector_loses_more_to_top_k_than_q_says(values, data):
    kept = data.draw(st.integers(1, len(values)))
    x = np.array(values)
    left = np.sort(np.abs(x))[: len(x) - kept]
    assert np.linalg.norm(left) <= top_k_contraction(kept, len(x)) * np.linalg.norm(x) * (1 + 1e-12)


def test_top_k_contraction_is_attained_by_equal_magnitudes():
    x = np.ones(50)
    assert np.linalg.norm(x[7:]) / np.linalg.norm(x) == pytest.approx(top_k_contraction(7, 50), rel=1e-14)


def test_blocks_are_as_contractive_as_the_worst_of_them():
    # 40,000 = 32,768 + 7,232; 328/32768 and 73/7232 are both slightly above 1 %, 1 of 64 is far above.
    expected = max(math.sqrt(1 - 328 / 32_768), math.sqrt(1 - 73 / 7_232), math.sqrt(1 - 1 / 64))
    assert block_contraction([40_000, 64], 0.01, 32_768) == expected
    assert block_contraction([40_000], 0.01) == math.sqrt(1 - 400 / 40_000)


@examples(60)
@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=40), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_no_vector_loses_more_to_rounding_than_omega_says(values, bits, seed):
    x = np.array(values, dtype=np.float64)
    level = (x.max() - x.min()) / (2**bits - 1)
    if level == 0:
        return
    found = np.floor((x - x.min()) / level + np.random.default_rng(seed).random(len(x))) * level + x.min()
    error = np.linalg.norm(found - x)
    own = stochastic_rounding_error(len(x), bits, x.min(), x.max())
    # The additions are rounding of the test's own float64 arithmetic.
    assert error <= own * np.linalg.norm(x) * (1 + 1e-9) + 1e-9
    assert own <= stochastic_rounding_error(len(x), bits) * (1 + 1e-12)


def test_omega_is_nearly_attained():
    """All inner values just above a level and rounded up: the appendix's bound is tight to the last digits."""
    n, bits = 128, 4
    level = 2 / 15
    x = np.full(n, -1 + 7 * level + 1e-9)
    x[0], x[1] = -1.0, 1.0
    rounded = np.full(n, -1 + 8 * level)
    rounded[:2] = x[:2]
    inner = np.linalg.norm((rounded - x)[2:])
    assert inner == pytest.approx(math.sqrt(n - 2) * level, rel=1e-6)
    assert stochastic_rounding_error(n, bits, -1.0, 1.0) * math.sqrt(2) == pytest.approx(inner, rel=1e-6)


def test_sigma_of_the_theorem_is_the_noise_of_the_mean_gradient():
    assert noise_deviation(5.0, 1.0, 4096) == 5.0 / 4096
    assert noise_deviation(0.0, 1.0, 4096) == 0.0


def test_corrected_bound_equals_an_independent_computation_in_fifty_digits():
    getcontext().prec = 50
    given_ = {name: Decimal(str(value)) for name, value in SETTING.__dict__.items()}
    gap, L, G, s_g, s = (
        given_[k] for k in ("initial_gap", "smoothness", "gradient_bound", "gradient_deviation", "noise_deviation")
    )
    d, b1, eps, q, w = (given_[k] for k in ("dimension", "beta_1", "eps", "contraction", "rounding_error"))
    for steps in (1, 100, 123_456):
        T = Decimal(steps)
        qw = (1 + w) * q
        C2 = w * q * (1 + 2 * qw / (1 - qw**2))
        C1 = b1 / (1 - b1) * (1 + C2) + 2 * qw / (1 - qw**2)
        C0 = (((G + s * (d.sqrt() + 2 * T.ln().sqrt())) / (1 - qw)) ** 2 + eps).sqrt()
        R = G + d.sqrt() * s
        R4 = G + (d * (d + 2)).sqrt().sqrt() * s
        eta = min(eps / (12 * L * C0), 1 / T.sqrt())
        inner = gap / (T * eta)
        inner += 3 * eta * L * (s_g**2 + d * s**2 + C2**2 * R**2) / eps
        inner += eta**2 * L**2 * C0 * C1**2 * R**2 / eps**2
        inner += (1 + C1) * G * R * d.sqrt() / (T * eps).sqrt()
        inner += eta * C1 * (1 + 2 * C1) * L * R4**2 * d.sqrt() / (T.sqrt() * eps)
        total = 2 * C0 * inner + 2 * G**2 / T
        bound = corrected_bound(SETTING, steps)
        assert bound.total == pytest.approx(float(total), rel=1e-12)
        assert bound.step_size == pytest.approx(float(eta), rel=1e-12)
        assert bound.c0 == pytest.approx(float(C0), rel=1e-12)
        assert SETTING.c1 == pytest.approx(float(C1), rel=1e-12)
        assert SETTING.c2 == pytest.approx(float(C2), rel=1e-12)


def test_printed_bound_is_the_papers_last_but_one_line():
    """With 1/√T as the step size, the line of the appendix that still has all terms."""
    s, T = SETTING, 10**8
    bound = printed_bound(s, T)
    assert bound.step_size == 1 / math.sqrt(T)
    qw = s.joint_contraction
    R2 = (s.gradient_bound + math.sqrt(s.dimension) * s.noise_deviation) ** 2
    C0 = math.sqrt(2 * 4 * (1 + qw**2) ** 3 / (1 - qw**2) ** 2 * R2 + s.eps)
    inner = s.initial_gap / math.sqrt(T)
    inner += (
        s.smoothness * (s.gradient_deviation**2 + s.dimension * s.noise_deviation**2 + s.c2**2 * R2) / (s.eps * math.sqrt(T))
    )
    inner += s.smoothness**2 * C0 * s.c1**2 * R2 / (s.eps**2 * T)
    inner += (1 + s.c1) * R2 * math.sqrt(s.dimension) / math.sqrt(T * s.eps)
    inner += (1 + 2 * s.c1) * s.c1 * s.smoothness * R2 * math.sqrt(s.dimension) / (T * math.sqrt(s.eps))
    assert bound.total == pytest.approx(2 * C0 * inner, rel=1e-12)


@examples(50)
@given(settings_of_the_theorem(), st.integers(1, 10**7))
def test_terms_are_named_non_negative_and_add_up(setting, steps):
    bound = corrected_bound(setting, steps)
    assert list(bound.terms) == list(TERMS)
    assert all(value >= 0 for value in bound.terms.values())
    assert bound.total == pytest.approx(sum(bound.terms.values()))
    assert bound.terms[bound.dominant] == max(bound.terms.values())
    assert bound.step_size <= setting.eps / (12 * setting.smoothness * bound.c0)


@examples(50)
@given(settings_of_the_theorem(), st.integers(2, 10**6))
def test_noise_only_adds_and_without_it_the_non_private_bound_is_left(setting, steps):
    quiet = replace(setting, noise_deviation=0.0)
    bound = corrected_bound(quiet, steps)
    assert bound.terms["noise"] == bound.terms["rare noise"] == 0.0
    assert bound.c0 == pytest.approx(
        math.hypot(setting.gradient_bound / (1 - setting.joint_contraction), math.sqrt(setting.eps))
    )
    assert bound.total <= corrected_bound(setting, steps).total * (1 + 1e-12)


def test_without_compression_momentum_and_noise_it_is_the_bound_of_adaptive_sgd():
    """q = ω = β₁ = σ = 0: C₁ = C₂ = 0 and C₀ = √(G² + ε_s); three terms are left."""
    plain = replace(SETTING, contraction=0.0, rounding_error=0.0, beta_1=0.0, noise_deviation=0.0)
    bound = corrected_bound(plain, 10**6)
    assert (plain.c1, plain.c2) == (0.0, 0.0)
    assert bound.c0 == pytest.approx(math.sqrt(1.0 + 0.5), rel=1e-14)
    assert {name for name, value in bound.terms.items() if value > 0} == {"initial gap", "gradient variance", "adaptivity"}
    assert bound.terms["initial gap"] == pytest.approx(2 * math.sqrt(1.5) * 2.3 / 1000)
    assert bound.terms["gradient variance"] == pytest.approx(2 * math.sqrt(1.5) * 3 * 1.7 * 0.36 / 0.5 / 1000)
    assert bound.terms["adaptivity"] == pytest.approx(2 * math.sqrt(1.5) * math.sqrt(1000 / 0.5) / 1000)


def test_the_rate_is_one_over_root_t_without_noise_and_loses_a_root_of_a_logarithm_with_it():
    quiet = replace(SETTING, noise_deviation=0.0)
    falls = [corrected_bound(quiet, 10**power).total * 10 ** (power / 2) for power in (12, 14)]
    assert falls[1] == pytest.approx(falls[0], rel=1e-3)
    noisy = [corrected_bound(SETTING, 10**power).total * 10 ** (power / 2) for power in (12, 14)]
    assert noisy[0] < noisy[1] < noisy[0] * math.sqrt(14 / 12)


def test_four_bits_lose_a_tenth_of_gaussian_values_and_a_seventh_rounded_at_random():
    """2.56 million values: the figures of research/theory.md to well within their last digit."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((20_000, 128))
    for offsets, expected in ((0.5, 0.10), (rng.random(values.shape), 0.14)):
        lost = rounded(values, 4, offsets) - values
        assert np.linalg.norm(lost) / np.linalg.norm(values) == pytest.approx(expected, abs=0.005)


def test_default_settings_are_outside_the_theorem():
    """1 % density leaves room for ω below 0.00504, and 4 bits in buckets of 128 have a worst case of 1.06."""
    q = block_contraction([32_768], 0.01, 32_768)
    default = replace(SETTING, contraction=q, rounding_error=stochastic_rounding_error(128, 4))
    assert default.largest_rounding_error == pytest.approx(1 / math.sqrt(1 - 328 / 32_768) - 1)
    assert 0.005 < default.largest_rounding_error < 0.0051
    assert not default.applies
    with pytest.raises(InputError, match=r"needs it below 1.*ω below 0.00504 instead of 1.06"):
        corrected_bound(default, 1000)
    assert replace(default, rounding_error=0.005).applies


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("smoothness", 0.0),
        ("gradient_bound", math.inf),
        ("initial_gap", -1.0),
        ("noise_deviation", math.nan),
        ("dimension", 0),
        ("beta_1", 1.0),
        ("eps", 0.0),
        ("contraction", 1.0),
        ("rounding_error", -0.1),
    ],
)
def test_values_outside_the_theorem_are_refused_by_name(name, value):
    with pytest.raises(InputError, match=f"{name} is"):
        replace(SETTING, **{name: value})
