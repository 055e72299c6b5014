"""One step: its Rényi divergences and its privacy loss distribution, with or without a cap on the number of units.

*Rényi divergences* of the Poisson-subsampled Gaussian at a list of orders are those of Mironov, Talwar and Zhang 2019, "Rényi
differential privacy of the sampled Gaussian mechanism", section 3.3.

*Privacy loss distributions* are discretised so that they never understate δ. The noise axis is cut into narrow cells. The mass
of each goes to the losses at its two ends, so that the cell keeps its probability under both datasets. Such a move only raises
δ at every ε ("connect the dots": Doroshenko et al. 2022).

*Caps.* A step draws a Poisson sample of rate q from n units. If it has more than M, a uniformly random M of them are kept and
the others dropped. That bounds time and memory of a step, but couples the units: someone who is kept may push another one out.
The price is computed as dp-accounting does in ``from_truncated_subsampled_gaussian_mechanism`` (Ganesh 2025, "Tighter privacy
analysis for truncated Poisson sampling", arXiv 2508.15089).

Theorem. Let D have n units, one of them x, and let D′ be D without x. Let K ~ Binomial(n − 1, q) be the number of the others
that are drawn, p = P(K ≥ M), and r = E[q·M/(K + 1) | K ≥ M] = (M/n)·P(Binomial(n, q) > M)/p. Then a step on D and D′, in units
of the sensitivity, is at most as revealing as this: a public coin says "full" with probability p. If so, the pair is
(1 − r)·N(0, σ²) + r·N(2, σ²) against N(0, σ²). If not, it is that of Poisson sampling, (1 − q)·N(0, σ²) + q·N(1, σ²) against
N(0, σ²).

The reason: K has the same law on D and D′, so whether K ≥ M may be published. If K < M, nobody is dropped on either side. If
K ≥ M, the step on D′ adds up a uniformly random set R of M units of D′, whatever K is. On D, x is drawn and then kept with
probability q·M/(K + 1), which is r on average; if it is not kept, the M others are distributed as R; if it is, the M − 1 others
are distributed as R without a random member y. So on D the sum is that of R with probability 1 − r, and else it differs from it
by x − y, a vector of norm at most 2. The divergence is jointly convex, so that the worst R and y bound it, and grows with the
distance, because a smaller one is a larger one scaled down and given more noise.

RDP is computed for this pair. PLD is computed for the looser one of dp-accounting, so that the two libraries agree: if full,
(1 − r)·N(0, σ²) + r·N(2, σ²) against (1 − r)·N(0, σ²) + r·N(−2, σ²), in both directions. It is looser because the best tests of
either pair are thresholds, and the second distribution exceeds a threshold with a smaller probability than N(0, σ²) does.

Neighbouring relation: one of the n units is added or removed; n is public. Steps may follow each other adaptively, each with
coins of its own. With correlated noise n is the number of places of a group (``bands.py``): a unit and whom it may push out
belong to one group, so that what was said of blocks of rows holds, with vectors of norm 2 where the coin says "full".

For k units that are added or removed together, of which J ~ Binomial(k, q) are drawn: if at most M − k of the n − k others are
drawn, nobody is dropped, and the sum moves by at most J. Else at most J of the k are kept, each in the place of at most one
other, so that it moves by at most 2J.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, gammaln, log_ndtr

from dp_microadam.errors import InputError
from dp_microadam.validation import require_in_open_closed, require_integer, require_positive

Floats = NDArray[np.float64]
Weights = tuple[float, ...]

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
        divergences = _divergences(log_excess, alphas)
    divergences.flags.writeable = False
    return divergences


def _divergences(log_excess: Floats, alphas: Floats) -> Floats:
    """log(A_α)/(α − 1) from log(A_α − 1)."""
    logarithms: Floats = np.where(log_excess < 0, np.log1p(np.exp(np.minimum(log_excess, 0))), np.logaddexp(0, log_excess))
    return logarithms / (alphas - 1)


def _log_excess_at_integer(q: float, sigma: float, alpha: int) -> float:
    """log(A_α − 1) for whole α: Σ C(α, i) qⁱ (1 − q)^(α − i) (exp((i² − i)/2σ²) − 1), all terms positive."""
    i = np.arange(2, alpha + 1, dtype=np.float64)
    log_binomial = gammaln(alpha + 1.0) - gammaln(i + 1) - gammaln(alpha - i + 1)
    log_weight = log_binomial + i * math.log(q) + (alpha - i) * math.log1p(-q)
    log_terms = log_weight + _log_abs_expm1((i * i - i) / (2 * sigma**2))
    return float(np.logaddexp.reduce(log_terms))


def _log_excess_at_fractions(q: float, sigma: float, alphas: Floats) -> Floats:
    """log(A_α − 1) for fractional α, by the two signed binomial series of ((1 − q) + q·w)^α.

    Below z₀, where q·w = 1 − q, the power is expanded in q·w/(1 − q), above it in the inverse. The binomial weights of the
    series whose ratio is below one sum to 1: subtracting them turns its exp(…) into expm1(…), and the total into A_α − 1.
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
    """The sum of a series whose late terms alternate in sign, from repeated averages of its last partial sums."""
    partial = math.fsum(terms[:-_AVERAGED_TERMS]) + np.cumsum(terms[-_AVERAGED_TERMS:])
    while len(partial) > 1:
        partial = (partial[1:] + partial[:-1]) / 2
    return float(partial[0])


