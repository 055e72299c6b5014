"""The constants and terms of the theorem, against closed forms and exact arithmetic; and the command that prints them."""

import math
from dataclasses import replace
from decimal import Decimal, getcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from research.__main__ import main
from research.theory.bounds import (
    Setting,
    block_contraction,
    corrected_bound,
    printed_bound,
    stochastic_rounding_error,
    top_k_contraction,
)
from research.theory.many_seeds import rounded
from thoroughness import examples

from dp_microadam.errors import InputError

SETTING = Setting(2.3, 1.7, 1.0, 0.6, 0.01, 1000, 0.9, 0.5, 0.6, 0.2)


@examples(50)
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30), st.data())
def test_no_vector_loses_more_to_top_k_than_q_says(values, data):
    kept = data.draw(st.integers(1, len(values)))
    left = np.sort(np.abs(values))[: len(values) - kept]
    assert np.linalg.norm(left) <= top_k_contraction(kept, len(values)) * np.linalg.norm(values) * (1 + 1e-12)


def test_blocks_are_as_contractive_as_the_worst_of_them():
    # 40,000 = 32,768 + 7,232; 328/32768 and 73/7232 are both slightly above 1 %, 1 of 64 is far above.
    expected = max(math.sqrt(1 - 328 / 32_768), math.sqrt(1 - 73 / 7_232), math.sqrt(1 - 1 / 64))
    assert block_contraction([40_000, 64], 0.01, 32_768) == expected
    assert block_contraction([40_000], 0.01) == math.sqrt(1 - 400 / 40_000)


@examples(60)
@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=40), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_no_vector_loses_more_to_rounding_than_omega_says(values, bits, seed):
    x = np.array([values])
    error = np.linalg.norm(rounded(x, bits, np.random.default_rng(seed).random(x.shape)) - x)
    own = stochastic_rounding_error(x.size, bits, x.min(), x.max())
    # The additions are rounding of the test's own float64 arithmetic.
    assert error <= own * np.linalg.norm(x) * (1 + 1e-9) + 1e-9
    assert own <= stochastic_rounding_error(x.size, bits) * (1 + 1e-12)


def test_corrected_bound_equals_an_independent_computation_in_fifty_digits():
    getcontext().prec = 50
    gap, L, G, s_g, s, d, b1, eps, q, w = (Decimal(str(value)) for value in vars(SETTING).values())
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
        bound = corrected_bound(SETTING, steps)
        found = (bound.total, bound.step_size, bound.c0, SETTING.c1, SETTING.c2)
        assert found == pytest.approx([float(one) for one in (2 * C0 * inner + 2 * G**2 / T, eta, C0, C1, C2)], rel=1e-12)


def test_printed_bound_is_the_papers_last_but_one_line():
    """With 1/√T as the step size, the line of the appendix that still has all terms."""
    s, T = SETTING, 10**8
    qw = s.joint_contraction
    R2 = (s.gradient_bound + math.sqrt(s.dimension) * s.noise_deviation) ** 2
    C0 = math.sqrt(2 * 4 * (1 + qw**2) ** 3 / (1 - qw**2) ** 2 * R2 + s.eps)
    variances = s.gradient_deviation**2 + s.dimension * s.noise_deviation**2 + s.c2**2 * R2
    inner = s.initial_gap / math.sqrt(T) + s.smoothness * variances / (s.eps * math.sqrt(T))
    inner += s.smoothness**2 * C0 * s.c1**2 * R2 / (s.eps**2 * T)
    inner += (1 + s.c1) * R2 * math.sqrt(s.dimension) / math.sqrt(T * s.eps)
    inner += (1 + 2 * s.c1) * s.c1 * s.smoothness * R2 * math.sqrt(s.dimension) / (T * math.sqrt(s.eps))
    assert printed_bound(s, T).step_size == 1 / math.sqrt(T)
    assert printed_bound(s, T).total == pytest.approx(2 * C0 * inner, rel=1e-12)


def test_without_noise_and_compression_it_is_the_bound_of_adaptive_sgd_and_noise_costs_a_root_of_a_logarithm():
    plain = replace(SETTING, contraction=0.0, rounding_error=0.0, beta_1=0.0, noise_deviation=0.0)
    bound = corrected_bound(plain, 10**6)
    assert bound.c0 == pytest.approx(math.sqrt(1.0 + 0.5), rel=1e-14)
    assert {name for name, value in bound.terms.items() if value > 0} == {"initial gap", "gradient variance", "adaptivity"}
    quiet = [corrected_bound(plain, 10**power).total * 10 ** (power / 2) for power in (12, 14)]
    noisy = [corrected_bound(SETTING, 10**power).total * 10 ** (power / 2) for power in (12, 14)]
    assert quiet[1] == pytest.approx(quiet[0], rel=1e-3)
    assert noisy[0] < noisy[1] < noisy[0] * math.sqrt(14 / 12)


def test_default_settings_are_outside_the_theorem():
    """1 % density leaves room for ω below 0.00504; four bits lose 0.10 of Gaussian values, and 1.06 at worst."""
    q = block_contraction([32_768], 0.01, 32_768)
    default = replace(SETTING, contraction=q, rounding_error=stochastic_rounding_error(128, 4))
    with pytest.raises(InputError, match=r"needs it below 1.*ω below 0.00504 instead of 1.06"):
        corrected_bound(default, 1000)
    rng = np.random.default_rng(0)
    values = rng.standard_normal((20_000, 128))
    for offsets, expected in ((0.5, 0.10), (rng.random(values.shape), 0.14)):
        lost = rounded(values, 4, offsets) - values
        assert np.linalg.norm(lost) / np.linalg.norm(values) == pytest.approx(expected, abs=0.005)


UNKNOWN = ["--initial-gap", "2.3", "--smoothness", "10", "--gradient-deviation", "0.1"]
GIVEN = [*UNKNOWN, "--steps", "1000", "--dimension", "500", "--noise-multiplier", "2", "--batch-size", "100"]
INSIDE = [*GIVEN, "--density", "0.5", "--rounding-error", "0.1", "--eps", "0.2"]


def test_the_command_has_every_term_of_both_forms_and_says_what_is_not_covered(capsys):
    setting = Setting(2.3, 10.0, 1.0, 0.1, 0.02, 500, 0.9, 0.2, block_contraction([500], 0.5), 0.1)
    assert main(["theory", *INSIDE]) == 0
    shown = capsys.readouterr().out
    assert "".join(f"{bound(setting, 1000).total:12.4g}" for bound in (corrected_bound, printed_bound)) in shown
    assert "adaptivity dominates" in shown
    assert "Algorithm 1" in shown
    assert main(["theory", *GIVEN]) == 0
    assert "does not apply: (1 + ω)q must be below 1, which needs ω below 0.00504" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "named"), [
    (["--density", "0"], "density is 0.0"),
    (["--noise-multiplier", "-1"], "noise_multiplier is -1.0"),
    (["--smoothness", "0"], "smoothness is 0.0"),
    (["--steps", "0"], "steps is 0"),
    (["--eps", "nan"], "eps is nan"),
])  # fmt: skip
def test_wrong_input_is_one_sentence_and_exit_code_2(arguments, named, capsys):
    assert main(["theory", *INSIDE, *arguments]) == 2
    shown = capsys.readouterr()
    assert named in shown.err
    assert (shown.err.count("\n"), shown.out) == (1, "")
