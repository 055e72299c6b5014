"""Lower bounds on ε and μ from membership guesses: the statistics behind all audits, and the findings that they lead to.

*One run* (Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", appendix D): of m canaries each takes
part with probability ½, independently. Of r guesses about which did, (ε, δ)-differential privacy lets v or more be right with
probability at most

    P[B ≥ v] + 2mδ · max over i of P[v > B ≥ v − i] / i,        B ~ Binomial(r, e^ε/(1 + e^ε)).

*One run, by its trade-off curve* (Mahloujifar, Melis and Chaudhuri 2024, "Auditing f-differential privacy in one run"): if i
of r guesses are right with probability p_i, and the run has trade-off function f, then for every set I of numbers

    Σ_(i ∈ I) p_i·i/m  ≤  1 − f( Σ_(i ∈ I) p_i·(r − i)/m ).

f is refuted at level τ if v or more right guesses with probability τ contradict these inequalities: with I from v on, then also
v − 1, and so on, the left sides force so many wrong guesses that both sums together exceed r/m, their value over all i.

*Two worlds*: a test that tells a dataset from its neighbour with error rates α (false alarms) and β (misses) contradicts (ε, δ)
if 1 − β > e^ε·α + δ or 1 − α > e^ε·β + δ. Rates are bounded from above as by Clopper and Pearson 1934.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, ndtr, ndtri
from scipy.stats import binom

from dp_microadam.accounting.trade_off import TradeOff
from dp_microadam.validation import require_in_closed_open, require_in_open, require_integer, require_non_negative

Floats = NDArray[np.float64]

Inverse = Callable[[float], float]
"""The rate of false positives that a rate of true positives needs at least: the inverse of 1 − f."""

_BISECTIONS = 50


@dataclass(frozen=True)
class Finding:
    """Result of an audit: a lower bound on ε, the claimed ε, and the attack's scores.

    ``bound`` exceeds the true ε at ``delta`` with probability at most 1 − ``confidence``. ``largest`` is the bound of a perfect
    attack of this size: a claim above it cannot be refuted. Larger scores mean that the example seems to be present.
    """

    name: str
    question: str
    claim: float
    delta: float
    bound: float
    confidence: float
    largest: float
    size: int
    unit: str
    scores_without: Floats
    scores_with: Floats

    @property
    def violated(self) -> bool:
        """Whether the claim is refuted."""
        return self.bound > self.claim

    def to_dict(self) -> dict[str, Any]:
        """All but the scores, for JSON."""
        names = ("name", "question", "claim", "delta", "bound", "confidence", "largest", "violated")
        return {name: getattr(self, name) for name in names} | {self.unit: self.size}


@dataclass(frozen=True)
class Audit:
    """The result of several attacks that hold together at ``confidence``; the first finding is about the claim as a whole.

    ``cannot_show`` are sentences for whoever reads it, ``more`` further figures by their names.
    """

    findings: tuple[Finding, ...]
    confidence: float
    violated: bool
    summary: str
    cannot_show: tuple[str, ...]
    more: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """All but the scores, for JSON."""
        whole = self.findings[0]
        return {
            "violated": self.violated,
            "summary": self.summary,
            "confidence": self.confidence,
            "epsilon": whole.claim,
            "epsilon_bound": whole.bound,
            "delta": whole.delta,
            **self.more,
            "findings": [finding.to_dict() for finding in self.findings],
            "cannot_show": list(self.cannot_show),
        }


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Upper bound on the probability of ``correct`` or more right guesses, if the run was (``epsilon``, ``delta``)-private.

    Formal guarantees: holds for add-or-remove neighbours and any guesses computed from the outputs of the run, as long as their
    number was fixed in advance and each canary was included independently with probability ½.

    >>> round(one_run_p_value(canaries=10, guesses=10, correct=10, epsilon=0.0, delta=0.0) * 2**10, 9)
    1.0
    """
    require_integer("canaries", canaries, 1)
    require_integer("guesses", guesses, 1, canaries)
    require_integer("correct", correct, 0, guesses)
    require_non_negative("epsilon", epsilon)
    require_in_closed_open("delta", delta, 0, 1)
    accuracy = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, accuracy))
    if delta == 0 or correct == 0:
        return min(1.0, tail)
    just_below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, accuracy))
    steepest = float((just_below / np.arange(1, correct + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * steepest)


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, confidence: float) -> float:
    """Lower bound on ε from ``correct`` right guesses, at ``confidence``; 0 if they rule out no ε.

    >>> f"{one_run_epsilon(1000, 100, 75, delta=1e-4, confidence=0.95):.3f}"  # the example of the paper's appendix D
    '0.673'
    """
    require_in_open("confidence", confidence, 0, 1)
    return _largest_refuted(lambda epsilon: one_run_p_value(canaries, guesses, correct, epsilon, delta) < 1 - confidence)


def _largest_refuted(refuted: Callable[[float], bool]) -> float:
    """The end of the values that are refuted, from zero on; 0 if none is."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def largest_one_run_epsilon(canaries: int, delta: float, confidence: float) -> float:
    """The bound of a perfect attack, which guesses every canary correctly: no one-run audit can show more.

    >>> [round(largest_one_run_epsilon(count, delta=1e-5, confidence=0.95), 1) for count in (1_000, 10_000)]
    [5.8, 7.8]
    """
    return one_run_epsilon(canaries, canaries, canaries, delta, confidence)


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
    return _largest_refuted(lambda mu: refutes(gaussian_curve(mu), canaries, guesses, correct, 1 - confidence))


def rate_upper_bound(events: ArrayLike, trials: int, confidence: float) -> Floats:
    """One-sided upper confidence bound on a rate, from ``events`` in ``trials`` independent trials (Clopper and Pearson).

    >>> print(rate_upper_bound([0, 30], trials=30, confidence=0.95).round(4))  # 1 − 0.05^(1/30) without events
    [0.095 1.   ]
    """
    require_integer("trials", trials, 1)
    require_in_open("confidence", confidence, 0, 1)
    events = np.asarray(events, dtype=np.float64)
    some = np.minimum(events, trials - 1)
    return np.where(events >= trials, 1.0, betaincinv(some + 1, trials - some, confidence))


def two_world_epsilon(
    false_alarms: ArrayLike, misses: ArrayLike, trials_without: int, trials_with: int, delta: float, confidence: float
) -> Floats:
    """Lower bound on ε at ``delta`` from the errors of a test, at ``confidence``; 0 if they rule out no ε.

    Of ``trials_without`` runs without the example the test said "in" ``false_alarms`` times; of ``trials_with`` runs with it
    the test said "out" ``misses`` times. Both rates are bounded at half the error probability each, so the two hold together.

    Formal guarantees: if runs are independent, the test was fixed before them, and the mechanism is (ε, ``delta``)-private, the
    result exceeds ε with probability at most 1 − ``confidence``.

    >>> print(two_world_epsilon(0, 0, 1000, 1000, delta=1e-5, confidence=0.95).round(2))
    5.6
    """
    require_in_closed_open("delta", delta, 0, 1)
    each = (1 + confidence) / 2
    alarm = rate_upper_bound(false_alarms, trials_without, each)
    miss = rate_upper_bound(misses, trials_with, each)
    return np.maximum(_implied(alarm, miss, delta), _implied(miss, alarm, delta))


def _implied(alarm: Floats, miss: Floats, delta: float) -> Floats:
    ratio = (1 - miss - delta) / alarm
    return np.log(np.maximum(ratio, 1.0))
