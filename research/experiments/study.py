"""A study: one recipe varied along one or more axes, with the paper's results for comparison."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from dp_microadam.errors import InputError
from dp_microadam.validation import require_integer, require_one_of
from dp_microadam.workbench.recipes.recipe import Recipe
from dp_microadam.workbench.recipes.recipe_files import apply_overrides, recipe_values

Label = str | float
Labels = dict[str, Label]

SCALES = ("paper", "cpu")
ACCURACY, COST = "accuracy", "cost"

# Keys that change neither the trained model nor its guarantee: runs that differ only in these are repeats of each other.
_PLACES = ("name", "data_folder", "verify_data", "num_workers", "physical_batch_size")
_WITHOUT_EFFECT = (*_PLACES, "evaluate_every", "checkpoint_every", "checkpoint_minutes", "keep_checkpoints")


@dataclass(frozen=True)
class Cell:
    """One cell of a study's table: its label on each axis, and the recipe of its runs."""

    labels: Labels
    recipe: Recipe

    @property
    def description(self) -> str:
        return ", ".join(
            f"{axis} {label}" if isinstance(label, int | float) else str(label) for axis, label in self.labels.items()
        )

    @property
    def key(self) -> str:
        """Folder name: readable, and the same for recipes that train the same model."""
        settings = {key: value for key, value in asdict(self.recipe).items() if key not in _WITHOUT_EFFECT}
        settings["learning_rate"], settings["distance"] = self.recipe.resolved_learning_rate, self.recipe.resolved_distance
        settings["ema_decay"] = self.recipe.resolved_ema_decay
        settings["accountant"] = self.recipe.resolved_accountant
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        readable = re.sub(r"[^a-z0-9.]+", "-", f"{self.recipe.data} {self.recipe.algorithm}".lower()).strip("-")
        return f"{readable}-{digest}"


@dataclass(frozen=True)
class Published:
    """The paper's result for a cell."""

    labels: Labels
    value: float
    spread: float | None = None


@dataclass(frozen=True)
class Study:
    """An experiment of several runs: a grid of recipes, and the paper's results.

    ``measure`` is ``"accuracy"`` for studies that train, ``"cost"`` for those that only time a few steps. ``rows`` and
    ``columns`` name the axes that span the table.
    """

    name: str
    scale: str
    title: str
    question: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    repeats: int = 1
    measure: str = ACCURACY
    notes: tuple[str, ...] = ()
    figures: tuple[Mapping[str, Any], ...] = ()
    published: tuple[Published, ...] = ()
    source: str = ""
    middle: str = "median"

    def only(self, conditions: Sequence[str]) -> Study:
        """The study restricted to the cells that match all conditions ``AXIS=LABEL``; labels of the same axis are alternatives.

        Raises:
            InputError: if an axis or label is unknown, or no cell is left.
        """
        wanted: dict[str, set[str]] = {}
        for condition in conditions:
            axis = next((axis for axis in (*self.rows, *self.columns) if condition.startswith(f"{axis}=")), "")
            label = condition.removeprefix(f"{axis}=")
            if label not in {str(cell.labels.get(axis)) for cell in self.cells}:
                axes = {axis: sorted({str(cell.labels[axis]) for cell in self.cells}) for axis in (*self.rows, *self.columns)}
                choices = "; ".join(f"{axis}={'|'.join(labels)}" for axis, labels in axes.items())
                raise InputError(f"only is {condition!r}; it must be AXIS=LABEL with one of: {choices}")
            wanted.setdefault(axis, set()).add(label)
        kept = tuple(cell for cell in self.cells if all(str(cell.labels[axis]) in labels for axis, labels in wanted.items()))
        if not kept:
            raise InputError(f"only is {', '.join(conditions)}; no cell of {self.name} has all of these labels, leave one out")
        return replace(self, cells=kept)

    def describe(self, command: str) -> dict[str, Any]:
        """The content of ``experiment.json``: what reports need to know about the study."""
        return {
            "name": self.name,
            "title": self.title,
            "question": self.question,
            "scale": self.scale,
            "command": command,
            "rows": list(self.rows),
            "columns": list(self.columns),
            "cells": [cell.labels for cell in self.cells],
            "unit": "%" if self.measure == ACCURACY else "",
            "middle": self.middle,
            "notes": list(self.notes),
            "figures": [dict(figure) for figure in self.figures],
            "paper": [{"cell": one.labels, "value": one.value, "spread": one.spread} for one in self.published],
            "paper_source": self.source,
        }


