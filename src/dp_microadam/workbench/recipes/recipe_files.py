"""Recipes from files: built-in ones by name, others by path, with ``key=value`` overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

from dp_microadam.errors import InputError
from dp_microadam.workbench.recipes import vocabulary
from dp_microadam.workbench.recipes.hints import nearest
from dp_microadam.workbench.recipes.overrides import apply_override
from dp_microadam.workbench.recipes.recipe import Recipe, parse_toml


def known_recipes() -> list[str]:
    """Names of the built-in recipes."""
    folder = resources.files("dp_microadam.workbench.recipes")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a built-in recipe by name, or any recipe by the path of its TOML file, and apply ``key=value`` overrides.

    Values are parsed as TOML, or else taken as strings. ``optimizer.density=0.05`` sets a key of a table, ``steps=none``
    removes a key, and later overrides win. A recipe file without a ``name`` is named after the file.

    >>> load_recipe("demo", ["method=dp-sgd", "optimizer.momentum=0.9"]).optimizer
    {'momentum': 0.9}

    Raises:
        InputError: if there is no such recipe, or it or an override cannot be used.
    """
    values = recipe_values(name_or_path)
    method, own = values.get("method"), set(values.get("optimizer", {})) - _options_in(overrides)
    apply_overrides(values, overrides)
    if values.get("method") != method:
        _forget_options_of_another_method(values, own)
    return Recipe.from_dict(values)


def recipe_values(name_or_path: str) -> dict[str, Any]:
    """The keys of a built-in recipe or of a file, unchecked, with a name.

    Raises:
        InputError: if there is no such recipe, or it is not TOML.
    """
    if name_or_path in known_recipes():
        source = resources.files("dp_microadam.workbench.recipes") / f"{name_or_path}.toml"
        return parse_toml(source.read_text("utf-8"), name_or_path)
    return {"name": Path(name_or_path).stem, **parse_toml(_read(name_or_path), name_or_path)}


def _options_in(overrides: Sequence[str]) -> set[str]:
    """The options of the optimizer that overrides name."""
    return {key.removeprefix("optimizer.") for key in (override.partition("=")[0].strip() for override in overrides)}


def _forget_options_of_another_method(values: dict[str, Any], own: set[str]) -> None:
    """Drop options that the file gives to the optimizer of its own method, and the method that replaces it does not have."""
    given, known = values.get("optimizer"), vocabulary.OPTIMIZER_OPTIONS.get(values.get("base") or values.get("method", ""))
    if known is not None and isinstance(given, dict):
        values["optimizer"] = {option: value for option, value in given.items() if option not in own or option in known}


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Change the keys of a recipe, in place, by ``key=value`` overrides; later ones win.

    Raises:
        InputError: if an override is not of that form.
    """
    for override in overrides:
        apply_override(values, override, strings=_keys_of_type("str"), removable=_keys_of_type("| None"))


def _read(name_or_path: str) -> str:
    looks_like_a_path = name_or_path.endswith(".toml") or Path(name_or_path).name != name_or_path
    if not looks_like_a_path and not Path(name_or_path).is_file():
        known = known_recipes()
        hint = nearest(name_or_path, known, " (nearest: {})")
        raise InputError(
            f"there is no recipe {name_or_path!r}; known are {', '.join(known)}{hint}, or give the path of a TOML file"
        )
    try:
        return Path(name_or_path).read_text("utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a zero byte
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"recipe {name_or_path} cannot be read: {reason}") from None


def _keys_of_type(wanted: str) -> frozenset[str]:
    """Keys of a recipe whose type annotation ends with ``wanted``."""
    return frozenset(key.name for key in fields(Recipe) if str(key.type).endswith(wanted))