def _log_abs_expm1(x: Floats) -> Floats:
    """log|eˣ − 1|, without overflow for large x and without cancellation for small ones."""
    with np.errstate(divide="ignore"):
        return np.maximum(x, 0.0) + np.log(-np.expm1(-np.abs(x)))


# Cells per deviation σ of the noise, about, and Gauss-Legendre nodes in each. Seven nodes integrate a Gaussian over such a cell
# to full double precision even 37 deviations out.
_CELLS_PER_DEVIATION = 256
_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(7)
_NODES, _NODE_WEIGHTS = (_NODES + 1) / 2, _NODE_WEIGHTS / 2

UNIT = 2.0**-53
"""Half a unit in the last place of 1."""

UNITS_OF_A_PROBABILITY = 4000
"""A discretised probability is right up to a relative error of this many units."""


@dataclass(frozen=True, eq=False)
class PrivacyLoss:
    """A discrete privacy loss distribution of one step in one direction; it dominates the true one."""

    losses: Floats
    log_masses: Floats
    log_infinite: float


@lru_cache(maxsize=64)
def loss_of_mixtures(above: Weights, below: Weights, noise_multiplier: float, reach: float) -> PrivacyLoss:
    """The privacy loss of Σ a_j N(j, σ²) against Σ b_j N(−j, σ²).

    ``above`` are a₀, a₁, …, ``below`` b₀, b₁, …; a tail as small as that of the normal distribution beyond ``reach`` may be
    missing. Noise beyond ``reach`` standard deviations counts as an infinite loss on the side of large losses, and is moved up
    to the smallest loss on the other side.

    Formal guarantees: for every ε the δ of the returned distribution is at least that of the mechanism, up to a relative error
    of ``UNITS_OF_A_PROBABILITY`` roundings in each probability.
    """
    sigma = noise_multiplier
    # From ``reach`` deviations below 0 to ``reach`` above the furthest mean. A power of two: the ends of cells are exact.
    width = 2.0 ** round(math.log2(sigma / _CELLS_PER_DEVIATION))
    last = math.ceil((len(above) - 1 + reach * sigma) / width)
    ends = np.arange(-math.ceil(reach * sigma / width), last + 1, dtype=np.float64) * width

    # In each cell: the distance of its nodes from its lower end, where the loss is smaller. On the way the likelihood ratio of
    # ``above`` grows to 1 + rises times itself, that of ``below`` falls to 1 − falls times itself, and a drop is 1 less the
    # exponential of what the loss grew by. Sums of positive terms throughout: no digits are lost however small losses are.
    distances = np.append(_NODES, 1.0) * width
    rises, falls = np.zeros((2, len(ends) - 1, len(distances)))
    slopes, total = np.zeros(len(ends)), 0.0
    ratios = []
    for weights, side, changes, sign in ((above, ends, rises, 1.0), (below, -ends, falls, -1.0)):
        ratios.append(_log_likelihood_ratios(weights, sigma, side))
        total += min(1.0, math.fsum(weights[1:]))
        for j, weight in _components(weights):
            shares = np.exp(math.log(weight) + j * (2 * side - j) / (2 * sigma**2) - ratios[-1])
            slopes += shares * (j / sigma**2)
            changes += sign * (shares[:-1, None] * np.expm1(sign * j * distances / sigma**2))
    drops = (rises + falls) / (1 + rises)

    log_density = -0.5 * ((ends[:-1, None] + distances[:-1]) / sigma) ** 2
    log_density += ratios[0][:-1, None] + np.log1p(rises[:, :-1])
    masses = _masses(log_density, drops, width / sigma)
    furthest = max(len(above), len(below)) - 1
    rounding = 16 * UNIT * (np.abs(ratios[0]) + np.abs(ratios[1]) + slopes * (np.abs(ends) + furthest) + total)
    log_tail = float(log_ndtr(-reach))
    masses[0] += math.exp(log_tail)
    kept = masses > 0
    return PrivacyLoss((ratios[0] - ratios[1] + rounding)[kept], np.log(masses[kept]), log_tail + math.log(2))


