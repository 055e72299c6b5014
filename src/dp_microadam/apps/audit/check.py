"""What one mechanism check found: a statistic, the range it must be in, and how seldom an honest pipeline leaves it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from scipy.stats import binom, chi2

FALSE_ALARM = 1e-8
"""Probability with which one statistical check accuses an honest pipeline. An audit has fewer than a hundred of them."""


@dataclass(frozen=True)
class Check:
    """A direct test of one promise that the privacy proof rests on.

    ``value`` is the statistic that ``statistic`` describes; outside of ``low`` … ``high`` the promise is refuted.
    ``false_alarm`` bounds the probability of that for an honest pipeline; 0 for checks without chance, whose range allows for
    rounding alone. ``detail`` says where the most unlikely value occurred.
    """

    part: str
    name: str
    question: str
    statistic: str
    value: float
    low: float
    high: float
    false_alarm: float
    size: str
    detail: str = ""

    @property
    def violated(self) -> bool:
        """Whether the promise is refuted; a value that is no number refutes it."""
        return not self.low <= self.value <= self.high

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which knows no infinity."""
        return {
            "part": self.part,
            "name": self.name,
            "question": self.question,
            "statistic": self.statistic,
            "value": _finite(self.value),
            "low": _finite(self.low),
            "high": _finite(self.high),
            "false_alarm": self.false_alarm,
            "size": self.size,
            "detail": self.detail,
            "violated": self.violated,
        }


def refused(part: str, name: str, question: str, error: Exception) -> Check:
    """A failed check because the pipeline refused to run what it supports; the refusal is its detail."""
    return Check(part, name, question, "the pipeline refused to run", math.inf, 0.0, 0.0, 0.0, "", f"{error}")


def count_range(trials: int, probability: float) -> tuple[float, float]:
    """Where a binomial count is but for ``FALSE_ALARM``, exactly.

    >>> count_range(1000, 0.5)
    (410.0, 590.0)
    """
    return float(binom.ppf(FALSE_ALARM / 2, trials, probability)), float(binom.isf(FALSE_ALARM / 2, trials, probability))


def mean_square_range(numbers: int) -> tuple[float, float]:
    """Where the mean of ``numbers`` squared standard normal numbers is but for ``FALSE_ALARM``, exactly."""
    return (
        float(chi2.ppf(FALSE_ALARM / 2, numbers)) / numbers,
        float(chi2.isf(FALSE_ALARM / 2, numbers)) / numbers,
    )


def in_words(number: float | None) -> str:
    """A statistic or the end of a range, short."""
    if number is None or math.isinf(number):
        return "–"
    if number == int(number) and abs(number) < 1e9:
        return f"{int(number):,}"
    return f"{number:.3g}" if abs(number) < 0.1 or abs(number) >= 1e5 else f"{number:,.5g}"


def range_in_words(low: float | None, high: float | None) -> str:
    """The accepted range; a side that does not bind is left out."""
    if high is None or math.isinf(high):
        return f"at least {in_words(low)}"
    if low is None or math.isinf(low) or low == 0:
        return f"at most {in_words(high)}"
    return f"{in_words(low)} to {in_words(high)}"


def together(checks: Iterable[Check]) -> float:
    """Probability that any of the checks accuses an honest pipeline, at most."""
    return sum(check.false_alarm for check in checks)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
