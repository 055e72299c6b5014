"""TOML for what a recipe holds: plain values, lists of them, and tables one level deep. The standard library only reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(values: Mapping[str, Any]) -> str:
    """One line a value in the order given, then a section a table. Empty tables are left out, and None is: TOML has none.

    >>> print(to_toml({"name": "mine", "delta": 1e-5, "optimizer": {"betas": [0.9, 0.999]}, "seed": None}), end="")
    name = "mine"
    delta = 1e-05
    <BLANKLINE>
    [optimizer]
    betas = [0.9, 0.999]
    """
    plain = {key: value for key, value in values.items() if value is not None and not isinstance(value, Mapping)}
    lines = _lines(plain)
    for key, table in values.items():
        if isinstance(table, Mapping) and table:
            lines += ["", f"[{_key(key)}]", *_lines(table)]
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in values.items()]


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
