"""Reads a sweep: the results of many runs of one experiment, and the paper's results for comparison.

``experiment.json`` describes the experiment and the cells of its table; ``results.jsonl`` has a line per finished run. Several
lines of the same cell are repeats with fresh randomness. docs/report.md documents every field.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dp_microadam.errors import InputError
from dp_microadam.validation import require_one_of
from dp_microadam.workbench.reporting.formats import decimals_of, fixed, is_number, signed
from dp_microadam.workbench.reporting.tables import file_name

EXPERIMENT = "experiment.json"
RESULTS = "results.jsonl"

Key = frozenset[tuple[str, Any]]

_COST_UNITS = ("s", "second", "seconds", "min", "minutes", "h", "hour", "hours", "day", "days", "byte", "bytes", "ε")
_COSTS = ("cost", "time", "memory", "loss", "error")
"""Units and words of values for which less is better."""


@dataclass(frozen=True)
class Outcome:
    """Result of one run. ``value`` is None if it failed, for instance by divergence; ``curve`` has step, loss and accuracy.

    If the run kept an average of the weights, ``value`` is that of the average, and ``final_weights`` that of the weights after
    the last step.
    """

    cell: Mapping[str, Any]
    repeat: int
    value: float | None
    final_weights: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    private: bool = False
    steps: int | None = None
    parameters: int | None = None
    seconds: float | None = None
    folder: str | None = None
    curve: tuple[tuple[float, ...], ...] = ()
    date: str = ""
    machine: str = ""
    commit: str = ""


@dataclass(frozen=True)
class Published:
    """The paper's result for a cell; ``spread`` is the number after its ±."""

    cell: Mapping[str, Any]
    value: float
    spread: float | None = None


_MIDDLES: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "mean": statistics.mean}


@dataclass(frozen=True)
class Summary:
    """Median (or mean) and range of the repeats of a cell."""

    middle: float
    low: float
    high: float
    seeds: int


