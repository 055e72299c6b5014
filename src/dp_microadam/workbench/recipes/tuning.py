"""The ``[tune]`` table of a recipe: what a private search chooses among, and how many runs it takes on average.

Everything in it is public and must not be derived from private data. This module does not import torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dp_microadam.accounting.selection import DISTRIBUTIONS, MOST_EXPECTED_RUNS
from dp_microadam.errors import DPMicroAdamError, InputError
from dp_microadam.validation import require_in_open_closed
from dp_microadam.workbench.recipes import keys

if TYPE_CHECKING:
    from dp_microadam.workbench.recipes.recipe import Recipe

_TUNABLE = (
    *("method", "model", "max_grad_norm", "clipping", "learning_rate", "distance", "schedule", "warmup", "ema_decay"),
    *("crop_padding", "flip"),
)
_TABLES = ("optimizer", "model_options")
"""Tables of which every option can be tuned."""

_OF_THE_PLAN = (
    *("epsilon", "noise_multiplier", "steps", "delta", "accountant", "batch_size", "max_batch_size", "bands"),
    *("unit", "examples_per_user", "max_steps", "seed"),
)

_MOST_COMBINATIONS = 10_000
"""Each is checked before the search begins, which takes a while."""


def table(key: str, value: Any) -> dict[str, Any]:
    """The table in its plain form: settings of the search, then a list for each key, options of tables as ``table.option``.

    >>> table("tune", {"expected_runs": 10, "optimizer": {"eps": [1e-8, 1e-6]}})
    {'expected_runs': 10.0, 'distribution': 'geometric', 'score': 'accuracy', 'optimizer.eps': [1e-08, 1e-06]}
    """
    if not isinstance(value, Mapping):
        raise InputError(f"{key} is {value!r}; it must be a table of keys to tune")
    if not value:
        return {}
    given: dict[str, Any] = {}
    for name, listed in value.items():
        nested = name in _TABLES and isinstance(listed, Mapping)
        given |= {f"{name}.{option}": inner for option, inner in listed.items()} if nested else {name: listed}
    if "expected_runs" not in given:
        raise InputError(f"{key}.expected_runs is missing; it must be the mean number of runs, such as 10")
    runs = keys.read(f"{key}.expected_runs", keys.Positive, given.pop("expected_runs"))
    distributions = Annotated[str, keys.one_of(*DISTRIBUTIONS)]
    settings = {
        "expected_runs": require_in_open_closed(f"{key}.expected_runs", runs, 1, MOST_EXPECTED_RUNS),
        "distribution": keys.read(f"{key}.distribution", distributions, given.pop("distribution", "geometric")),
        "score": keys.read(f"{key}.score", Literal["accuracy", "loss"], given.pop("score", "accuracy")),
    }
    if not given:
        raise InputError(f"{key} names no key to tune; it must have at least one list, such as distance = [0.75, 1.5]")
    return settings | {name: _listed(key, name, listed) for name, listed in given.items()}


def values_of(recipe: Recipe) -> dict[str, list[Any]]:
    """The lists that a search draws from, by the recipe's key."""
    return {name: value for name, value in recipe.tune.items() if isinstance(value, list)}


def with_values(recipe: Recipe, chosen: Mapping[str, Any]) -> Recipe:
    """The recipe of one run of a search."""
    changes: dict[str, Any] = {}
    for name, value in chosen.items():
        owner, _, option = name.partition(".")
        changes[owner] = {**changes.get(owner, getattr(recipe, owner)), option: value} if option else value
    return replace(recipe, **changes)


def score_of(recipe: Recipe) -> str:
    """The metric that decides: of the averaged weights, if the runs keep an average."""
    averaged = recipe.resolved_ema_decay > 0 or "ema_decay" in recipe.tune
    return f"{'ema_' if averaged else ''}validation_{recipe.tune['score']}"


def refuse_unsearchable(recipe: Recipe) -> None:
    """Raise InputError unless a recipe declares a search, and every combination of its values is a recipe."""
    if not recipe.tune:
        raise InputError(
            f"recipe {recipe.name!r} has no [tune] table; name there what to choose among, as in --set tune.expected_runs=10 "
            "--set tune.distance=[0.75,1.5]"
        )
    if recipe.validation_fraction == 0 and recipe.validation_size is None:
        raise InputError("validation_fraction is 0, but a search compares runs on held-out examples; it must be above 0")
    if not recipe.private:
        reason = f"method is {recipe.method!r}" if not recipe.protected else f"seed is {recipe.seed}"
        raise InputError(f"{reason}, with which a run is not private; a search must be")
    listed = values_of(recipe)
    if (count := math.prod(map(len, listed.values()))) > _MOST_COMBINATIONS:
        raise InputError(f"tune has {count} combinations; it must have at most {_MOST_COMBINATIONS}")
    for combination in itertools.product(*listed.values()):
        one = with_values(recipe, dict(zip(listed, combination, strict=True)))
        if not one.protected:
            raise InputError(f"tune.method holds {one.method!r}, which is not private; leave it out")
        if "ema_decay" in listed and one.resolved_ema_decay == 0:
            raise InputError("tune.ema_decay holds 0, which keeps no average to compare; leave it out, or tune something else")


def searches_on_same_data(recipe: Recipe, folder: Path) -> list[Path]:
    """Folders of finished searches in ``folder`` whose recipe names the same data."""
    from dp_microadam.training.run_folder import CONFIG, SELECTION

    found = []
    for marker in sorted(folder.glob(f"*/{SELECTION}")):
        try:
            other = type(recipe).from_toml((marker.parent / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError, DPMicroAdamError):
            continue
        if all(getattr(other, key) == getattr(recipe, key) for key in ("data", "data_folder", "data_options")):
            found.append(marker.parent)
    return found


def _listed(key: str, name: str, given: Any) -> list[Any]:
    """The values of one key: a list of different ones."""
    full, (owner, _, option) = f"{key}.{name}", name.partition(".")
    if name in _OF_THE_PLAN:
        raise InputError(f"{full} decides the privacy of a run, which must be the same for all; set {name} itself")
    if name == "optimizer.public" or not (name in _TUNABLE or (owner in _TABLES and option)):
        tunable = ", ".join((*_TUNABLE, *(f"{table}.…" for table in _TABLES)))
        raise InputError(f"{full} cannot be tuned; it must be one of {tunable}")
    if not isinstance(given, list | tuple) or not given:
        raise InputError(f"{full} is {given!r}; it must be a list of values")
    for number, value in enumerate(given):
        if not isinstance(value, bool | int | float | str):
            raise InputError(f"{full} holds {value!r}; it must hold numbers, strings, true or false")
        if value in given[:number]:
            raise InputError(f"{full} holds {value!r} twice; each value must be there once, all are drawn equally often")
    return list(given)
