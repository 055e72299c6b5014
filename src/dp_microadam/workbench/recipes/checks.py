"""Validators for the values in a recipe: each takes key and value, and returns the value or raises InputError naming both.

The value is returned in the type of the recipe's field (an int becomes a float where a float belongs), so that recipes with
the same meaning are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dp_microadam.errors import InputError
from dp_microadam.validation import (
    require_in_closed_open,
    require_in_open,
    require_integer,
    require_one_of,
    require_positive,
)

Check = Callable[[str, Any], Any]

_LARGEST_INTEGER = 2**63 - 1
"""The largest integer that every TOML parser supports."""

_LONGEST_NAME = 100


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{key} is {value!r}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def positive(key: str, value: Any) -> float:
    return require_positive(key, _number(key, value))


def inside_unit_interval(key: str, value: Any) -> float:
    """In (0, 1)."""
    return require_in_open(key, _number(key, value), 0, 1)


def below_one(key: str, value: Any) -> float:
    """In [0, 1)."""
    return require_in_closed_open(key, _number(key, value), 0, 1)


def count(key: str, value: Any) -> int:
    return require_integer(key, value, 1, _LARGEST_INTEGER)


def count_or(*words: str) -> Check:
    """A whole number of at least 1, or one of ``words``."""

    def check(key: str, value: Any) -> Any:
        if isinstance(value, str) and value not in words:
            raise InputError(f"{key} is {value!r}; it must be a whole number of at least 1, or {' or '.join(map(repr, words))}")
        return value if isinstance(value, str) else count(key, value)

    return check


def count_or_zero(key: str, value: Any) -> int:
    return require_integer(key, value, 0, _LARGEST_INTEGER)


def seed(key: str, value: Any) -> int:
    return require_integer(key, value, 0, _LARGEST_INTEGER)


def flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{key} is {value!r}; it must be true or false")
    return value


def text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"{key} is {value!r}; it must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{key} is {value!r}; it must be valid Unicode text") from None
    return value


def name(key: str, value: Any) -> str:
    """A string that fits on one line and can be part of a folder name."""
    fits = bool(text(key, value).strip()) and len(value) <= _LONGEST_NAME and value.isprintable()
    if not fits or value.startswith(".") or "/" in value or "\\" in value:
        raise InputError(
            f"{key} is {value!r}; it must be 1 to {_LONGEST_NAME} printable characters without slashes and not start with a dot"
        )
    return value


def noun(key: str, value: Any) -> str:
    """A short name for something, such as patient: letters, spaces and hyphens."""
    words = text(key, value)
    if not words or len(words) > 40 or not words.replace(" ", "").replace("-", "").isalpha() or words != words.strip():
        raise InputError(f"{key} is {value!r}; it must be a noun such as patient, of at most 40 letters, spaces and hyphens")
    return words


def canary_count(key: str, value: Any) -> int:
    """At least 100: fewer canaries can show next to nothing."""
    return require_integer(key, value, 100, _LARGEST_INTEGER)


def random_key(key: str, value: Any) -> str:
    """128 bits as 32 hexadecimal digits."""
    if len(text(key, value)) != 32 or set(value) - set("0123456789abcdef"):
        raise InputError(f"{key} is {value!r}; it must be 32 hexadecimal digits, or left out for a new one")
    return str(value)


def one_of(*choices: str) -> Check:
    return lambda key, value: require_one_of(key, text(key, value), choices)


def optional(check: Check) -> Check:
    """``check``, or None for a key that is not given."""
    return lambda key, value: None if value is None else check(key, value)


def weights(key: str, value: Any) -> tuple[float, ...]:
    """A list of at least two positive numbers."""
    if not isinstance(value, list | tuple) or len(value) < 2:
        raise InputError(f"{key} is {value!r}; it must be a list of numbers, one for each class")
    try:
        return tuple(positive(key, item) for item in value)
    except InputError:
        raise InputError(f"{key} is {value!r}; it must be a list of finite numbers above 0, one for each class") from None


def table(key: str, value: Any) -> dict[str, Any]:
    """A table of options whose values are numbers, strings, booleans or lists of these."""
    if not isinstance(value, Mapping):
        raise InputError(f"{key} is {value!r}; it must be a table of options")
    for option, given in value.items():
        for item in given if isinstance(given, list | tuple) else [given]:
            if not isinstance(item, bool | int | float | str):
                raise InputError(f"{key}.{option} is {given!r}; it must be a number, a string, true, false or a list of these")
            if isinstance(item, str):
                text(f"{key}.{option}", item)
    return {option: list(given) if isinstance(given, tuple) else given for option, given in value.items()}
