"""The privacy loss distribution of one step, discretised so that it never understates δ.

The noise axis is cut into narrow cells. The mass of each goes to the losses at its two ends, so that the cell keeps its
probability under both datasets. Such a move only raises δ at every ε ("connect the dots": Doroshenko et al. 2022).
``privacy_loss.py`` composes what is made here. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

Floats = NDArray[np.float64]

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


@lru_cache(maxsize=32)
def loss_of_one_step(weights: tuple[float, ...], noise_multiplier: float, removed: bool, reach: float) -> PrivacyLoss:
    """The privacy loss of Σ w_j N(j, σ²) against N(0, σ²) (``removed``), or of N(0, σ²) against it.

    ``weights`` are w₀, w₁, …; a tail as small as that of the normal distribution beyond ``reach`` may be missing. Noise
    beyond ``reach`` standard deviations counts as an infinite loss on the side of large losses, and is moved up to the
    smallest loss on the other side.

    Formal guarantees: for every ε the δ of the returned distribution is at least that of the mechanism, up to a relative error
    of ``UNITS_OF_A_PROBABILITY`` roundings in each probability.
    """
    sigma = noise_multiplier
    most = len(weights) - 1
    ends, width = _cells(sigma, reach, most if removed else 0)
    ratios = _log_likelihood_ratios(weights, sigma, ends)

    # In each cell: the distance of its nodes from the end with the smaller loss, 1 − exp(smaller loss − loss) there, and the
    # same at the other end. Sums of positive terms throughout, so that no digits are lost however small the losses are.
    origin = slice(None, -1) if removed else slice(1, None)
    sign = 1.0 if removed else -1.0
    distances = np.append(_NODES, 1.0) * width
    changes = np.zeros((len(ends) - 1, len(distances)))
    slopes = np.zeros(len(ends))
    for j, weight in _components(weights):
        shares = np.exp(math.log(weight) + j * (2 * ends - j) / (2 * sigma**2) - ratios)
        slopes += shares * (j / sigma**2)
        changes += shares[origin, None] * np.expm1(sign * j * distances / sigma**2)
    drops = changes / (1 + changes) if removed else -changes

    log_density = -0.5 * ((ends[origin, None] + sign * distances[:-1]) / sigma) ** 2
    if removed:
        log_density += ratios[origin, None] + np.log1p(changes[:, :-1])
    masses = _masses(log_density, drops, width / sigma, origin)
    rounding = 16 * UNIT * (np.abs(ratios) + slopes * (np.abs(ends) + most) + min(1.0, math.fsum(weights[1:])))
    return _law(sign * ratios + rounding, masses, 0 if removed else -1, float(log_ndtr(-reach)))


@lru_cache(maxsize=32)
def loss_of_replaced_step(weights: tuple[float, ...], noise_multiplier: float, reach: float) -> PrivacyLoss:
    """The privacy loss of Σ w_j N(j, σ²) against Σ w_j N(−j, σ²), which is the same in both directions.

    ``weights`` and ``reach`` as in :func:`loss_of_one_step`, and so are the formal guarantees.
    """
    sigma = noise_multiplier
    most = len(weights) - 1
    ends, width = _cells(sigma, reach, most)
    above, below = (_log_likelihood_ratios(weights, sigma, side) for side in (ends, -ends))

    # As above. Within a cell the first ratio grows to 1 + rises times itself, and the second falls to 1 − falls times itself.
    origin = slice(None, -1)
    distances = np.append(_NODES, 1.0) * width
    rises, falls = np.zeros((2, len(ends) - 1, len(distances)))
    slopes = np.zeros(len(ends))
    for j, weight in _components(weights):
        up, down = (
            np.exp(math.log(weight) + j * (2 * side - j) / (2 * sigma**2) - ratios)
            for side, ratios in ((ends, above), (-ends, below))
        )
        slopes += (up + down) * (j / sigma**2)
        rises += up[origin, None] * np.expm1(j * distances / sigma**2)
        falls -= down[origin, None] * np.expm1(-j * distances / sigma**2)
    drops = (rises + falls) / (1 + rises)

    log_density = -0.5 * ((ends[origin, None] + distances[:-1]) / sigma) ** 2
    log_density += above[origin, None] + np.log1p(rises[:, :-1])
    masses = _masses(log_density, drops, width / sigma, origin)
    of_weights = 2 * min(1.0, math.fsum(weights[1:]))
    rounding = 16 * UNIT * (np.abs(above) + np.abs(below) + slopes * (np.abs(ends) + most) + of_weights)
    return _law(above - below + rounding, masses, 0, float(log_ndtr(-reach)))


def _cells(sigma: float, reach: float, furthest: float) -> tuple[Floats, float]:
    """The ends of the cells, from ``reach`` deviations below 0 to ``reach`` above ``furthest``, and their width."""
    width = 2.0 ** round(math.log2(sigma / _CELLS_PER_DEVIATION))  # a power of two: the ends of cells are exact
    last = math.ceil((furthest + reach * sigma) / width)
    return np.arange(-math.ceil(reach * sigma / width), last + 1, dtype=np.float64) * width, width


def _masses(log_density: Floats, drops: Floats, relative_width: float, origin: slice) -> Floats:
    """The probability at each end of the cells: what the nodes of a cell hold, divided over its two ends."""
    probabilities = np.exp(log_density) * (_NODE_WEIGHTS * relative_width / math.sqrt(2 * math.pi))
    at_nodes, at_end = drops[:, :-1], drops[:, -1:]
    flat = at_end == 0.0  # both ends have the same loss
    to_larger = np.where(flat, 1.0, at_nodes / np.where(flat, 1.0, at_end))
    to_smaller = np.where(flat, 0.0, (at_end - at_nodes) / np.where(flat, 1.0, at_end))
    masses = np.zeros(len(drops) + 1)
    masses[origin] += (probabilities * to_smaller).sum(axis=1)
    masses[slice(1, None) if origin.start is None else slice(None, -1)] += (probabilities * to_larger).sum(axis=1)
    return masses


def _law(losses: Floats, masses: Floats, smallest: int, log_tail: float) -> PrivacyLoss:
    masses[smallest] += math.exp(log_tail)
    kept = masses > 0
    return PrivacyLoss(losses[kept], np.log(masses[kept]), log_tail + math.log(2))


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
