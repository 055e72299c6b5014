"""Composition of privacy loss distributions (PLD); every numerical error is bounded and makes ε larger, never smaller.

A step samples from a mixture of Gaussians N(j, σ²) with weights w_j on one dataset and from N(0, σ²) on its neighbour. With P
and Q the two distributions in either order, the privacy loss is log(dP/dQ) under P. Losses of steps add up, and the
composition is (ε, δ)-private in that direction for δ(ε) = P(loss infinite) + E[max(0, 1 − exp(ε − loss))].

1. *Discretising.* ``one_step.py`` cuts the noise axis into narrow cells, whose mass goes to the losses at their ends. These
   are moved to a uniform grid in the same way, so that P and Q keep their totals.
2. *Composing.* Convolution by Fourier transform leaves an absolute error of about 1e-16 of the largest probability, which
   would hide a tail of 1e-12. So the distribution is tilted first: each probability is multiplied by exp(θ·loss), with θ
   such that most of the composition's mass lies near ε. Undoing the tilt makes the error small compared with δ.
3. *Bounding.* Mass that a circular convolution folds into the window only raises δ and may stay. The mass above the window
   (by Chernoff's bound), truncated losses (counted as infinite) and bounds on all rounding are added to δ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr

from dp_microadam.accounting.one_step import UNIT, UNITS_OF_A_PROBABILITY, Floats, PrivacyLoss

Integers = NDArray[np.int64]

# How many standard deviations of noise are considered: the smallest of these whose tail is negligible over all steps. No
# more, because a long tail loosens Chernoff's bound, from which tilt and window are chosen.
_REACHES = tuple(number / 4 for number in range(20, 149))

# The uniform grid is refined until it raises ε by at most this fraction, unless that would take more cells than the limit.
_GRID_TOLERANCE = 2e-5
_MOST_CELLS = 2**21

# The fraction of δ allowed for truncated losses, and for mass folded into the window from below; the initial tilted mass above
# the window, and the fraction of δ it may have when folded.
_CUT = 1e-6
_FOLDED = 1e-6

# The fraction of δ that rounding bounds may take before another tilt is tried, and how many tilts are tried.
_ROUNDING = 1e-5
_MOST_TILTS = 8

# Tilts θ = 2^(j/4). Only a few values, so that cached transforms can be reused when a step is added.
_TILTS_PER_DOUBLING = 4
_SMALLEST_TILT, _LARGEST_TILT = -40 * _TILTS_PER_DOUBLING, 50 * _TILTS_PER_DOUBLING

# Rounding. An exponential of a sum of terms is as right as a discretised probability; every value of a transform of n = 2^k
# numbers is right up to log2(n) times this many units, relative to the sum of their magnitudes (each of the log2(n) stages
# rounds partial sums of them, by less than 4√2 units and the error of a root of unity: Higham 2002, section 24.1); a power z^T
# up to T times this many.
_UNITS_OF_A_TRANSFORM = 8
_UNITS_OF_A_POWER = 64

# Terms below exp of minus this are left out: frequencies of a spectrum, and losses far above ε. A bound on their sum is added.
_NEGLIGIBLE_LOG = 80.0
_FAR_ABOVE = 40.0


@dataclass(frozen=True, eq=False)
class _GridLoss:
    """A privacy loss distribution on the multiples of ``spacing``; an index may occur several times."""

    spacing: float
    indices: Integers
    log_masses: Floats


@lru_cache(maxsize=64)
def _on_grid(law: PrivacyLoss, spacing: float) -> _GridLoss:
    """Each mass is split over its two neighbours on the grid so that P and Q keep their total."""
    below = np.floor(law.losses / spacing)
    above_it = law.losses - below * spacing  # exact, the spacing is a power of two
    with np.errstate(divide="ignore"):
        log_up = np.log(-np.expm1(-above_it)) - math.log(-math.expm1(-spacing))
        log_down = np.log(-np.expm1(above_it - spacing)) - above_it - math.log(-math.expm1(-spacing))
    indices = np.concatenate([below, below + 1]).astype(np.int64)
    log_masses = np.concatenate([law.log_masses + log_down, law.log_masses + log_up])
    kept = log_masses > -np.inf
    return _GridLoss(spacing, indices[kept], log_masses[kept])


@lru_cache(maxsize=1024)
def _log_moment(law: PrivacyLoss | _GridLoss, tilt: float) -> float:
    """log E[exp(θ·loss); loss finite]."""
    losses = law.losses if isinstance(law, PrivacyLoss) else law.indices * law.spacing
    exponents = law.log_masses + tilt * losses
    largest = float(exponents.max())
    return largest + math.log(float(np.exp(exponents - largest).sum()))


@dataclass(frozen=True, eq=False)
class _Transform:
    """The discrete Fourier transform z of a tilted distribution: log z, and log(|z| + a bound on its error)."""

    log_moment: float
    shift: int
    relative_error: float
    log_values: NDArray[np.complex128]
    log_bounds: Floats


@lru_cache(maxsize=4)
def _transform(law: _GridLoss, tilt: float, cells: int) -> _Transform:
    """The transform over ``cells`` residues of the grid, of the distribution tilted by exp(θ·loss) and scaled to sum 1."""
    log_moment = _log_moment(law, tilt)
    exponents = law.log_masses + tilt * (law.indices * law.spacing) - log_moment
    tilted = np.exp(exponents)
    # The cell of most mass is moved to zero and transformed exactly; the error then is relative to what remains.
    shift = int(law.indices[np.argmax(tilted)])
    folded = np.bincount((law.indices - shift) % cells, weights=tilted, minlength=cells)
    peak, folded[0] = float(folded[0]), 0.0
    values = peak + np.fft.rfft(folded)
    error = _UNITS_OF_A_TRANSFORM * UNIT * math.log2(cells) * float(folded.sum()) + 8 * UNIT
    magnitudes = np.abs(values)
    felt = exponents > -_NEGLIGIBLE_LOG
    largest_term = float(np.max(np.abs(law.log_masses[felt]) + tilt * np.abs(law.indices[felt]) * law.spacing)) + abs(
        log_moment
    )
    return _Transform(
        log_moment,
        shift,
        (UNITS_OF_A_PROBABILITY + len(tilted) + 4 * largest_term) * UNIT,
        np.log(np.where(magnitudes > UNIT, values, UNIT)),
        np.log(np.maximum(magnitudes, UNIT) + error),
    )


def epsilon_of_composition(parts: Sequence[tuple[PrivacyLoss, int]], delta: float, at_least: float = 0.0) -> float:
    """ε at ``delta`` of the composition of ``parts``, pairs of a distribution and its number of steps; at least ``at_least``.

    Formal guarantees: δ(ε) of the composition is at most ``delta``; all errors are bounded as this module describes. The result
    is never above Chernoff's bound for the same distributions, unless that is below ``at_least``.
    """
    infinite = sum(steps * math.exp(law.log_infinite) for law, steps in parts)
    found, index = _chernoff_epsilon(parts, delta - infinite)
    for _ in range(_MOST_TILTS):
        if found <= at_least:
            break
        previous = found
        found, rounding = _epsilon_by_tilt(parts, index, delta, infinite, previous)
        if (rounding < _ROUNDING and found > previous / 2) or found > previous * (1 - _GRID_TOLERANCE):
            break
        # Chernoff's bound was loose. Start again with the tilt and the grid that suit the ε just found.
        index = _minimize(lambda j: _log_moments(parts, _tilt(j)) + _log_largest_share(_tilt(j)) - _tilt(j) * found)  # noqa: B023
    return max(found, at_least)


def _epsilon_by_tilt(
    parts: Sequence[tuple[PrivacyLoss, int]], index: int, delta: float, infinite: float, largest: float
) -> tuple[float, float]:
    """ε, at most ``largest``, from the composition under one tilt, and the fraction of δ that bounds its rounding."""
    tilt = _tilt(index)
    spacing = _spacing(parts, tilt, largest)
    below = 12 / tilt  # how far below ``largest`` the window begins at least
    log_tilted_tail = math.log(_CUT)  # bounds the mass above the window, after tilting
    while True:
        grids = [(_on_grid(law, spacing), steps) for law, steps in parts]
        top, other = _window_top(parts, grids, index, log_tilted_tail)
        reach = max(top - largest + below, -math.log(_CUT * delta) / tilt)
        cells = 2 ** max(6, math.ceil(math.log2(reach / spacing)))
        if cells > _MOST_CELLS:
            spacing *= 2
            continue
        top += (cells * spacing - reach) / 2
        log_beyond = _log_moments(grids, other) - other * top
        window = Window(grids, tilt, cells, math.ceil(top / spacing), infinite + math.exp(log_beyond))
        found = window.epsilon(delta, largest)
        if found is None:
            below *= 4
            continue
        # What lies above the window is folded into it, and counts up to this share of δ.
        log_folded = log_beyond + tilt * (top - found) + _log_largest_share(tilt) - math.log(delta)
        if log_folded <= math.log(_FOLDED):
            return found, math.exp(window.log_rounding(found) - math.log(delta))
        log_tilted_tail -= log_folded - math.log(_FOLDED) + 5


def window_from_zero(parts: Sequence[tuple[PrivacyLoss, int]], delta: float) -> tuple[Window, float]:
    """The tilted composition on a window that begins at a loss of at most 0, tilted for ``delta``, and Chernoff's bound on ε.

    Formal guarantees: as of every window, for each ε ≥ 0. Bounds on δ(ε) are close where δ(ε) is not far from ``delta``;
    everywhere else their absolute error is small. A LookupError says that δ(0) is below ``delta``: a smaller one is needed.
    """
    infinite = sum(steps * math.exp(law.log_infinite) for law, steps in parts)
    largest, index = _chernoff_epsilon(parts, delta - infinite)
    if largest <= 0:
        raise LookupError(f"epsilon is 0 at delta {delta}")
    tilt = _tilt(index)
    spacing = _spacing(parts, tilt, largest)
    while True:
        grids = [(_on_grid(law, spacing), steps) for law, steps in parts]
        # Mass above the window is folded down to 0, where undoing the tilt makes it larger: little of it may be left.
        top, other = _window_top(parts, grids, index, 2 * math.log(_CUT))
        reach = max(top, -math.log(_CUT * delta) / tilt) + 4 * spacing
        cells = 2 ** max(6, math.ceil(math.log2(reach / spacing)))
        if cells <= _MOST_CELLS:
            break
        spacing *= 2
    top += (cells * spacing - reach) / 2
    beyond = infinite + math.exp(_log_moments(grids, other) - other * top)
    return Window(grids, tilt, cells, math.ceil(top / spacing), beyond), largest


def _window_top(
    parts: Sequence[tuple[PrivacyLoss, int]], grids: Sequence[tuple[_GridLoss, int]], index: int, log_tilted_tail: float
) -> tuple[float, float]:
    """A loss above which the tilted composition has little mass by Chernoff's bound, and the θ of that bound."""
    tilt, log_moment = _tilt(index), _log_moments(parts, _tilt(index))

    def bound(other: int) -> float:
        return (_log_moments(parts, _tilt(other)) - log_moment - log_tilted_tail) / (_tilt(other) - tilt)

    other = _tilt(_minimize(bound, index + 1))
    return (_log_moments(grids, other) - _log_moments(grids, tilt) - log_tilted_tail) / (other - tilt), other