def known_studies() -> dict[str, tuple[str, ...]]:
    """Names of the built-in studies, and the scales of each."""
    found: dict[str, list[str]] = {}
    for entry in resources.files("research.experiments").iterdir():
        if entry.name.endswith(".toml"):
            name, scale = entry.name.removesuffix(".toml").rsplit(".", 1)
            found.setdefault(name, []).append(scale)
    return {name: tuple(scale for scale in SCALES if scale in found[name]) for name in sorted(found)}


def load_study(name_or_path: str, scale: str | None = None, overrides: Sequence[str] = ()) -> Study:
    """Load a built-in study by name, or any study by the path of its TOML file; ``overrides`` apply to all its recipes.

    Without ``scale`` it is the paper's scale if the study has one.

    >>> study = load_study("sigma-sweep")
    >>> len(study.cells), study.repeats
    (30, 3)

    Raises:
        InputError: if there is no such study, or something in it cannot be used.
    """
    known = known_studies()
    if name_or_path in known:
        scale = scale or known[name_or_path][0]
        if scale not in known[name_or_path]:
            raise InputError(f"scale is {scale!r}; {name_or_path} is known at scale {' and '.join(known[name_or_path])}")
        text = (resources.files("research.experiments") / f"{name_or_path}.{scale}.toml").read_text("utf-8")
        return parse_study(text, name_or_path, scale, overrides)
    path = Path(name_or_path)
    if path.suffix != ".toml":
        raise InputError(f"there is no study {name_or_path!r}; known are {', '.join(known)}, or give the path of a TOML file")
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"study {name_or_path} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    return parse_study(text, path.stem, "own", overrides)


def parse_study(text: str, name: str, scale: str, overrides: Sequence[str] = ()) -> Study:
    """Parse a study from TOML text.

    Raises:
        InputError: if it is not TOML, or something in it cannot be used.
    """
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"study {name} cannot be read, it must be valid TOML: {error}") from None
    _refuse_unknown_keys(name, values)
    axes = {axis: _labels(settings) for axis, settings in values["axes"].items()}
    rows, columns = tuple(values["rows"]), tuple(values["columns"])
    if sorted(rows + columns) != sorted(axes):
        raise InputError(f"study {name} has axes {', '.join(axes)}; each must be named once in rows or columns")
    published = values.get("paper", {})
    cells = [
        _cell(name, labels, axes, values, overrides)
        for labels in _combinations({axis: axes[axis] for axis in (*rows, *columns)})
        if not any(_matches(labels, one) for one in values.get("without", []))
    ]
    if values.get("measure", ACCURACY) not in (ACCURACY, COST):
        raise InputError(f"study {name} has measure = {values['measure']!r}; it must be {ACCURACY!r} or {COST!r}")
    return Study(
        name,
        scale,
        str(values["title"]),
        str(values["question"]),
        rows,
        columns,
        tuple(cells),
        require_integer("repeats", values.get("repeats", 1), 1),
        values.get("measure", ACCURACY),
        tuple(values.get("notes", [])),
        tuple(values.get("figures", [])),
        tuple(_published(published.get("values", {}), [*rows, *columns], axes)),
        str(published.get("source", "")),
        middle=require_one_of("middle", values.get("middle", "median"), ("median", "mean")),
    )


_KEYS = ("title", "question", "repeats", "measure", "rows", "columns", "notes", "figures", "recipe", "axes", "adjust")
_ALL_KEYS = (*_KEYS, "middle", "without", "paper")


