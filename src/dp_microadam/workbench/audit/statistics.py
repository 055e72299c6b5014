"""Lower bounds on ε from membership guesses: the statistics behind the one-run and the two-world audit.

*One run* (Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", appendix D): of m canaries each takes
part with probability ½, independently. Of r guesses about which did, (ε, δ)-differential privacy lets v or more be right with
probability at most

    P[B ≥ v] + 2mδ · max over i of P[v > B ≥ v − i] / i,        B ~ Binomial(r, e^ε/(1 + e^ε)).

*Two worlds*: a test that tells a dataset from its neighbour with error rates α (false alarms) and β (misses) contradicts (ε, δ)
if 1 − β > e^ε·α + δ or 1 − α > e^ε·β + δ. Rates are bounded from above as by Clopper and Pearson 1934.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv
from scipy.stats import binom

from dp_microadam.validation import require_in_closed_open, require_in_open, require_integer, require_non_negative

Floats = NDArray[np.float64]

_BISECTIONS = 50


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
    low, high = 0.0, 1.0
    if one_run_p_value(canaries, guesses, correct, low, delta) >= 1 - confidence:
        return 0.0
    while one_run_p_value(canaries, guesses, correct, high, delta) < 1 - confidence:
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if one_run_p_value(canaries, guesses, correct, middle, delta) < 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def largest_one_run_epsilon(canaries: int, delta: float, confidence: float) -> float:
    """The bound of a perfect attack, which guesses every canary correctly: no one-run audit can show more.

    >>> [round(largest_one_run_epsilon(count, delta=1e-5, confidence=0.95), 1) for count in (1_000, 10_000)]
    [5.8, 7.8]
    """
    return one_run_epsilon(canaries, canaries, canaries, delta, confidence)


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


def largest_two_world_epsilon(trials: int, delta: float, confidence: float) -> float:
    """The bound of a test without errors in ``trials`` runs of each world."""
    return float(two_world_epsilon(0, 0, trials, trials, delta, confidence))


def _implied(alarm: Floats, miss: Floats, delta: float) -> Floats:
    ratio = (1 - miss - delta) / alarm
    return np.log(np.maximum(ratio, 1.0))