def _masses(log_density: Floats, drops: Floats, relative_width: float) -> Floats:
    """The probability at each end of the cells: what the nodes of a cell hold, divided over its two ends."""
    probabilities = np.exp(log_density) * (_NODE_WEIGHTS * relative_width / math.sqrt(2 * math.pi))
    at_nodes, at_end = drops[:, :-1], drops[:, -1:]
    flat = at_end == 0.0  # both ends have the same loss
    to_larger = np.where(flat, 1.0, at_nodes / np.where(flat, 1.0, at_end))
    to_smaller = np.where(flat, 0.0, (at_end - at_nodes) / np.where(flat, 1.0, at_end))
    masses = np.zeros(len(drops) + 1)
    masses[:-1] += (probabilities * to_smaller).sum(axis=1)
    masses[1:] += (probabilities * to_larger).sum(axis=1)
    return masses


def _components(weights: Sequence[float]) -> list[tuple[float, float]]:
    return [(float(j), weight) for j, weight in enumerate(weights) if j > 0 and weight > 0]


def _log_likelihood_ratios(weights: Sequence[float], sigma: float, at: Floats) -> Floats:
    """log(Σ w_j exp((2jx − j²)/2σ²)) at each x, with all digits of small values and without overflow."""
    excess = np.zeros_like(at)
    logarithm = np.full_like(at, math.log(weights[0]) if weights[0] > 0 else -np.inf)
    for j, weight in _components(weights):
        exponents = j * (2 * at - j) / (2 * sigma**2)
        excess += weight * np.expm1(np.minimum(exponents, 600.0))
        np.logaddexp(logarithm, math.log(weight) + exponents, out=logarithm)
    near_one = (weights[0] > 0) & (np.abs(excess) < 0.5)
    return np.where(near_one, np.log1p(np.where(near_one, excess, 0.0)), logarithm)


# Probabilities of the binomial distribution are rounded up by this, more than the error with which they are computed; and to
# at least the smallest, where they underflow.
_ROUNDING = 1e-9
_SMALLEST = 1e-300


@dataclass(frozen=True)
class Cap:
    """At most ``units`` units in a step that samples from ``population`` units."""

    units: int
    population: int

    def __post_init__(self) -> None:
        require_integer("units", self.units, 1)
        require_integer("population", self.population, 1)

    def without(self, units: int) -> Cap:
        """The same cap on a population of which ``units`` are gone; at least one is left."""
        return Cap(self.units, max(1, self.population - units))

    def reached(self, sample_rate: float, group_size: int = 1) -> float:
        """The probability that others than the ``group_size`` units at stake are so many that someone may be dropped.

        Formal guarantees: never below the true probability, and above it by a fraction of 3e-9 at most, or 1e-300.
        """
        others, room = self.population - group_size, self.units - group_size
        if others <= room or sample_rate == 0.0:
            return 0.0
        if room < 0:
            return 1.0
        return min(1.0, max(more_than(room, others, sample_rate) * (1 + _ROUNDING), _SMALLEST))

    def kept(self, sample_rate: float) -> float:
        """The probability r that a unit takes part in a step, if so many others were drawn that the cap is reached.

        Formal guarantees: never below the true probability.
        """
        most = sample_rate * self.units / (self.units + 1)  # of K = M, the fewest others
        reached = more_than(self.units - 1, self.population - 1, sample_rate)
        if reached <= _SMALLEST:
            return most
        drawn = more_than(self.units, self.population, sample_rate) * self.units / self.population
        return min(most, drawn / reached * (1 + _ROUNDING))


