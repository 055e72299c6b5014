"""Completers for shell completion (argcomplete): the values that Tab offers for an argument. None of them imports torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Completer = Callable[..., Iterable[str]]


def complete_with(completer: Completer, action: argparse.Action) -> None:
    """Let ``completer`` answer Tab for the argument that ``add_argument`` returned."""
    action.completer = completer  # type: ignore[attr-defined]  # where argcomplete looks for it


def recipe_names(prefix: str, **_: Any) -> list[str]:
    """Recipes that come with the package; TOML files where no recipe's name begins with ``prefix``."""
    from dp_microadam.workbench.recipes import known_recipes

    return _names_or_toml_files(prefix, known_recipes())


def data_set_names(**_: Any) -> Iterable[str]:
    """Data sets that a recipe can name."""
    from dp_microadam.workbench.recipes import vocabulary

    return vocabulary.DATA_SETS


def run_folders(prefix: str, **_: Any) -> list[str]:
    """Run folders, and other folders that may contain some."""
    from dp_microadam.ledger.ledger import LEDGER_NAME
    from dp_microadam.training.run_folder import CONFIG

    return _paths(prefix, lambda path: any((path / name).is_file() for name in (CONFIG, LEDGER_NAME)))


def recipe_settings(prefix: str, **_: Any) -> list[str]:
    """Keys of a recipe as ``key=``; after the equals sign, ``key=value`` for keys whose values are a fixed list of names."""
    from dataclasses import fields

    from dp_microadam.workbench.recipes import vocabulary
    from dp_microadam.workbench.recipes.recipe import Recipe

    key, equals, _text = prefix.partition("=")
    if equals:
        values = {
            "method": vocabulary.METHODS,
            "base": vocabulary.BASES,
            "model": vocabulary.MODELS,
            "data": vocabulary.DATA_SETS,
            "unit": ("example", "user"),
        }
        return [f"{key}={value}" for value in values.get(key, ())]
    tables = {
        "optimizer": vocabulary.OPTIMIZER_OPTIONS,
        "model_options": vocabulary.MODEL_OPTIONS,
        "data_options": vocabulary.DATA_OPTIONS,
    }
    options = {f"{table}.{name}" for table, owners in tables.items() for own in owners.values() for name in own}
    options |= {f"tune.{name}" for name in ("expected_runs", "distribution", "score")}
    keys = [field.name for field in fields(Recipe) if field.name not in (*tables, "tune")]
    return [f"{name}=" for name in keys + sorted(options)]


def _names_or_toml_files(prefix: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(prefix)] or _paths(prefix, lambda path: path.suffix == ".toml")


def _paths(prefix: str, wanted: Callable[[Path], bool]) -> list[str]:
    """Paths that begin with ``prefix``: the wanted ones as they are, other folders with a slash, to be completed further."""
    folder, slash, start = prefix.rpartition("/")
    try:
        entries = sorted(Path(folder + slash).expanduser().iterdir())
    except OSError:
        return []
    found = []
    for entry in entries:
        if entry.name.startswith(start) and (start or not entry.name.startswith(".")):
            if wanted(entry):
                found.append(f"{folder}{slash}{entry.name}")
            elif entry.is_dir():
                found.append(f"{folder}{slash}{entry.name}/")
    return found
