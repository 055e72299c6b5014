"""What ε means for an attacker: the trade-off between false accusations and misses, and μ of Gaussian differential privacy.

An attacker looks at what a run published and says whether an example took part. Two error rates judge the attack: α, the share
of those who did not take part and are accused (false positives), and β, the share of those who did and are missed (false
negatives). For any attack β is at least f(α), the trade-off function of the run (Dong, Roth and Su 2022, "Gaussian
differential privacy"). From the privacy profile δ(ε), the larger of both directions,

    f(α) = max over ε ≥ 0 of  1 − δ(ε) − e^ε·α  and  e^(−ε)·(1 − δ(ε) − α).

Each ε gives two lines below f. With upper bounds on δ(ε) the lines only fall, so that the largest of finitely many lines is a
lower bound on f: here those of about a thousand ε, with δ(ε) from the composition of privacy loss distributions.

*μ*. A Gaussian mechanism with means μ standard deviations apart has the trade-off G_μ(α) = Φ(Φ⁻¹(1 − α) − μ). The smallest μ
with G_μ ≤ f says in one number what the curve says. It is found from the corners of the lines: between two corners f is linear
and G_μ convex, so that G_μ ≤ f at the corners is G_μ ≤ f. With subsampling the far tail of f is that of an example sampled in
every step, and a μ for arbitrarily small α would say little about others; the smallest rate it holds for belongs to μ. (Gomez
et al. 2025, "Gaussian DP for reporting differential privacy guarantees in machine learning", propose to report μ.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import ndtri

from dp_microadam.accounting.costs import PrivacyCost, SubsampledGaussian, composed_losses, steps_alone
from dp_microadam.accounting.one_step import ADDED, REMOVED, Floats, PrivacyLoss
from dp_microadam.accounting.privacy_loss import Window, window_from_zero
from dp_microadam.validation import require_in_open

SMALLEST_RATE = 1e-5
"""μ holds for attacks whose rates of false positives and of false negatives are both at least this."""

# How many ε have a line, at equal distances, and a quarter of that at equal ratios from a small one on; and the largest ε,
# above which exponentials leave floating point.
_LINES = 1024
_FINEST = 1e-5
_LARGEST_EPSILON = 300.0

# The range of δ(ε) that matters. A smaller one is resolved if δ(0) itself is smaller.
_LARGEST_DELTA = 0.5
_LEAST_DELTA = 1e-3 * SMALLEST_RATE
_NEGLIGIBLE_DELTA = 1e-11

# μ is rounded up to a multiple of one over this.
_MULTIPLES_OF_MU = 100


@dataclass(frozen=True, eq=False)
class TradeOff:
    """A lower bound on the trade-off of a run, as lines: ``ratios`` e^ε, growing from 1, and bounds ``deltas`` on δ(ε)."""

    ratios: Floats
    deltas: Floats

    def true_positives(self, rate: float) -> float:
        """The largest share of those who took part that an attack with this rate of false positives finds, rounded up.

        Formal guarantees: no attack on what the run published, whatever else the attacker knows, finds a larger share of those
        who took part while accusing at most ``rate`` of those who did not.
        """
        require_in_open("rate", rate, 0, 1)
        accused = float(np.min(self.deltas + self.ratios * rate))
        cleared = 1 - float(np.max((1 - self.deltas - rate) / self.ratios))
        return min(1.0, min(accused, cleared) * (1 + 1e-12))

    def false_negatives(self, rate: float) -> float:
        """f(α): the least share that an attack with this rate of false positives misses, rounded down."""
        return 1 - self.true_positives(rate)

    def delta(self, epsilon: float) -> float:
        """An upper bound on δ(ε), which is convex in e^ε: by interpolation between the lines."""
        return float(np.interp(math.exp(epsilon), self.ratios, self.deltas))

    def corners(self) -> tuple[Floats, Floats]:
        """Falling rates of false positives, and rates of true ones, at the corners up to the middle, where it is mirrored."""
        middle = float(np.max((1 - self.deltas) / (1 + self.ratios)))
        alphas = -np.diff(self.deltas) / np.diff(self.ratios)
        found = self.deltas[:-1] + self.ratios[:-1] * alphas
        inside = alphas < middle
        return np.append(middle, alphas[inside]), np.append(1 - middle, found[inside])


@dataclass(frozen=True)
class GaussianBound:
    """μ of Gaussian differential privacy as an upper bound, and the smallest error rates it holds for."""

    mu: float
    smallest_rate: float


def trade_off(spent: Sequence[PrivacyCost]) -> TradeOff:
    """The trade-off between false positives and false negatives after all steps in ``spent``, as a lower bound.

    Formal guarantees: for two datasets of which one is the other with one example added, and for both orders of the two, no
    attack has error rates below the curve; under the assumptions of :func:`~dp_microadam.accounting.costs.epsilon`.

    Raises:
        InputError: for what privacy loss distributions are not computed for: too many steps, too little noise, selections.

    >>> three = [SubsampledGaussian(sample_rate=1.0, noise_multiplier=math.sqrt(3), steps=3)]
    >>> f"{trade_off(three).true_positives(0.1):.4f}"  # a Gaussian mechanism with μ = 1 has Φ(1 − Φ⁻¹(0.9)) = 0.38914
    '0.3891'
    """
    parts = tuple(part for part in steps_alone(spent) if part.steps > 0)
    if not parts:
        return TradeOff(np.ones(1), np.zeros(1))
    return _trade_off(parts)


@lru_cache(maxsize=64)
def _trade_off(spent: tuple[SubsampledGaussian, ...]) -> TradeOff:
    both = composed_losses(spent, _LEAST_DELTA, (REMOVED, ADDED), "for the trade-off of attacks")
    profiles = [_windows(losses) for losses in both]
    largest = min(max((epsilon for windows in profiles for _, epsilon in windows), default=0.0), _LARGEST_EPSILON)
    fine = np.geomspace(_FINEST * largest, largest, _LINES // 4) if largest else np.zeros(1)
    epsilons = np.unique(np.concatenate([np.linspace(0, largest, _LINES), fine]))
    negligible = np.full_like(epsilons, _NEGLIGIBLE_DELTA)
    bounds = [np.min([window.deltas(epsilons) for window, _ in found], axis=0) if found else negligible for found in profiles]
    return _needed_lines(np.exp(epsilons), np.max(bounds, axis=0))


def _windows(parts: Sequence[tuple[PrivacyLoss, int]]) -> list[tuple[Window, float]]:
    """The composition for δ of several sizes, three orders apart, from the largest that δ(0) exceeds.

    Each is right where δ(ε) is of its size: at δ near 1 rounding errors of one for 10⁻³ are larger than what an attack misses.
    """
    found: list[tuple[Window, float]] = []
    delta = _LARGEST_DELTA
    while delta > _NEGLIGIBLE_DELTA / 2:
        try:
            found.append(window_from_zero(parts, delta))
            delta /= 10**3
        except LookupError:
            delta /= 10
    return found


def _needed_lines(ratios: Floats, deltas: Floats) -> TradeOff:
    """The lines that are not below others everywhere: the corners of the lower convex hull of δ as a function of e^ε."""
    kept: list[tuple[float, float, float]] = []  # e^ε, δ, and the slope of the hull up to there
    for ratio, delta in zip(ratios.tolist(), deltas.tolist(), strict=True):
        slope = -math.inf
        while kept:
            slope = (delta - kept[-1][1]) / (ratio - kept[-1][0])
            if slope > kept[-1][2]:
                break
            kept.pop()
        kept.append((ratio, delta, slope))
    falling = np.array([line for line in kept if line[2] < 0])
    return TradeOff(falling[:, 0], falling[:, 1])


def gaussian_bound(curve: TradeOff, rate: float = SMALLEST_RATE) -> GaussianBound | None:
    """The smallest μ, rounded up to two decimals, whose Gaussian trade-off lies below ``curve`` from ``rate`` on, or None.

    Both curves are symmetric, so that the same holds where the rate of false negatives is at least ``rate``.

    Formal guarantees: every attack whose rates of false positives α and of false negatives are both at least
    ``smallest_rate`` misses at least G_μ(α).
    """
    alphas, found = curve.corners()
    at_rate = curve.true_positives(rate)
    needed = ndtri(found) - ndtri(alphas)
    mu = max([math.inf if at_rate >= 1 else float(ndtri(at_rate) - ndtri(rate)), *needed[alphas > rate]])
    if not math.isfinite(mu):
        return None
    return GaussianBound(math.ceil(max(mu, 0.0) * (1 + 1e-9) * _MULTIPLES_OF_MU) / _MULTIPLES_OF_MU, rate)