def cap_of(max_batch_size: int | None, dataset_size: int, bands: int = 1) -> Cap | None:
    """The cap of a plan: its steps sample from one of ``bands`` groups, with as many places as the largest has members."""
    return None if max_batch_size is None else Cap(max_batch_size, -(-dataset_size // bands))


def require_room(max_batch_size: int | None, batch_size: int) -> None:
    """Require a cap on the batch that leaves room for the expected one, or none."""
    if max_batch_size is not None and require_integer("max_batch_size", max_batch_size, 1) < batch_size:
        raise InputError(
            f"max_batch_size is {max_batch_size}, less than the expected batch_size {batch_size}; it must be at least that, "
            "and is seldom reached from about three times the square root of the batch more"
        )


ADDED, REMOVED, REPLACED = "added", "removed", "replaced"
"""What may happen to the units whose privacy is at stake, from one dataset to its neighbour."""


@lru_cache(maxsize=64)
def loss_of_one_step(
    sample_rate: float, noise_multiplier: float, reach: float, change: str, cap: Cap | None = None, group_size: int = 1
) -> PrivacyLoss:
    """The privacy loss of one step if ``group_size`` units are ``REMOVED``, ``ADDED`` or ``REPLACED``.

    With a cap it is that of a step of which a public coin says whether others are drawn for whom they might be dropped.

    Formal guarantees: as :func:`loss_of_mixtures`.
    """

    def uncapped(rate: float, noise: float, change: str) -> PrivacyLoss:
        present = _number_present(group_size, rate, reach)
        above, below = (1.0,) if change == ADDED else present, (1.0,) if change == REMOVED else present
        return loss_of_mixtures(above, below, noise, reach)

    plain = uncapped(sample_rate, noise_multiplier, change)
    full = 0.0 if cap is None else cap.reached(sample_rate, group_size)
    if cap is None or full == 0.0:
        return plain
    kept = cap.kept(sample_rate) if group_size == 1 else sample_rate
    parts = ((plain, _log_rest(full)), (uncapped(kept, noise_multiplier / 2, REPLACED), math.log(full)))
    return PrivacyLoss(
        np.concatenate([law.losses for law, _ in parts]),
        np.concatenate([law.log_masses + log_share for law, log_share in parts]),
        float(np.logaddexp.reduce([law.log_infinite + log_share for law, log_share in parts])),
    )


def _number_present(group_size: int, sample_rate: float, reach: float) -> Weights:
    """The probabilities that 0, 1, … units of the group are sampled, up to where the rest is negligible."""
    if group_size == 1:
        return 1 - sample_rate, sample_rate
    from scipy.stats import binom

    present = np.arange(group_size + 1)
    probabilities = binom.pmf(present, group_size, sample_rate)
    negligible = binom.logsf(present, group_size, sample_rate) <= log_ndtr(-reach)
    return tuple(probabilities[: int(np.argmax(negligible)) + 1].tolist())


@lru_cache(maxsize=256)
def rdp_of_capped_step(sample_rate: float, noise_multiplier: float, cap: Cap | None) -> Floats:
    """The Rényi divergence of one step at each of ``ORDERS``, with a cap or without one.

    The coin has the same probability on both sides, so A_α = (1 − p)·A_α(q, σ) + p·A_α(r, σ/2), where A_α(q, σ) is that of
    Poisson sampling: see :func:`rdp_of_one_step`.

    Formal guarantees: one step is (α, ε_α)-Rényi differentially private for each returned ε_α, under adding or removing one of
    the cap's population.
    """
    plain = rdp_of_one_step(sample_rate, noise_multiplier)
    full = 0.0 if cap is None else cap.reached(sample_rate)
    if cap is None or full == 0.0:
        return plain
    alphas = np.array(ORDERS)
    with np.errstate(divide="ignore"):
        log_excess = np.logaddexp(
            _log_rest(full) + _log_abs_expm1((alphas - 1) * plain),
            math.log(full) + _log_abs_expm1((alphas - 1) * rdp_of_one_step(cap.kept(sample_rate), noise_multiplier / 2)),
        )
    divergences = _divergences(log_excess, alphas)
    divergences.flags.writeable = False
    return divergences


def more_than(count: int, trials: int, rate: float) -> float:
    """P(Binomial(trials, rate) > count)."""
    return float(betainc(count + 1, trials - count, rate)) if count < trials else 0.0


def _log_rest(full: float) -> float:
    """log(1 − p), rounded up, for a p that was rounded up."""
    return math.log1p(-full / (1 + 3 * _ROUNDING))
