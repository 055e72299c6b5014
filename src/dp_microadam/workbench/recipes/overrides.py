"""``key=value`` overrides from the command line, applied to a recipe's values before these are validated."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from typing import Any

from dp_microadam.errors import InputError


def apply_override(values: dict[str, Any], override: str, *, strings: Collection[str], removable: Collection[str]) -> None:
    """Apply one ``key=value`` override to ``values`` in place.

    The value is parsed as TOML, or else taken as a string. ``strings`` are keys whose value is always a string, even if it
    looks like a number (a folder named 2024). ``key=none`` removes a key if it is in ``removable`` or inside a table. Whether
    key and value are valid is checked later, by the recipe.

    >>> values = {"steps": 100, "optimizer": {"density": 0.01}}
    >>> for override in ("steps=none", "optimizer.density=0.05", "method=dp-sgd"):
    ...     apply_override(values, override, strings={"method"}, removable={"steps"})
    >>> values
    {'optimizer': {'density': 0.05}, 'method': 'dp-sgd'}
    """
    key, equals, text = override.partition("=")
    key, text = key.strip(), text.strip()
    if not (key and equals):
        raise InputError(f"override {override!r} is not of the form key=value; write it as steps=100")
    table, dot, option = key.partition(".")
    target, name = values, key
    if dot:
        target, name = values.setdefault(table, {}), option
        if not isinstance(target, dict):
            raise InputError(f"recipe key {key} = {text} is unknown; {table} is not a table, set {table} itself")
    if text.lower() == "none" and (dot or key in removable):
        target.pop(name, None)
    else:
        target[name] = _value(text, as_text=key in strings)


def _value(text: str, *, as_text: bool) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    if parsed.keys() != {"value"} or (as_text and not isinstance(parsed["value"], str)):
        return text
    return parsed["value"]
