"""Privacy accounting: the (ε, δ) guarantee of a sequence of Poisson-subsampled Gaussian steps.

A step adds Gaussian noise of standard deviation σ·S to a sum of sensitivity S over a Poisson sample, in which each
example appears independently with probability q. Neighbouring datasets differ by adding or removing one example.

There are two accountants. *RDP* computes the Rényi divergence of one step at a list of orders α (``one_step.py``), adds it up
over the steps, and converts the sum to (ε, δ) by Balle et al. 2020, theorem 21. *PLD* composes discretised privacy loss
distributions (``privacy_loss.py``) and is tighter.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from dp_microadam.accounting.one_step import (
    ADDED,
    ORDERS,
    REMOVED,
    SMALLEST_NOISE_MULTIPLIER,
    Cap,
    Floats,
    PrivacyLoss,
    loss_of_one_step,
    rdp_of_capped_step,
)
from dp_microadam.accounting.privacy_loss import epsilon_of_composition, least_delta, reach_for
from dp_microadam.errors import InputError
from dp_microadam.validation import (
    require_in_open,
    require_in_open_closed,
    require_integer,
    require_one_of,
    require_positive,
)

ACCOUNTANTS = ("rdp", "pld")
DEFAULT_ACCOUNTANT = "pld"
"""The tighter one: the same ε needs less noise."""

# The largest number of steps that PLD composition was tested with; it takes about a second there.
PLD_MOST_STEPS = 10_000_000

# With less noise one step spends ε in the hundreds; the RDP bound is used instead of PLD.
PLD_LEAST_NOISE = 0.05

# A solved noise multiplier is rounded up to a multiple of this; the search ends at the largest.
NOISE_RESOLUTION = 1e-4
_MULTIPLES_PER_UNIT = round(1 / NOISE_RESOLUTION)
LARGEST_NOISE_MULTIPLIER = 100_000

# A search that need not be exact tells apart noise multipliers that differ by one in this many.
_ROUGHLY = 200


class PrivacyCost(Protocol):
    """What accountants compose: steps of one mechanism, or a selection among runs (``selection.py``), known by RDP alone."""

    @property
    def steps(self) -> int: ...

    def rdp(self, missing: int = 0) -> NDArray[np.float64]:
        """The Rényi divergence at each of ``ORDERS``, for a population of which up to ``missing`` units were removed before."""


@dataclass(frozen=True)
class SubsampledGaussian:
    """``steps`` steps of the Poisson-subsampled Gaussian mechanism. The privacy cost of a run is a list of these.

    With ``bands`` of correlated noise they are the steps that sample from one group (``bands.py`` has the theorem). ``cap``
    limits the number of examples, or users, in a step.
    """

    sample_rate: float
    noise_multiplier: float
    steps: int
    bands: int = field(default=1, repr=False)
    cap: Cap | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require_in_open_closed("sample_rate", self.sample_rate, 0, 1)
        require_positive("noise_multiplier", self.noise_multiplier)
        require_integer("steps", self.steps, 0)
        require_integer("bands", self.bands, 1)

    @property
    def least_noise(self) -> float:
        """The noise multiplier that PLD needs; where a cap is reached the sensitivity is twice as large."""
        return PLD_LEAST_NOISE if self.cap is None else 2 * PLD_LEAST_NOISE

    def rdp(self, missing: int = 0) -> NDArray[np.float64]:
        """The Rényi divergence of all steps at each of ``ORDERS``; with a cap it depends on how many units are ``missing``."""
        caps = [self.cap] if self.cap is None else [self.cap.without(fewer) for fewer in range(missing + 1)]
        per_step = [rdp_of_capped_step(self.sample_rate, self.noise_multiplier, cap) for cap in caps]
        return self.steps * np.max(per_step, axis=0)


def epsilon(spent: Sequence[PrivacyCost], delta: float, accountant: str | None = None) -> float:
    """The smallest ε that the accountant can certify at ``delta`` for the composition of all steps in ``spent``.

    By default the accountant is ``"pld"``, or ``"rdp"`` if a selection among runs is in ``spent``, of which PLD has no account.

    Formal guarantees: the composition of all steps, each of which may depend on the results of earlier ones, is
    (ε, δ)-differentially private under adding or removing one example, provided that every step sampled and added noise
    as its entry says, with independent and unpredictable randomness.

    >>> paper = SubsampledGaussian(sample_rate=4096 / 45000, noise_multiplier=3.0, steps=2480)
    >>> f"{epsilon([paper], delta=1e-5):.3f} by PLD, {epsilon([paper], delta=1e-5, accountant='rdp'):.3f} by RDP"
    '7.422 by PLD, 8.000 by RDP'
    """
    require_in_open("delta", delta, 0, 1)
    if accountant is None:
        accountant = DEFAULT_ACCOUNTANT if all(isinstance(part, SubsampledGaussian) for part in spent) else "rdp"
    require_one_of("accountant", accountant, ACCOUNTANTS)
    spent = [part for part in spent if part.steps > 0]
    if not spent:
        return 0.0
    return _rdp_epsilon(spent, delta) if accountant == "rdp" else _pld_epsilon(steps_alone(spent), delta)


def _conversion(delta: float) -> Floats:
    """The term of each order that turns its Rényi divergence into ε (Balle et al. 2020, theorem 21)."""
    alphas = np.array(ORDERS)
    return np.log1p(-1 / alphas) - (math.log(delta) + np.log(alphas)) / (alphas - 1)


def _rdp_epsilon(spent: Sequence[PrivacyCost], delta: float, missing: int = 0) -> float:
    found = _converted(np.sum([part.rdp(missing) for part in spent], axis=0), delta)
    # A cap that is hardly ever reached hurts RDP most, which has no small probabilities. That it is reached in any step may
    # count as a failure instead: its probability, which is the same on both datasets, is taken from δ.
    steps = [part for part in spent if isinstance(part, SubsampledGaussian)]
    reached = math.fsum(part.steps * part.cap.reached(part.sample_rate) for part in steps if part.cap is not None)
    if len(steps) < len(spent) or not 0 < reached < delta:
        return found
    return min(found, _converted(np.sum([replace(part, cap=None).rdp() for part in steps], axis=0), delta - reached))


def _converted(divergences: Floats, delta: float) -> float:
    # A divergence that could not be computed gives no bound. Without this a NaN would count as perfect privacy.
    return max(0.0, float(np.min(np.nan_to_num(divergences + _conversion(delta), nan=np.inf, posinf=np.inf))))


def steps_alone(spent: Iterable[PrivacyCost]) -> tuple[SubsampledGaussian, ...]:
    """The same, or an InputError for a selection among runs, of which privacy loss distributions are not known."""
    steps = tuple(part for part in spent if isinstance(part, SubsampledGaussian))
    if len(steps) < len(tuple(spent)):
        raise InputError("accountant is 'pld', which has no account of a selection among runs; it must be 'rdp'")
    return steps


def most_steps(
    sample_rate: float, noise_multiplier: float, epsilon_limit: float, delta: float, accountant: str, cap: Cap | None = None
) -> int:
    """The largest number of steps whose ε stays within ``epsilon_limit``; 0 if not even one does.

    Formal guarantees: ε of the returned number is at most the limit, and ε of one step more exceeds it, both as
    :func:`epsilon` computes them. A LookupError says that the accountant supports no number of steps that reaches the limit.
    """
    just_above = math.nextafter(epsilon_limit, math.inf)

    def excess(steps: int) -> float:
        return epsilon([SubsampledGaussian(sample_rate, noise_multiplier, steps, cap=cap)], delta, accountant) - just_above

    per_step = rdp_of_capped_step(sample_rate, noise_multiplier, cap)
    by_rdp = int(max(0.0, float(np.max((epsilon_limit - _conversion(delta)) / per_step))))
    if accountant == "rdp":
        return first_non_negative(excess, guess=by_rdp + 1, stride=1) - 1
    # PLD allows more steps than RDP; ε grows a little faster than the square root of the number of steps.
    start = min(max(1, by_rdp), PLD_MOST_STEPS)
    guess = int(start * (just_above / max(excess(start) + just_above, just_above / 100)) ** 1.8)
    return first_non_negative(excess, guess, stride=1 + guess // 256, largest=PLD_MOST_STEPS) - 1


def least_noise_multiplier(
    sample_rate: float,
    steps: int,
    epsilon_limit: float,
    delta: float,
    accountant: str,
    cap: Cap | None = None,
    *,
    exact: bool = True,
) -> float:
    """The smallest multiple of ``NOISE_RESOLUTION``, or unless ``exact`` of half a percent, that keeps within the limit.

    Formal guarantees: ε of the returned noise multiplier is at most the limit; that of the next smaller multiple
    exceeds it. A LookupError says that no noise multiplier up to ``LARGEST_NOISE_MULTIPLIER`` is enough.
    """
    guess = min(_gaussian_guess(sample_rate, steps, epsilon_limit, delta), LARGEST_NOISE_MULTIPLIER)
    every = 1 if exact else max(1, round(guess / _ROUGHLY / NOISE_RESOLUTION))
    return least_noise_within(
        epsilon_limit,
        lambda noise: epsilon([SubsampledGaussian(sample_rate, noise, steps, cap=cap)], delta, accountant),
        guess,
        every,
    )


def least_noise_within(limit: float, cost: Callable[[float], float], guess: float, every: int = 1) -> float:
    """The smallest multiple of ``every`` times ``NOISE_RESOLUTION`` whose ``cost``, an ε that falls with it, is allowed."""

    def margin(number: int) -> float:
        noise = number * every / _MULTIPLES_PER_UNIT
        found = cost(noise) if noise >= SMALLEST_NOISE_MULTIPLIER else math.inf
        if found > limit:
            return max(-1.0, min(math.log(limit) - math.log(found), -sys.float_info.min))
        # Logarithms are nearly linear, which the search makes use of; they are cut off where an end is far away.
        return 1.0 if found == 0 else min(1.0, max(0.0, math.log(limit) - math.log(found)))

    start = max(1, math.ceil(guess / NOISE_RESOLUTION / every))
    largest = LARGEST_NOISE_MULTIPLIER * _MULTIPLES_PER_UNIT // every
    return first_non_negative(margin, start, stride=1 + start // 64, largest=largest) * every / _MULTIPLES_PER_UNIT


def _gaussian_guess(sample_rate: float, steps: int, epsilon_limit: float, delta: float) -> float:
    """About the noise multiplier that is needed, from which accountants start.

    Many steps are about as revealing as one Gaussian mechanism with μ = q·√(T·(exp(σ⁻²) − 1)) (Bu et al. 2020, "Deep learning
    with Gaussian differential privacy").
    """

    def log_excess(log_mu: float) -> float:
        mu = math.exp(log_mu)
        found = ndtr(mu / 2 - epsilon_limit / mu) - math.exp(epsilon_limit + log_ndtr(-mu / 2 - epsilon_limit / mu))
        return math.log(max(found, sys.float_info.min)) - math.log(delta)

    mu = math.exp(brentq(log_excess, math.log(delta / 2), math.log(1e6 + 2 * epsilon_limit), xtol=1e-6))
    return 1 / math.sqrt(math.log1p((mu / sample_rate) ** 2 / steps))


def first_non_negative(function: Callable[[int], float], guess: int, stride: int, largest: int = 2**53) -> int:
    """The first whole number n ≥ 1 with ``function(n) >= 0``, for a function that grows.

    Starts at the guess and moves in growing strides until the change of sign is bracketed, then interpolates. Every third
    step is a bisection. A LookupError says that the function is still negative at ``largest``.
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


def _pld_epsilon(spent: tuple[SubsampledGaussian, ...], delta: float) -> float:
    if any(part.noise_multiplier < part.least_noise for part in spent):
        return _rdp_epsilon(spent, delta)
    found = _pld_group_epsilon(spent, delta, 1)
    # Both hold. With a cap that is reached often, RDP has the tighter pair of distributions (``one_step.py``).
    return min(found, _rdp_epsilon(spent, delta)) if any(part.cap for part in spent) else found


@lru_cache(maxsize=256)
def _pld_group_epsilon(spent: tuple[SubsampledGaussian, ...], delta: float, group_size: int) -> float:
    """ε under adding or removing a group: the larger of the two directions."""
    largest = 0.0
    for losses in composed_losses(spent, delta, (REMOVED, ADDED), "for groups" if group_size > 1 else "for pld", group_size):
        largest = epsilon_of_composition(losses, delta, at_least=largest)
    return largest


def composed_losses(
    spent: Sequence[SubsampledGaussian], delta: float, changes: Sequence[str], purpose: str, group_size: int = 1
) -> list[list[tuple[PrivacyLoss, int]]]:
    """For each change of the data the loss of a step and the number of steps, if these can be composed for a ``purpose``."""
    steps = sum(part.steps for part in spent)
    if steps > PLD_MOST_STEPS:
        raise InputError(f"steps is {steps}; {purpose} it must be at most {PLD_MOST_STEPS}, which rdp does not need")
    for part in spent:
        if part.noise_multiplier < part.least_noise:
            least = f"{part.least_noise}{'' if part.cap is None else ' with max_batch_size'}"
            raise InputError(f"noise_multiplier is {part.noise_multiplier}; {purpose} it must be at least {least}")
    reach = reach_for(delta, steps)
    if reach is None:
        raise InputError(f"delta is {delta:g}; {purpose} it must be at least {least_delta(steps):.2g} after {steps} steps")
    if all(part.sample_rate == 1.0 and part.cap is None for part in spent):
        changes = changes[:1]  # without subsampling both directions are the same

    def loss(part: SubsampledGaussian, change: str) -> PrivacyLoss:
        return loss_of_one_step(part.sample_rate, part.noise_multiplier, reach, change, part.cap, group_size)

    return [[(loss(part, change), part.steps) for part in spent] for change in changes]


def group_epsilon(spent: Sequence[PrivacyCost], delta: float, group_size: int) -> float:
    """ε at ``delta`` for adding or removing up to ``group_size`` examples at once, by PLD.

    The number of sampled examples from a group of k is binomial, and each changes the sum by at most S. A step is therefore a
    mixture of Gaussians at 0, S, …, kS (Ganesh 2024, "Tight group-level DP guarantees for DP-SGD with sampling via mixture of
    Gaussians mechanisms"). With correlated noise it is not, since examples of different groups take part in neighbouring steps;
    those compositions, and a selection among runs, get the general bound, k·ε at δ·Σ exp(i·ε), i < k.

    Formal guarantees: as :func:`epsilon`, for two datasets where one is the other with up to ``group_size`` examples added,
    or with up to that many removed; not with some added and others removed.
    """
    require_in_open("delta", delta, 0, 1)
    require_integer("group_size", group_size, 1)
    spent = [part for part in spent if part.steps > 0]
    if not spent:
        return 0.0
    steps = tuple(part for part in spent if isinstance(part, SubsampledGaussian))
    if len(steps) < len(spent) or (group_size > 1 and any(part.bands > 1 for part in steps)):
        return _general_group_epsilon(spent, delta, group_size)
    return _pld_group_epsilon(steps, delta, group_size)


def _general_group_epsilon(spent: Sequence[PrivacyCost], delta: float, group_size: int) -> float:
    """ε for a group from ε for one example, by adding its members one at a time; by RDP, which takes any δ.

    If one example has (ε₁, δ₁), then k have (k·ε₁, δ₁·Σ exp(i·ε₁), i < k). The largest δ₁ whose sum stays within δ gives the
    smallest ε₁; it is approached from above, which never leaves it out because the right-hand side grows with δ₁. With a cap,
    (ε₁, δ₁) is that of the worst population that is left when some of the group are gone.
    """

    def largest_allowed(share: float) -> float:
        exponents = np.arange(group_size) * _rdp_epsilon(spent, share, group_size - 1)
        return delta * math.exp(-float(np.logaddexp.reduce(exponents)))

    share = delta
    for _ in range(200):
        least = largest_allowed(share)
        if least == 0.0:
            break
        if share <= least:
            return group_size * _rdp_epsilon(spent, share, group_size - 1)
        share = least if least < 0.999 * share else 0.998 * share
    raise InputError(f"group_size is {group_size}; the epsilon of so large a group is out of range, it must be smaller")