def _tilt(index: int) -> float:
    return 2.0 ** (index / _TILTS_PER_DOUBLING)


def _log_moments(parts: Sequence[tuple[PrivacyLoss | _GridLoss, int]], tilt: float) -> float:
    """log E[exp(θ·loss)] of the composition, rounded up."""
    moments = [(steps, _log_moment(law, tilt)) for law, steps in parts]
    return math.fsum(steps * (moment + UNITS_OF_A_PROBABILITY * UNIT * (1 + abs(moment))) for steps, moment in moments)


def _log_largest_share(tilt: float) -> float:
    """log of the largest value of exp(−θx)·(1 − exp(−x)) over x ≥ 0."""
    return -tilt * math.log1p(1 / tilt) - math.log1p(tilt)


def _chernoff_epsilon(parts: Sequence[tuple[PrivacyLoss, int]], delta: float) -> tuple[float, int]:
    """An upper bound on ε from δ(ε) ≤ E[exp(θ(loss − ε))]·max exp(−θx)(1 − exp(−x)), and the tilt of the best θ."""

    def bound(index: int) -> float:
        tilt = _tilt(index)
        return (_log_moments(parts, tilt) + _log_largest_share(tilt) - math.log(delta)) / tilt

    best = _minimize(bound)
    return bound(best), best


