"""Arguments that several commands share, and what Tab offers for them (argcomplete). Nothing here imports torch.

Where nothing is offered, as for folders of runs, shells complete names of files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Completer = Callable[..., Iterable[str]]


def complete_with(completer: Completer, action: argparse.Action) -> None:
    """Let ``completer`` answer Tab for the argument that ``add_argument`` returned."""
    action.completer = completer  # type: ignore[attr-defined]  # where argcomplete looks for it


def add_recipe(parser: argparse.ArgumentParser, **options: Any) -> None:
    """The name or file of a recipe, and changes of its keys."""
    complete_with(recipe_names, parser.add_argument("recipe", **{"help": "name or TOML file of a recipe", **options}))
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser, of: str = "the recipe") -> None:
    """Changes of a recipe's keys."""
    override = parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=f"change one key of {of}"
    )
    complete_with(recipe_settings, override)


def add_run(parser: argparse.ArgumentParser, name: str = "run_dir", **options: Any) -> None:
    """The folder of a run."""
    parser.add_argument(name, **{"type": Path, "metavar": "RUN", "help": "run folder", **options})


def add_json(parser: argparse.ArgumentParser) -> None:
    """Whether the answer is for a program."""
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def add_group_size(parser: argparse.ArgumentParser) -> None:
    """For whom ε is stated beside a single unit."""
    parser.add_argument(
        "--group-size",
        type=int,
        default=1,
        metavar="K",
        help="also say ε for a person with up to K examples, or for K users together (default: 1)",
    )


def recipe_names(prefix: str, **_: Any) -> Iterable[str]:
    """Recipes that come with the package; TOML files where no recipe's name begins with ``prefix``."""
    from argcomplete.completers import FilesCompleter

    from dp_microadam.workbench.recipes import known_recipes

    return [name for name in known_recipes() if name.startswith(prefix)] or FilesCompleter(["toml"])(prefix)


def data_set_names(**_: Any) -> Iterable[str]:
    """Data sets that a recipe can name."""
    from dp_microadam.workbench.recipes import keys

    return keys.DATA_SETS


def recipe_settings(prefix: str, **_: Any) -> list[str]:
    """Keys of a recipe as ``key=``; after the equals sign, ``key=value`` for keys whose values are a fixed list of names."""
    from dp_microadam.workbench.recipes import keys
    from dp_microadam.workbench.recipes.recipe import kinds

    key, equals, _text = prefix.partition("=")
    if equals:
        return [f"{key}={value}" for rule in keys.rules_of(kinds().get(key)) for value in rule.choices]
    options = {f"{table}.{name}" for table, owners in keys.TABLES.items() for own in owners.values() for name in own}
    options |= {f"tune.{name}" for name in ("expected_runs", "distribution", "score")}
    return [f"{name}=" for name in [*kinds(), *sorted(options)] if name not in (*keys.TABLES, "tune")]