def _refuse_unknown_keys(name: str, values: Mapping[str, Any]) -> None:
    for key in values:
        if key not in _ALL_KEYS:
            raise InputError(f"study {name} has the key {key}, which is unknown; known are {', '.join(_ALL_KEYS)}")
    for key in ("title", "question", "rows", "columns", "recipe", "axes"):
        if key not in values:
            raise InputError(f"study {name} lacks the key {key}; it must be given")
    if not isinstance(values["axes"], dict) or not all(isinstance(one, dict) and one for one in values["axes"].values()):
        raise InputError(f"study {name} has an axis without labels; each needs a table of labels with the keys they set")


def _labels(settings: Mapping[str, Any]) -> dict[Label, Any]:
    """Settings by label; labels become numbers if all of them are.

    >>> _labels({"3": {}, "1.5": {}})
    {3: {}, 1.5: {}}
    """
    numbers = all(re.fullmatch(r"\d+(\.\d+)?", label) for label in settings)
    return {_number(label) if numbers else label: change for label, change in settings.items()}


def _number(label: str) -> float:
    value = float(label)
    return int(value) if value.is_integer() else value


def _combinations(axes: Mapping[str, Mapping[Label, Any]]) -> Iterator[Labels]:
    for chosen in itertools.product(*axes.values()):
        yield dict(zip(axes, chosen, strict=True))


def _matches(labels: Labels, wanted: Mapping[str, Any]) -> bool:
    """Whether the labels match ``wanted``, where a list allows any of its labels."""
    return all(labels[axis] in (label if isinstance(label, list) else [label]) for axis, label in wanted.items())


def _cell(
    name: str, labels: Labels, axes: Mapping[str, Mapping[Label, Any]], values: Mapping[str, Any], overrides: Sequence[str]
) -> Cell:
    settings: dict[str, Any] = {"name": name, **values["recipe"]}
    for axis, label in labels.items():
        change = dict(axes[axis][label])
        if "recipe" in change:
            settings = _merged(settings, {**recipe_values(change.pop("recipe")), "name": name})
        settings = _merged(settings, change)
    for adjustment in values.get("adjust", []):
        unknown = set(adjustment["cell"]) - set(axes)
        if unknown:
            raise InputError(f"study {name} adjusts cells by {', '.join(sorted(unknown))}; use its axes {', '.join(axes)}")
        if _matches(labels, adjustment["cell"]):
            settings = _merged(settings, adjustment["set"])
    settings = copy.deepcopy(settings)  # overrides change tables in place, which cells share
    apply_overrides(settings, overrides)
    return Cell(labels, Recipe.from_dict(settings))


def _merged(settings: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` updated with ``change``; tables are merged, and the value ``"none"`` removes a key.

    >>> _merged({"steps": 10, "optimizer": {"eps": 1e-8}}, {"steps": "none", "optimizer": {"density": 0.1}})
    {'optimizer': {'eps': 1e-08, 'density': 0.1}}
    """
    merged = dict(settings)
    for key, value in change.items():
        if value == "none":
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            merged[key] = {**merged.get(key, {}), **value}
        else:
            merged[key] = value
    return merged


def _published(
    values: Mapping[str, Any], axes_left: Sequence[str], axes: Mapping[str, Mapping[Label, Any]], labels: Labels | None = None
) -> Iterator[Published]:
    """The paper's results, nested by row labels and then column labels; each is a value or ``[value, spread]``."""
    if not axes_left:
        value, spread = values if isinstance(values, list) else (values, None)
        yield Published(dict(labels or {}), float(value), None if spread is None else float(spread))  # type: ignore[arg-type]
        return
    axis = axes_left[0]
    by_name = {str(label): label for label in axes[axis]}
    for label, inner in values.items():
        if label not in by_name:
            raise InputError(
                f"the paper's values have the label {label!r}, which axis {axis!r} has not; use one of {', '.join(by_name)}"
            )
        yield from _published(inner, axes_left[1:], axes, {**(labels or {}), axis: by_name[label]})
