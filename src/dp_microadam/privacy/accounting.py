"""Privacy accounting: the (ε, δ) guarantee of a sequence of Poisson-subsampled Gaussian steps.

A step adds Gaussian noise of standard deviation σ·S to a sum of sensitivity S over a Poisson sample, in which each
example appears independently with probability q. Neighbouring datasets differ by adding or removing one example.

There are two accountants. *RDP* computes the Rényi divergence of one step at a list of orders α (Mironov, Talwar
and Zhang 2019, "Rényi differential privacy of the sampled Gaussian mechanism", section 3.3), adds it up over the steps,
and converts the sum to (ε, δ) by Balle et al. 2020, theorem 21. *PLD* composes discretised privacy loss distributions
(``privacy_loss.py``) and is tighter. This module does not import torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, log_ndtr

from dp_microadam.errors import InputError
from dp_microadam.privacy.privacy_loss import epsilon_of_composition, least_delta, loss_of_one_step, reach_for
from dp_microadam.validation import (
    require_in_open,
    require_in_open_closed,
    require_integer,
    require_one_of,
    require_positive,
)

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Floats = NDArray[np.float64]

ACCOUNTANTS = ("rdp", "pld")

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

# The largest number of steps that PLD composition was tested with; it takes about a second there.
PLD_MOST_STEPS = 10_000_000

# With less noise one step spends ε in the hundreds; the RDP bound is used instead of PLD.
PLD_LEAST_NOISE = 0.05

# A solved noise multiplier is rounded up to a multiple of this; the search ends at the largest.
NOISE_RESOLUTION = 1e-4
_MULTIPLES_PER_UNIT = round(1 / NOISE_RESOLUTION)
LARGEST_NOISE_MULTIPLIER = 100_000

# Less noise protects nothing (one step spends ε in the hundreds of thousands) and would leave the range of floating point.
SMALLEST_NOISE_MULTIPLIER = 1e-3


@dataclass(frozen=True)
class SubsampledGaussian:
    """``steps`` steps of the Poisson-subsampled Gaussian mechanism. The privacy cost of a run is a list of these.

    With correlated noise of ``bands`` bands the examples are divided into as many groups, and ``steps`` counts the steps that
    sample from one group: ⌈T/b⌉ of a run of T steps (``banded.py`` has the theorem).
    """

    sample_rate: float
    noise_multiplier: float
    steps: int
    bands: int = field(default=1, repr=False)

    def __post_init__(self) -> None:
        require_in_open_closed("sample_rate", self.sample_rate, 0, 1)
        require_positive("noise_multiplier", self.noise_multiplier)
        require_integer("steps", self.steps, 0)
        require_integer("bands", self.bands, 1)


def epsilon(spent: Sequence[SubsampledGaussian], delta: float, accountant: str = "rdp") -> float:
    """The smallest ε that the accountant can certify at ``delta`` for the composition of all steps in ``spent``.

    Formal guarantees: the composition of all steps, each of which may depend on the results of earlier ones, is
    (ε, δ)-differentially private under adding or removing one example, provided that every step sampled and added noise
    as its entry says, with independent and unpredictable randomness.

    >>> paper = SubsampledGaussian(sample_rate=4096 / 45000, noise_multiplier=3.0, steps=2480)
    >>> f"{epsilon([paper], delta=1e-5):.3f} by RDP, {epsilon([paper], delta=1e-5, accountant='pld'):.3f} by PLD"
    '8.000 by RDP, 7.422 by PLD'
    """
    require_in_open("delta", delta, 0, 1)
    require_one_of("accountant", accountant, ACCOUNTANTS)
    spent = [part for part in spent if part.steps > 0]
    if not spent:
        return 0.0
    return _rdp_epsilon(spent, delta) if accountant == "rdp" else _pld_epsilon(tuple(spent), delta)


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


def _conversion(delta: float) -> Floats:
    """The term of each order that turns its Rényi divergence into ε (Balle et al. 2020, theorem 21)."""
    alphas = np.array(ORDERS)
    return np.log1p(-1 / alphas) - (math.log(delta) + np.log(alphas)) / (alphas - 1)


def _total_rdp(spent: Iterable[SubsampledGaussian]) -> Floats:
    total = np.zeros(len(ORDERS))
    for part in spent:
        total += part.steps * rdp_of_one_step(part.sample_rate, part.noise_multiplier)
    return total


def _rdp_epsilon(spent: Sequence[SubsampledGaussian], delta: float) -> float:
    # A divergence that could not be computed gives no bound. Without this a NaN would count as perfect privacy.
    candidates = np.nan_to_num(_total_rdp(spent) + _conversion(delta), nan=np.inf, posinf=np.inf)
    return max(0.0, float(np.min(candidates)))


def most_steps(sample_rate: float, noise_multiplier: float, epsilon_limit: float, delta: float, accountant: str) -> int:
    """The largest number of steps whose ε stays within ``epsilon_limit``; 0 if not even one does.

    Formal guarantees: ε of the returned number is at most the limit, and ε of one step more exceeds it, both as
    :func:`epsilon` computes them.

    Raises:
        LookupError: if the limit is not reached within the largest number of steps that the accountant supports.
    """
    just_above = math.nextafter(epsilon_limit, math.inf)

    def excess(steps: int) -> float:
        return epsilon([SubsampledGaussian(sample_rate, noise_multiplier, steps)], delta, accountant) - just_above

    per_step = rdp_of_one_step(sample_rate, noise_multiplier)
    by_rdp = int(max(0.0, float(np.max((epsilon_limit - _conversion(delta)) / per_step))))
    if accountant == "rdp":
        return first_non_negative(excess, guess=by_rdp + 1, stride=1) - 1
    # PLD allows more steps than RDP; ε grows a little faster than the square root of the number of steps.
    start = min(max(1, by_rdp), PLD_MOST_STEPS)
    guess = int(start * (just_above / max(excess(start) + just_above, just_above / 100)) ** 1.8)
    return first_non_negative(excess, guess, stride=1 + guess // 256, largest=PLD_MOST_STEPS) - 1


def least_noise_multiplier(sample_rate: float, steps: int, epsilon_limit: float, delta: float, accountant: str) -> float:
    """The smallest multiple of ``NOISE_RESOLUTION`` that keeps ``steps`` steps within ``epsilon_limit``.

    Formal guarantees: ε of the returned noise multiplier is at most the limit; that of the next smaller multiple
    exceeds it.

    Raises:
        LookupError: if no noise multiplier up to ``LARGEST_NOISE_MULTIPLIER`` is enough.
    """

    def margin(multiple: int, by: str = accountant) -> float:
        part = SubsampledGaussian(sample_rate, multiple / _MULTIPLES_PER_UNIT, steps)
        return epsilon_limit - epsilon([part], delta, by)

    largest = LARGEST_NOISE_MULTIPLIER * _MULTIPLES_PER_UNIT
    try:
        least = first_non_negative(lambda n: margin(n, "rdp"), _MULTIPLES_PER_UNIT, _MULTIPLES_PER_UNIT, largest)
    except LookupError:
        if accountant == "rdp":
            raise
        least = largest
    if accountant != "rdp":
        least = first_non_negative(margin, least, stride=1 + least // 16, largest=largest)
    return least / _MULTIPLES_PER_UNIT


def first_non_negative(function: Callable[[int], float], guess: int, stride: int, largest: int = 2**53) -> int:
    """The first whole number n ≥ 1 with ``function(n) >= 0``, for a function that grows.

    Starts at the guess and moves in growing strides until the change of sign is bracketed, then interpolates. Every third
    step is a bisection, so that the search is fast for any function.

    Raises:
        LookupError: if the function is still negative at ``largest``.
    """
    low, high = 0, 0  # in the end function(low) < 0 <= function(high)
    at_low, at_high = -math.inf, math.inf
    candidate = min(max(1, guess), largest)
    turn = 0
    while high - low != 1:
        value = function(candidate)
        if value >= 0:
            high, at_high = candidate, value
        elif candidate == largest:
            raise LookupError(f"negative up to {largest}")
        else:
            low, at_low = candidate, max(value, -sys.float_info.max)  # the smallest stands for "not tried yet"
        if high == 0:
            candidate = min(low + stride, largest)
        elif at_low == -math.inf:
            candidate = max(high - stride, 1)
        else:
            turn += 1
            share = 0.5 if turn % 3 == 0 else at_low / (at_low - at_high)
            candidate = min(max(low + int(share * (high - low)), low + 1), high - 1)
        stride *= 2
    return high


def as_dp_event(spent: Sequence[SubsampledGaussian]) -> DpEvent:
    """The same composition as an event of Google's dp-accounting library, for use with its accountants."""
    import dp_accounting

    return dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(part.sample_rate, dp_accounting.GaussianDpEvent(part.noise_multiplier)),
                part.steps,
            )
            for part in spent
        ]
    )


