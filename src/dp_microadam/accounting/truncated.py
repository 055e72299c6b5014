"""Truncated Poisson sampling: a cap on the number of units of a step, and the privacy loss of a step with a cap.

A step draws a Poisson sample of rate q from n units. If it has more than M, a uniformly random M of them are kept and the
others dropped. That bounds time and memory of a step, but couples the units: someone who is kept may push another one out. The
price is computed as dp-accounting does in ``from_truncated_subsampled_gaussian_mechanism`` (Ganesh 2025, "Tighter privacy
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
either pair are thresholds, and the second distribution exceeds a threshold with a smaller probability than N(0, σ²) does. How
much looser depends on p: of the two accountants the other one may give the smaller ε where a cap is reached often.

Neighbouring relation: one of the n units is added or removed. The size n is part of the theorem, unlike without a cap: it is
public, and the guarantee is for those whose data is among it. Steps may follow each other adaptively, each with coins of its
own. With correlated noise n is the number of places of a group (``banded.py``): a unit and whom it may push out belong to one
group, so that what was said of blocks of rows holds, with vectors of norm 2 where the coin says "full".

For k units that are added or removed together, of which J ~ Binomial(k, q) are drawn: if at most M − k of the n − k others are
drawn, nobody is dropped, and the sum moves by at most J. Else at most J of the k are kept, each in the place of at most one
other, so that it moves by at most 2J. This module does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import betainc, log_ndtr

from dp_microadam.accounting.renyi import ORDERS, Floats, rdp_of_one_step
from dp_microadam.accounting.step_loss import PrivacyLoss, loss_of_one_step, loss_of_replaced_step
from dp_microadam.errors import InputError
from dp_microadam.validation import require_integer

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


@lru_cache(maxsize=32)
def loss_of_capped_step(
    sample_rate: float, noise_multiplier: float, cap: Cap, group_size: int, removed: bool, reach: float
) -> PrivacyLoss:
    """The privacy loss of one step with a cap, for adding or removing ``group_size`` units, in one direction.

    Formal guarantees: as :func:`~dp_microadam.accounting.privacy_loss.loss_of_one_step`.
    """
    plain = loss_of_one_step(number_present(group_size, sample_rate, reach), noise_multiplier, removed, reach)
    full = cap.reached(sample_rate, group_size)
    if full == 0.0:
        return plain
    kept = cap.kept(sample_rate) if group_size == 1 else sample_rate
    return by_coin(plain, loss_of_replaced_step(number_present(group_size, kept, reach), noise_multiplier / 2, reach), full)


def by_coin(plain: PrivacyLoss, crowded: PrivacyLoss, full: float) -> PrivacyLoss:
    """The privacy loss of a step that is ``crowded`` with probability ``full``, as a public coin says, and else ``plain``."""
    if full == 0.0:
        return plain
    parts = ((plain, _log_rest(full)), (crowded, math.log(full)))
    return PrivacyLoss(
        np.concatenate([law.losses for law, _ in parts]),
        np.concatenate([law.log_masses + log_share for law, log_share in parts]),
        float(np.logaddexp.reduce([law.log_infinite + log_share for law, log_share in parts])),
    )


def number_present(group_size: int, sample_rate: float, reach: float) -> tuple[float, ...]:
    """The probabilities that 0, 1, … units of the group are sampled, up to where the rest is negligible."""
    if group_size == 1:
        return 1 - sample_rate, sample_rate
    from scipy.stats import binom

    present = np.arange(group_size + 1)
    probabilities = binom.pmf(present, group_size, sample_rate)
    negligible = binom.logsf(present, group_size, sample_rate) <= log_ndtr(-reach)
    return tuple(probabilities[: int(np.argmax(negligible)) + 1].tolist())


@lru_cache(maxsize=256)
def rdp_of_capped_step(sample_rate: float, noise_multiplier: float, cap: Cap) -> Floats:
    """The Rényi divergence of one step with a cap at each of ``ORDERS``.

    The coin has the same probability on both sides, so A_α = (1 − p)·A_α(q, σ) + p·A_α(r, σ/2), where A_α(q, σ) is that of
    Poisson sampling: see :func:`~dp_microadam.accounting.renyi.rdp_of_one_step`.

    Formal guarantees: one step is (α, ε_α)-Rényi differentially private for each returned ε_α, under adding or removing one of
    the cap's population.
    """
    plain = rdp_of_one_step(sample_rate, noise_multiplier)
    full = cap.reached(sample_rate)
    if full == 0.0:
        return plain
    less_one = np.array(ORDERS) - 1
    with np.errstate(divide="ignore"):
        log_excess = np.logaddexp(
            _log_rest(full) + _log_expm1(less_one * plain),
            math.log(full) + _log_expm1(less_one * rdp_of_one_step(cap.kept(sample_rate), noise_multiplier / 2)),
        )
    divergences: Floats = np.where(log_excess < 0, np.log1p(np.exp(np.minimum(log_excess, 0))), np.logaddexp(0, log_excess))
    divergences /= less_one
    divergences.flags.writeable = False
    return divergences


def more_than(count: int, trials: int, rate: float) -> float:
    """P(Binomial(trials, rate) > count)."""
    return float(betainc(count + 1, trials - count, rate)) if count < trials else 0.0


def _log_rest(full: float) -> float:
    """log(1 − p), rounded up, for a p that was rounded up."""
    return math.log1p(-full / (1 + 3 * _ROUNDING))


def _log_expm1(x: Floats) -> Floats:
    """log(eˣ − 1), without overflow for large x and without cancellation for small ones."""
    return x + np.log(-np.expm1(-x))
