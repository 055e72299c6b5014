"""The result of a mechanism check: a statistic, the accepted range, and the probability of a false alarm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from scipy.stats import binom, chi2

FALSE_ALARM = 1e-8
"""False-alarm probability of one statistical check. An audit has fewer than a hundred of them."""


@dataclass(frozen=True)
class Check:
    """A direct test of one assumption of the privacy proof.

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
        """Whether the check failed; NaN counts as a failure."""
        return not self.low <= self.value <= self.high

    def to_dict(self) -> dict[str, Any]:
        """The check for JSON, in which infinity is null."""
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
    """A failed check for a pipeline that refused a supported configuration; the detail is the error message."""
    return Check(part, name, question, "the pipeline refused to run", math.inf, 0.0, 0.0, 0.0, "", f"{error}")


def count_range(trials: int, probability: float) -> tuple[float, float]:
    """Exact range of a binomial count, which it leaves with probability at most ``FALSE_ALARM``.

    >>> count_range(1000, 0.5)
    (410.0, 590.0)
    """
    return float(binom.ppf(FALSE_ALARM / 2, trials, probability)), float(binom.isf(FALSE_ALARM / 2, trials, probability))


def mean_square_range(numbers: int) -> tuple[float, float]:
    """Exact range of the mean of ``numbers`` squared standard normal variables, at ``FALSE_ALARM``."""
    return (
        float(chi2.ppf(FALSE_ALARM / 2, numbers)) / numbers,
        float(chi2.isf(FALSE_ALARM / 2, numbers)) / numbers,
    )


def in_words(number: float | None) -> str:
    """A statistic or the end of a range as short text."""
    if number is None or math.isinf(number):
        return "–"
    if number == int(number) and abs(number) < 1e9:
        return f"{int(number):,}"
    return f"{number:.3g}" if abs(number) < 0.1 or abs(number) >= 1e5 else f"{number:,.5g}"


def range_in_words(low: float | None, high: float | None) -> str:
    """The accepted range as text; an unbounded side is left out."""
    if high is None or math.isinf(high):
        return f"at least {in_words(low)}"
    if low is None or math.isinf(low) or low == 0:
        return f"at most {in_words(high)}"
    return f"{in_words(low)} to {in_words(high)}"


def together(checks: Iterable[Check]) -> float:
    """Upper bound on the probability of any false alarm in these checks."""
    return sum(check.false_alarm for check in checks)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
