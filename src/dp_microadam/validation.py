"""Argument validation: each function returns a valid value, or raises an InputError with its name, value and allowed range.

Comparisons are written so that NaN fails every check.
"""

from __future__ import annotations

import math
import operator
from numbers import Real

from dp_microadam.errors import InputError


def require_in_open_closed(name: str, value: float, low: float, high: float) -> float:
    """Require ``value`` in (low, high].

    >>> require_in_open_closed("density", 0.0, 0.0, 1.0)
    Traceback (most recent call last):
        ...
    dp_microadam.errors.InputError: density is 0.0; it must lie in (0, 1]
    """
    _require_number(name, value)
    if not low < value <= high:
        raise InputError(f"{name} is {value}; it must lie in ({low:g}, {high:g}]")
    return value


def require_in_closed_open(name: str, value: float, low: float, high: float) -> float:
    """Require ``value`` in [low, high)."""
    _require_number(name, value)
    if not low <= value < high:
        raise InputError(f"{name} is {value}; it must lie in [{low:g}, {high:g})")
    return value


def require_in_open(name: str, value: float, low: float, high: float) -> float:
    """Require ``value`` in (low, high)."""
    _require_number(name, value)
    if not low < value < high:
        raise InputError(f"{name} is {value}; it must lie in ({low:g}, {high:g})")
    return value


def require_positive(name: str, value: float) -> float:
    """Require a finite ``value`` above zero."""
    _require_number(name, value)
    if not (value > 0 and math.isfinite(value)):
        raise InputError(f"{name} is {value}; it must be a finite number above 0")
    return value


def require_non_negative(name: str, value: float) -> float:
    """Require a finite ``value`` of at least zero."""
    _require_number(name, value)
    if not (value >= 0 and math.isfinite(value)):
        raise InputError(f"{name} is {value}; it must be a finite number of at least 0")
    return value


def require_integer(name: str, value: int, low: int, high: int | None = None) -> int:
    """Require an integer ``value`` in [low, high]; a bool does not count as an integer."""
    what = f"at least {low}" if high is None else f"from {low} to {high}"
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        raise InputError(f"{name} is {value!r}; it must be a whole number {what}")
    return number


def require_one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    """Require that ``value`` is one of ``choices``."""
    if value not in choices:
        raise InputError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return value


def _require_number(name: str, value: object) -> None:
    """Refuse text, booleans and the like, which comparisons would accept or stumble over."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} is {value!r}; it must be a number")