def _pld_epsilon(spent: tuple[SubsampledGaussian, ...], delta: float) -> float:
    if min(part.noise_multiplier for part in spent) < PLD_LEAST_NOISE:
        _require_countable_steps(spent)
        return _rdp_epsilon(spent, delta)
    return _pld_group_epsilon(spent, delta, 1)


@lru_cache(maxsize=256)
def _pld_group_epsilon(spent: tuple[SubsampledGaussian, ...], delta: float, group_size: int) -> float:
    """ε under adding or removing a group: the larger of the two directions."""
    _require_countable_steps(spent)
    steps = sum(part.steps for part in spent)
    reach = reach_for(delta, steps)
    if reach is None:
        raise InputError(f"delta is {delta:g}; the pld accountant takes at least {least_delta(steps):.2g} for {steps} steps")
    weights = [_number_present(group_size, part.sample_rate, reach) for part in spent]
    # Without subsampling both directions are the same.
    directions = (True,) if all(part.sample_rate == 1.0 for part in spent) else (True, False)
    largest = 0.0
    for removed in directions:
        laws = [loss_of_one_step(w, part.noise_multiplier, removed, reach) for w, part in zip(weights, spent, strict=True)]
        composition = [(law, part.steps) for law, part in zip(laws, spent, strict=True)]
        largest = epsilon_of_composition(composition, delta, at_least=largest)
    return largest


