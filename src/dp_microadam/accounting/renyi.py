"""The Rényi divergence of one Poisson-subsampled Gaussian step at a list of orders.

Mironov, Talwar and Zhang 2019, "Rényi differential privacy of the sampled Gaussian mechanism", section 3.3. This module does
not import torch.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, log_ndtr

from dp_microadam.validation import require_in_open_closed, require_positive

Floats = NDArray[np.float64]

# The paper's orders (1.1 … 10.9 by 0.1 and 12 … 63), then up to 1024 in steps of at most 7 %. Without the large orders
# a small ε would be overestimated: the term log(1/δ)/(α − 1) of the conversion alone would exceed it.
ORDERS = (
    *(round(1 + x / 10, 1) for x in range(1, 100)),
    *(float(x) for x in range(12, 64)),
    *(float(x) for start in (64, 128, 256, 512) for x in range(start, 2 * start, start // 16)),
    1024.0,
)

# Terms of the fractional series that are summed before the rest is extrapolated, and how many of them serve for that.
_SERIES_TERMS = 1024
_AVERAGED_TERMS = 16

# Less noise protects nothing (one step spends ε in the hundreds of thousands) and would leave the range of floating point.
SMALLEST_NOISE_MULTIPLIER = 1e-3


@lru_cache(maxsize=256)
def rdp_of_one_step(sample_rate: float, noise_multiplier: float, orders: tuple[float, ...] = ORDERS) -> Floats:
    """The Rényi divergence of one step at each order, exact up to rounding (relative error below 1e-9).

    The larger of the two directions is D_α(mixture ‖ Gaussian) = log(A_α)/(α − 1) with
    A_α = E[((1 − q) + q·w)^α], where w is the likelihood ratio of N(1, σ²) to N(0, σ²). The series is summed for
    A_α − 1, so that no digits are lost where q, and with it the divergence, is small.

    Formal guarantees: one step is (α, ε_α)-Rényi differentially private for each returned ε_α, under adding or removing
    one example.
    """
    require_in_open_closed("sample_rate", sample_rate, 0, 1)
    require_positive("noise_multiplier", noise_multiplier)
    alphas = np.array(orders, dtype=np.float64)
    if noise_multiplier < SMALLEST_NOISE_MULTIPLIER:
        return np.full_like(alphas, np.inf)
    if sample_rate == 1.0:
        divergences = alphas / (2 * noise_multiplier**2)
    else:
        whole = alphas == np.floor(alphas)
        log_excess = np.empty_like(alphas)  # log(A_α − 1)
        log_excess[whole] = [_log_excess_at_integer(sample_rate, noise_multiplier, int(a)) for a in alphas[whole]]
        log_excess[~whole] = _log_excess_at_fractions(sample_rate, noise_multiplier, alphas[~whole])
        divergences = np.logaddexp(0.0, log_excess)
        small = log_excess < 0
        divergences[small] = np.log1p(np.exp(log_excess[small]))
        divergences /= alphas - 1
    divergences.flags.writeable = False
    return divergences


def _log_excess_at_integer(q: float, sigma: float, alpha: int) -> float:
    """log(A_α − 1) for whole α: Σ C(α, i) qⁱ (1 − q)^(α − i) (exp((i² − i)/2σ²) − 1), all terms positive."""
    i = np.arange(2, alpha + 1, dtype=np.float64)
    log_binomial = gammaln(alpha + 1.0) - gammaln(i + 1) - gammaln(alpha - i + 1)
    log_weight = log_binomial + i * math.log(q) + (alpha - i) * math.log1p(-q)
    log_terms = log_weight + _log_abs_expm1((i * i - i) / (2 * sigma**2))
    return float(np.logaddexp.reduce(log_terms))


def _log_excess_at_fractions(q: float, sigma: float, alphas: Floats) -> Floats:
    """log(A_α − 1) for fractional α, by the two signed binomial series of ((1 − q) + q·w)^α.

    Below z₀, where q·w = 1 − q, the power is expanded in q·w/(1 − q), above it in the inverse; each moment of w over
    a half-line is an exponential times a normal probability. The binomial weights of the series whose ratio is below
    one sum to 1: subtracting them turns its exp(…) into expm1(…), and the total into A_α − 1.
    """
    z0 = sigma**2 * (math.log1p(-q) - math.log(q)) + 0.5
    i = np.arange(_SERIES_TERMS, dtype=np.float64)
    j = alphas[:, None] - i
    binomials = np.ones_like(j)
    np.cumprod((j[:, :-1]) / (i[1:]), axis=1, out=binomials[:, 1:])

    log_below = (i * i - i) / (2 * sigma**2) + log_ndtr((z0 - i) / sigma)
    log_above = (j * j - j) / (2 * sigma**2) + log_ndtr((j - z0) / sigma)
    sign_below: Floats | float = 1.0
    sign_above: Floats | float = 1.0
    if q <= 0.5:
        sign_below, log_below = np.sign(log_below), _log_abs_expm1(log_below)
    else:
        sign_above, log_above = np.sign(log_above), _log_abs_expm1(log_above)
    log_below = log_below + i * math.log(q) + j * math.log1p(-q)
    log_above = log_above + j * math.log(q) + i * math.log1p(-q)

    scale = np.maximum(log_below, log_above).max(axis=1, keepdims=True)
    terms = binomials * (sign_below * np.exp(log_below - scale) + sign_above * np.exp(log_above - scale))
    totals = np.array([_alternating_sum(row) for row in terms])
    return np.log(totals) + scale[:, 0]


def _alternating_sum(terms: Floats) -> float:
    """The sum of a series whose late terms alternate in sign and shrink smoothly.

    The last partial sums are averaged repeatedly, which converges much faster than the series itself.
    """
    partial = math.fsum(terms[:-_AVERAGED_TERMS]) + np.cumsum(terms[-_AVERAGED_TERMS:])
    while len(partial) > 1:
        partial = (partial[1:] + partial[:-1]) / 2
    return float(partial[0])


def _log_abs_expm1(x: Floats) -> Floats:
    """log|eˣ − 1|, without overflow for large x and without cancellation for small ones."""
    with np.errstate(divide="ignore"):
        return np.maximum(x, 0.0) + np.log(-np.expm1(-np.abs(x)))
