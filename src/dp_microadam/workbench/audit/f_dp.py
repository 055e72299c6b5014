"""Lower bounds on μ from membership guesses of one run, by the f-DP analysis of the guessing game.

Mahloujifar, Melis and Chaudhuri 2024, "Auditing f-differential privacy in one run": of m canaries each takes part with
probability ½; an attack makes c' guesses and leaves out the rest. If the run has trade-off function f, and i guesses are right
with probability p_i, then for every set I of numbers

    Σ_(i ∈ I) p_i·i/m  ≤  1 − f( Σ_(i ∈ I) p_i·(c' − i)/m ).

A trade-off function is refuted at level τ if c or more right guesses with probability τ contradict these inequalities: with I
from c on, then also c − 1, and so on, the left sides force so many wrong guesses that both sums together exceed c'/m, their
value over all i. Where the curve of a run is known, this can tell more than the analysis for (ε, δ) alone (``statistics.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy.special import log_ndtr, ndtr, ndtri

from dp_microadam.accounting.trade_off import TradeOff
from dp_microadam.validation import require_in_open, require_integer

Inverse = Callable[[float], float]
"""The rate of false positives that a rate of true positives needs at least: the inverse of 1 − f."""

_LARGEST_MU = 60.0
_BISECTIONS = 40


def gaussian_curve(mu: float) -> Inverse:
    """The inverse of 1 − G_μ for the Gaussian trade-off."""
    return lambda found: float(ndtr(ndtri(found) - mu)) if found > 0 else 0.0


def curve_of(claimed: TradeOff) -> Inverse:
    """The inverse of 1 − f for a curve that is symmetric in the two kinds of error, as those of privacy plans are."""
    return lambda found: max(0.0, claimed.false_negatives(1 - found)) if 0 < found < 1 else max(0.0, min(1.0, found))


def refutes(curve: Inverse, canaries: int, guesses: int, correct: int, significance: float) -> bool:
    """Whether ``correct`` or more right guesses refute the trade-off function at this level.

    Formal guarantees: if each canary was included independently with probability ½, and the guesses are computed from the
    outputs of a run whose trade-off function is nowhere below the given one, this is true with probability at most
    ``significance``, for a number of guesses that was fixed in advance.
    """
    require_integer("canaries", canaries, 1)
    require_integer("guesses", guesses, 1, canaries)
    require_integer("correct", correct, 0, guesses)
    require_in_open("significance", significance, 0, 1)
    right, wrong = significance * correct / canaries, significance * (guesses - correct) / canaries
    for number in range(correct - 1, -1, -1):
        needed = max(wrong, curve(right))
        if needed == wrong:
            break  # neither changes any more
        right = min(1.0, right + number / (guesses - number) * (needed - wrong))
        wrong = needed
    return right + wrong > guesses / canaries


def one_run_mu(canaries: int, guesses: int, correct: int, confidence: float) -> float:
    """Lower bound on μ from ``correct`` right guesses, at ``confidence``; 0 if they rule out no μ.

    Formal guarantees: if the run is μ-Gaussian differentially private, the result exceeds μ with probability at most 1 −
    ``confidence``, as in :func:`refutes`.
    """
    require_in_open("confidence", confidence, 0, 1)

    def refuted(mu: float) -> bool:
        return refutes(gaussian_curve(mu), canaries, guesses, correct, 1 - confidence)

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, _LARGEST_MU
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def epsilon_of_gaussian(mu: float, delta: float) -> float:
    """ε at ``delta`` of a μ-Gaussian differentially private mechanism (Balle and Wang 2018, theorem 8).

    >>> f"{epsilon_of_gaussian(1.0, 0.126936):.3f}"
    '1.000'
    """
    require_in_open("delta", delta, 0, 1)
    if mu <= 0:
        return 0.0

    def log_delta(epsilon: float) -> float:
        first = float(log_ndtr(mu / 2 - epsilon / mu))
        second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
        return first + math.log(-math.expm1(second - first)) if second < first else -math.inf

    low, high = 0.0, 1.0
    if log_delta(low) <= math.log(delta):
        return 0.0
    while log_delta(high) > math.log(delta):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if log_delta(middle) > math.log(delta) else (low, middle)
    return low