def _number_present(group_size: int, sample_rate: float, reach: float) -> tuple[float, ...]:
    """The probabilities that 0, 1, … examples of the group are sampled, up to where the rest is negligible."""
    if group_size == 1:
        return 1 - sample_rate, sample_rate
    from scipy.stats import binom

    present = np.arange(group_size + 1)
    probabilities = binom.pmf(present, group_size, sample_rate)
    negligible = binom.logsf(present, group_size, sample_rate) <= log_ndtr(-reach)
    return tuple(probabilities[: int(np.argmax(negligible)) + 1].tolist())


def _require_countable_steps(spent: Iterable[SubsampledGaussian]) -> None:
    steps = sum(part.steps for part in spent)
    if steps > PLD_MOST_STEPS:
        raise InputError(f"steps is {steps}; the pld accountant takes at most {PLD_MOST_STEPS}, rdp takes any number")


def group_epsilon(spent: Sequence[SubsampledGaussian], delta: float, group_size: int) -> float:
    """ε at ``delta`` for adding or removing up to ``group_size`` examples at once, by PLD.

    The number of sampled examples from a group of k is binomial, and each changes the sum by at most S. A step is
    therefore a mixture of Gaussians at 0, S, …, kS (Ganesh 2024, "Tight group-level DP guarantees for DP-SGD with
    sampling via mixture of Gaussians mechanisms"). This is tighter than general group privacy, which gives k·ε at
    δ·Σ exp(i·ε), i < k. That general bound is what a composition with correlated noise gets: examples of different groups take
    part in neighbouring steps, whose noise is correlated, so a step is not such a mixture.

    Formal guarantees: as :func:`epsilon`, for two datasets where one is the other with up to ``group_size`` examples added,
    or with up to that many removed; not with some added and others removed.
    """
    require_in_open("delta", delta, 0, 1)
    require_integer("group_size", group_size, 1)
    spent = [part for part in spent if part.steps > 0]
    if not spent:
        return 0.0
    if group_size > 1 and any(part.bands > 1 for part in spent):
        return _general_group_epsilon(spent, delta, group_size)
    least_noise = min(part.noise_multiplier for part in spent)
    if least_noise < PLD_LEAST_NOISE:
        raise InputError(f"noise_multiplier is {least_noise}; for groups it must be at least {PLD_LEAST_NOISE}")
    return _pld_group_epsilon(tuple(spent), delta, group_size)


def _general_group_epsilon(spent: Sequence[SubsampledGaussian], delta: float, group_size: int) -> float:
    """ε for a group from ε for one example, by adding its members one at a time; by RDP, which takes any δ.

    If one example has (ε₁, δ₁), then k have (k·ε₁, δ₁·Σ exp(i·ε₁), i < k). The largest δ₁ whose sum stays within δ gives the
    smallest ε₁; it is approached from above, which never leaves it out because the right-hand side grows with δ₁.
    """

    def largest_allowed(share: float) -> float:
        exponents = np.arange(group_size) * _rdp_epsilon(spent, share)
        return delta * math.exp(-float(np.logaddexp.reduce(exponents)))

    share = delta
    for _ in range(200):
        least = largest_allowed(share)
        if least == 0.0:
            break
        if share <= least:
            return group_size * _rdp_epsilon(spent, share)
        share = least if least < 0.999 * share else 0.998 * share
    raise InputError(f"group_size is {group_size}; the epsilon of so large a group is out of range, it must be smaller")
