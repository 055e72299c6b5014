"""Formats numbers for tables and figures."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

MINUS = "−"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether ``value`` is a finite number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def fixed(value: float, decimals: int) -> str:
    """A number with ``decimals`` decimals.

    >>> fixed(-1234.56, 1), fixed(-0.04, 1)
    ('−1,234.6', '0.0')
    """
    rounded = round(value, decimals) + 0.0  # no negative zero
    return f"{rounded:,.{decimals}f}".replace("-", MINUS)


def significant(value: float, digits: int = 4) -> str:
    """A number with ``digits`` significant digits; integers in full.

    >>> significant(0.000123456), significant(26010), significant(1.5), significant(-2)
    ('0.0001235', '26,010', '1.5', '−2')
    """
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", MINUS)
    return f"{value:.{digits}g}".replace("-", MINUS)


def confidence_in_words(confidence: float) -> str:
    """A confidence in percent, rounded down, with two decimals or as many as tell it from certainty.

    >>> confidence_in_words(0.95), confidence_in_words(1 - 0.05 / 3), confidence_in_words(1 - 1e-7)
    ('95 %', '98.33 %', '99.99999 %')
    """
    decimals = max(2, math.ceil(-math.log10(1 - confidence) - 1e-6) - 2)
    percent = math.floor(100 * confidence * 10**decimals + 1e-6) / 10**decimals
    return f"{percent:.{decimals}f}".rstrip("0").rstrip(".") + " %"


def in_bytes(count: float) -> str:
    """A number of bytes with a unit.

    >>> in_bytes(812), in_bytes(26010), in_bytes(2.5e9)
    ('812 B', '26.0 kB', '2.50 GB')
    """
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            scaled = count / limit
            return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """A duration in seconds, minutes or hours.

    >>> duration(4.2), duration(301.2), duration(7384)
    ('4.2 s', '5 min 01 s', '2 h 03 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