@dataclass(frozen=True)
class Sweep:
    """An experiment with its results so far. ``rows`` and ``columns`` name the keys of a cell that span the table."""

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Mapping[str, Any], ...]
    outcomes: tuple[Outcome, ...]
    published: tuple[Published, ...] = ()
    published_source: str = "the paper"
    question: str = ""
    scale: str = ""
    command: str = ""
    notes: tuple[str, ...] = ()
    figures: tuple[Mapping[str, Any], ...] = ()
    value: str = "test accuracy"
    unit: str = "%"
    better: str = "higher"
    middle: str = "median"
    """What a cell shows of its repeats: their median or their mean."""
    folder: Path | None = field(default=None, compare=False)

    @classmethod
    def read(cls, folder: str | Path) -> Sweep:
        """Read a sweep folder.

        Raises:
            InputError: if there is no sweep in ``folder``, or its files cannot be parsed.
        """
        path = Path(folder) / EXPERIMENT
        if not path.is_file():
            raise InputError(f"sweep is {str(folder)!r}; it must be a folder with an {EXPERIMENT}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            outcomes = _read_outcomes(Path(folder) / RESULTS)
            cells = [dict(one) for one in content["cells"]]
            cells += [dict(one.cell) for one in outcomes if dict(one.cell) not in cells]
            sweep = cls(
                name=str(content["name"]),
                title=str(content.get("title") or content["name"]),
                rows=tuple(content["rows"]),
                columns=tuple(content["columns"]),
                cells=tuple({key_of(one): one for one in cells}.values()),
                outcomes=outcomes,
                published=tuple(
                    Published(one["cell"], float(one["value"]), one.get("spread")) for one in content.get("paper", [])
                ),
                published_source=str(content.get("paper_source") or "the paper"),
                question=str(content.get("question", "")),
                scale=str(content.get("scale", "")),
                command=str(content.get("command", "")),
                notes=tuple(content.get("notes", [])),
                figures=tuple(dict(one) for one in content.get("figures", [])),
                value=str(content.get("value", "test accuracy")),
                unit=str(content.get("unit", "%")),
                better=str(
                    content.get("better") or _usual_direction(str(content.get("value", "")), str(content.get("unit", "%")))
                ),
                middle=require_one_of("middle", content.get("middle", "median"), tuple(_MIDDLES)),
                folder=Path(folder),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path} does not describe a sweep, write it again with reproduce: {type(error).__name__}: {error}"
            ) from None
        sweep._refuse_cells_without_place()
        return sweep

    def _refuse_cells_without_place(self) -> None:
        spanning = (*self.rows, *self.columns)
        for one in self.cells:
            if set(one) != set(spanning):
                raise InputError(
                    f"cell {dict(one)} of sweep {self.name!r} must have the keys that span its table: {', '.join(spanning)}"
                )

    def of(self, cell: Mapping[str, Any]) -> list[Outcome]:
        """The repeats of a cell, in their order."""
        wanted = key_of(cell)
        return sorted((one for one in self.outcomes if key_of(one.cell) == wanted), key=lambda one: one.repeat)

    def summary(self, cell: Mapping[str, Any]) -> Summary | None:
        """Median (or mean), smallest, largest and number of the cell's values; None if there is none."""
        values = [one.value for one in self.of(cell) if one.value is not None]
        return Summary(_MIDDLES[self.middle](values), min(values), max(values), len(values)) if values else None

    def paper(self, cell: Mapping[str, Any]) -> Published | None:
        wanted = key_of(cell)
        return next((one for one in self.published if key_of(one.cell) == wanted), None)

    def difference(self, cell: Mapping[str, Any]) -> float | None:
        """Our median (or mean) minus the paper's value; None if either is missing."""
        ours, theirs = self.summary(cell), self.paper(cell)
        return None if ours is None or theirs is None else ours.middle - theirs.value

    def median_run(self, cell: Mapping[str, Any]) -> Outcome | None:
        """The repeat with the median value; for an even number, the worse of the two middle ones."""
        ranked = sorted((one for one in self.of(cell) if one.value is not None), key=lambda one: one.value or 0.0)
        if self.better == "lower":
            ranked.reverse()
        return ranked[(len(ranked) - 1) // 2] if ranked else None

    def best_of(self, cells: Sequence[Mapping[str, Any]]) -> set[Key]:
        """The cells with the best median (or mean), after rounding; among runs with a privacy budget if there are any.

        Empty for a single cell, and for values that cannot be compared.
        """
        middles = {key_of(one): round(found.middle, self.decimals) for one in cells if (found := self.summary(one)) is not None}
        if len(middles) < 2 or self.better == "neither":
            return set()
        budgeted = {key_of(one.cell) for one in self.outcomes if one.epsilon is not None}
        rivals = {key: value for key, value in middles.items() if key in budgeted} or middles
        best = min(rivals.values()) if self.better == "lower" else max(rivals.values())
        return {key for key, value in rivals.items() if value == best}

    @property
    def trained(self) -> bool:
        """Whether values come from training runs rather than from timing a few steps."""
        return self.value != "cost"

    def written(self, value: float, *, sign: bool = False) -> str:
        """A value, or with ``sign`` a difference, formatted for tables and figures."""
        # Counts and hours share a table of costs, so there each number has the digits it needs.
        digits = self.decimals if self.unit else 0 if value == int(value) or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
        return signed(value, digits) if sign else fixed(value, digits)

    @property
    def decimals(self) -> int:
        """Number of decimals: as in the paper's results, otherwise one for percentages and three for other values."""
        return max((decimals_of(one.value) for one in self.published), default=1 if self.unit == "%" else 3)

    @property
    def slug(self) -> str:
        """The name in files and anchors."""
        return file_name(self.name)

    @property
    def value_with_unit(self) -> str:
        return f"{self.value} ({self.unit})" if self.unit else self.value

    def values_of(self, key: str) -> list[Any]:
        """The values of a key, in the order of the cells."""
        return list(dict.fromkeys(one[key] for one in self.cells if key in one))

    @property
    def method_key(self) -> str:
        """The key that distinguishes the lines of a figure."""
        return "method" if all("method" in one for one in self.cells) else (*self.columns, *self.rows)[0]


def key_of(cell: Mapping[str, Any]) -> Key:
    """A cell as a hashable key.

    >>> key_of({"method": "DP-SGD", "σ": 3}) == key_of({"σ": 3.0, "method": "DP-SGD"})
    True
    """
    return frozenset(cell.items())


def _read_outcomes(path: Path) -> tuple[Outcome, ...]:
    """All results; for the same cell and repeat the later line counts, and lines cut off by a crash are skipped."""
    found: dict[tuple[Key, int], Outcome] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in lines:
        try:
            content = json.loads(line)
        except ValueError:
            continue
        names = Outcome.__dataclass_fields__.keys() & content.keys() - {"value", "curve", "cell", "repeat"}
        outcome = Outcome(
            cell=dict(content["cell"]),
            repeat=int(content.get("repeat", 1)),
            value=float(content["value"]) if is_number(content.get("value")) else None,
            curve=tuple(tuple(point) for point in content.get("curve") or ()),
            **{name: content[name] for name in names},
        )
        found[key_of(outcome.cell), outcome.repeat] = outcome
    return tuple(found.values())


def _usual_direction(value: str, unit: str) -> str:
    """Whether higher or lower values are better; neither for values without a unit, which are of several kinds.

    >>> _usual_direction("test accuracy", "%"), _usual_direction("training time", "hours"), _usual_direction("cost", "")
    ('higher', 'lower', 'neither')
    """
    if not unit:
        return "neither"
    costs = unit in _COST_UNITS or not {*value.casefold().split()}.isdisjoint(_COSTS)
    return "lower" if costs else "higher"
