"""How much of a weak signal an optimizer keeps under much noise: efficiency of selection, signs and four bits.

    python -m research.theory.efficiency [--density 0.01 0.1 0.3]

A coordinate has a constant gradient g and fresh noise N(0, τ²) in every step, with g far below τ, as in private training. An
update rule turns T noisy gradients into a displacement x. Its efficiency is

    e = (dE[x]/dg)²·τ² / (T·Var x)    at g = 0, for large T.

By the Cramér–Rao bound e ≤ 1, and SGD reaches it: x is proportional to the sum of all gradients, which is sufficient for g. So
no rule beats a linear one, and e is the part of the steps that a rule makes use of.

Error feedback with selection adds gradients up until |a| ≥ θ, moves the weight, and starts again at zero: a random walk with
Gaussian steps that is stopped on leaving (−θ, θ). Top-k in a large block is such a rule, with the θ at which a fraction
``density`` of the coordinates is selected in a step. Let a be the value at selection, and N the steps that it took.

- Steps proportional to a: the displacement is the sum of all gradients but the residual. e = 1.
- Steps of fixed size with the sign of a, as MicroAdam takes under noise. Per selection Var x = 1, and dE[sign a]/dg =
  E[sign(a)·a]/τ² = E|a|/τ², because a/τ² is the score of the walk. With Wald's second identity, E a² = τ²·E N,

      e = (E|a|/τ²)²·τ²/E N = (E|a|)²/E a².

  If all values at selection were equal, nothing would be lost. Without feedback (density 1) a is Gaussian and e = 2/π.
- Four bits round the residual to 16 levels between the extremes of its bucket. An error of variance u²/12 for levels u apart is
  added in every step and never taken back: e is divided by 1 + u²/(12τ²). The extremes are taken to be ±θ, and independent
  errors are assumed.
- What is still in the residual r has not arrived. By the same score, dE[r]/dg = E[r²]/τ²: the signal of that many steps is
  missing at the end of the run, and this is how far the weights lag behind.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr

from dp_microadam.validation import require_in_open_closed

Array = NDArray[np.float64]

DENSITIES = (0.01, 0.03, 0.1, 0.3, 1.0)
LEVELS = 15
"""Distances between the 16 values of a 4-bit code."""

_NODES = 200


@dataclass(frozen=True)
class Efficiency:
    """What selecting a fraction ``density`` of the coordinates with error feedback does to a weak signal; τ = 1.

    ``threshold`` is θ, ``size`` the mean of |a| at selection, ``signs`` the efficiency of steps with the sign of a,
    ``four_bits`` the factor by which a 4-bit residual changes any of these, and ``lag`` the number of steps whose signal is
    in the residual.
    """

    density: float
    threshold: float
    size: float
    signs: float
    four_bits: float
    lag: float


def efficiency(density: float) -> Efficiency:
    """Solve for the threshold of a density, and integrate over the walk until it is crossed.

    >>> found = efficiency(0.1)
    >>> f"signs keep {found.signs:.3f} of the signal, {found.lag:.1f} steps behind"
    'signs keep 0.975 of the signal, 1.4 steps behind'
    """
    require_in_open_closed("density", density, 0.0, 1.0)
    if density == 1:
        return Efficiency(1.0, 0.0, math.sqrt(2 / math.pi), 2 / math.pi, 1.0, 0.0)
    threshold = brentq(lambda one: 1 / _visits(one)[2] - density, 1e-3, 3 / np.sqrt(density) + 1, xtol=1e-12)
    nodes, weights, steps = _visits(threshold)
    sources, masses = np.append(nodes, 0.0), np.append(weights, 1.0)
    size, square = (float(masses @ _beyond(sources, threshold, power)) for power in (1, 2))
    # Before each step the residual is 0 or one of the nodes, as often as the walk visits them.
    lag = float(weights @ nodes**2) / steps
    levels = 2 * threshold / LEVELS
    return Efficiency(density, threshold, size, size**2 / square, 1 / (1 + levels**2 / 12), lag)


def _visits(threshold: float) -> tuple[Array, Array, float]:
    """Points within ±θ, how often a walk from 0 visits them before it leaves (as weights of a sum), and its expected steps."""
    # Visits have the density m = φ + ∫ φ(· − y)·m(y) dy; the integral is a sum over Gauss–Legendre nodes.
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    nodes, weights = threshold * nodes, threshold * weights
    kernel = _density(nodes[:, None] - nodes[None, :]) * weights
    visits = np.linalg.solve(np.eye(_NODES) - kernel, _density(nodes)) * weights
    return nodes, visits, 1 + float(visits.sum())


def _density(x: Array) -> Array:
    return np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)


def _beyond(start: Array, threshold: float, power: int) -> Array:
    """E of |start + z|^power where it is at least θ and 0 elsewhere, for a standard normal z; power 1 or 2."""
    total = np.zeros_like(start)
    for mean in (start, -start):  # the part above θ, and by symmetry the part below −θ
        edge = threshold - mean
        above, at_edge = ndtr(-edge), _density(edge)
        total += mean * above + at_edge if power == 1 else (mean**2 + 1) * above + (mean + threshold) * at_edge
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Efficiency of selection with error feedback under much noise.")
    parser.add_argument("--density", type=float, nargs="+", default=list(DENSITIES), metavar="P")
    options = parser.parse_args()
    rows = [efficiency(density) for density in options.density]
    print("density  threshold/τ  signs  4 bits  lag in steps")
    for row in rows:
        print(f"{row.density:7.3g}  {row.threshold:11.2f}  {row.signs:5.3f}  {row.four_bits:6.3f}  {row.lag:12.1f}")


if __name__ == "__main__":
    main()