def _minimize(function: Callable[[int], float], smallest: int = _SMALLEST_TILT) -> int:
    """The tilt that minimizes a quasi-convex function, such as a convex function of θ divided by a linear one."""
    low, high = smallest, _LARGEST_TILT
    while high > low:
        middle = (low + high) // 2
        if function(middle) <= function(middle + 1):
            high = middle
        else:
            low = middle + 1
    return low


def _spacing(parts: Sequence[tuple[PrivacyLoss, int]], tilt: float, epsilon: float) -> float:
    """The widest grid spacing, a power of two, that raises Chernoff's bound by at most the tolerated share of ``epsilon``."""
    allowed = _GRID_TOLERANCE * epsilon * tilt
    exact = math.fsum(steps * _log_moment(law, tilt) for law, steps in parts)
    spacing = 2.0 ** math.floor(math.log2(epsilon))
    for _ in range(60):
        if math.fsum(steps * _log_moment(_on_grid(law, spacing), tilt) for law, steps in parts) - exact <= allowed:
            break
        spacing /= 2
    return spacing


class Window:
    """The tilted composition on a window of the grid that ends at index ``top``, with bounds on its errors."""

    def __init__(self, grids: Sequence[tuple[_GridLoss, int]], tilt: float, cells: int, top: int, beyond: float) -> None:
        transforms = [(_transform(law, tilt, cells), steps) for law, steps in grids]
        log_bounds: Floats = np.sum([steps * part.log_bounds for part, steps in transforms], axis=0)
        band = np.flatnonzero(log_bounds > -_NEGLIGIBLE_LOG)
        log_values = np.sum([steps * part.log_values[band] for part, steps in transforms], axis=0)
        log_bounds = log_bounds[band]
        spectrum = np.zeros(cells // 2 + 1, dtype=np.complex128)
        spectrum[band] = np.exp(log_values)
        composed = np.fft.irfft(spectrum, cells)
        total = sum(steps for _, steps in transforms)
        # |z^T − ẑ^T| ≤ (|ẑ| + error)^T − |ẑ|^T, summed over all frequencies
        misses = np.maximum(-np.expm1(log_values.real - log_bounds), 0.0) + _UNITS_OF_A_POWER * UNIT * total
        misses += _UNITS_OF_A_TRANSFORM * UNIT * math.log2(cells)  # of the inverse transform
        self.error = 2.01 / cells * float(np.sum(np.exp(log_bounds) * misses)) + math.exp(-_NEGLIGIBLE_LOG)
        self.spacing, self.tilt, self.beyond = grids[0][0].spacing, tilt, beyond
        self.bottom = top - cells + 1
        shift = sum(steps * part.shift for part, steps in transforms)
        self.probabilities = np.maximum(np.roll(composed, (shift - self.bottom) % cells), 0.0)
        self.log_moment = math.fsum(steps * part.log_moment for part, steps in transforms)
        self.log_factor = 1.01 * math.fsum(steps * part.relative_error for part, steps in transforms)

    def log_delta(self, epsilon: float) -> float:
        """log of an upper bound on δ(ε)."""
        tilt, spacing = self.tilt, self.spacing
        first = math.floor(epsilon / spacing) + 1
        count = math.ceil(_FAR_ABOVE / (tilt * spacing))
        start = max(0, first - self.bottom)
        inside = self.probabilities[start : start + count]
        excess = (np.arange(len(inside)) + (start + self.bottom)) * spacing - epsilon
        counted = float(np.sum(inside * np.exp(-tilt * excess) * -np.expm1(-excess)))
        left_out = 1.01 * math.exp(-_FAR_ABOVE) * min(1.0, _FAR_ABOVE / tilt)
        log_counted = math.log(counted + left_out) + self.log_moment - tilt * epsilon
        rounded = UNITS_OF_A_PROBABILITY * UNIT + 8 * UNIT * (abs(self.log_moment) + tilt * epsilon)
        terms = (log_counted, self.log_rounding(epsilon), math.log(self.beyond))
        return float(np.logaddexp.reduce(terms)) + self.log_factor + rounded

    def deltas(self, epsilons: Floats) -> Floats:
        """Upper bounds on δ at many ε ≥ 0 at once, for a window from zero.

        δ(ε) = A − exp(ε)·B, where A and B are the sums of p and of p·exp(−loss) over all losses above ε. Both are summed from
        the far end, and what their difference may lose by rounding is added. No probability is counted as more than 1.
        """
        inside = self.probabilities[-self.bottom :]
        losses = np.arange(len(inside)) * self.spacing
        with np.errstate(divide="ignore"):
            masses = np.exp(np.minimum(np.log(inside) + self.log_moment - self.tilt * losses, 0.0))
        above = [np.append(np.cumsum(terms[::-1])[::-1], 0.0) for terms in (masses, masses * np.exp(-losses))]
        first = np.minimum(np.floor(epsilons / self.spacing).astype(np.int64) + 1, len(inside))
        a, b = above[0][first], np.exp(epsilons) * above[1][first]
        rounded = 8 * UNIT * (abs(self.log_moment) + self.tilt * float(losses[-1]) + len(inside))
        lost = np.exp(np.minimum(self.log_rounding(0.0) - self.tilt * epsilons, 0.0))
        found = np.maximum(a - b, 0.0) + rounded * (a + b) + lost + self.beyond
        return np.minimum(found * math.exp(self.log_factor + UNITS_OF_A_PROBABILITY * UNIT), 1.0)

    def log_rounding(self, epsilon: float) -> float:
        """log of the largest change of δ(ε) that errors of all probabilities within their bounds can cause."""
        share = math.exp(_log_largest_share(self.tilt))
        cells = min(len(self.probabilities) * share, 1 / (self.spacing * self.tilt * (self.tilt + 1)) + share)
        return math.log(self.error * cells) + self.log_moment - self.tilt * epsilon

    def epsilon(self, delta: float, largest: float) -> float | None:
        """The smallest ε up to ``largest`` with δ(ε) ≤ ``delta``; None if that lies below the window."""
        lowest = max(0.0, self.bottom * self.spacing)
        target = math.log(delta)
        if self.log_delta(lowest) <= target:
            return 0.0 if lowest == 0.0 else None
        if self.log_delta(largest) > target:
            return largest
        root = brentq(lambda e: self.log_delta(e) - target, lowest, largest, xtol=1e-9 * largest, rtol=1e-12)
        upper = min(largest, root + 2e-9 * largest)
        return float(upper) if self.log_delta(upper) <= target else largest


def reach_for(delta: float, steps: int) -> float | None:
    """Standard deviations of noise to consider so that the rest is negligible; None if δ is below :func:`least_delta`."""
    return next((reach for reach in _REACHES if delta >= _least_delta(reach, steps)), None)


def least_delta(steps: int) -> float:
    """The smallest δ that double precision can resolve after ``steps`` steps."""
    return _least_delta(_REACHES[-1], steps)


def _least_delta(reach: float, steps: int) -> float:
    return math.exp(math.log(2 * steps / _CUT) + float(log_ndtr(-reach)))
