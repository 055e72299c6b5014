"""Declared columns of a table: how the text of a cell becomes inputs of a model.

Ranges and values are public. They come from the recipe and never from the data, so a row is encoded without any other row,
in training and wherever the model is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dp_microadam.errors import InputError
from dp_microadam.validation import require_flag

_LARGEST_FLOAT32 = 3.4e38

_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "number": ("range", "log", "missing"),
    "category": ("values", "other", "missing"),
    "ignored": (),
}
"""By kind of column: what its declaration may say."""


class Unsuitable(InputError):
    """Why a cell or row cannot be used. ``fault`` completes "a cell that …" and never contains the text of the cell."""

    def __init__(self, fault: str, remedy: str) -> None:
        super().__init__(f"the row {fault}; {remedy}")
        self.fault = fault
        self.remedy = remedy


@dataclass(frozen=True)
class Column:
    """One column; see docs/recipes.md for the kinds.

    A number becomes one input: ``range`` is mapped to [-1, 1], and what lies outside is clamped to it. A category
    becomes an input for each of ``values``, of which one is 1; with ``other``, one more is for values that are not declared.
    ``missing`` are the texts that stand for a missing value: if there are any, one more input says whether it is.

    >>> Column("number", range=(0, 100)).vector("25"), Column("number", range=(0, 100)).vector("1000")
    ((-0.5,), (1.0,))
    >>> Column("number", missing=("?",), range=(0, 100)).vector("?")
    (0.0, 1.0)
    >>> Column("category", values=("low", "high"), other=True).vector("new")
    (0.0, 0.0, 1.0)
    """

    kind: str = "number"
    range: tuple[float, float] | None = None
    """None only for tables without declared columns, whose numbers are taken as they are."""
    log: bool = False
    values: tuple[str, ...] = ()
    other: bool = False
    missing: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """How many inputs of the model the column becomes."""
        return self._own_width + bool(self.missing)

    @property
    def _own_width(self) -> int:
        return {"category": len(self.values) + self.other, "ignored": 0}.get(self.kind, 1)

    def vector(self, text: str) -> tuple[float, ...]:
        """The inputs for the text of a cell. A missing value is all zeros, and a one at the end."""
        text = text.strip()
        if text in self.missing:
            return (*[0.0] * self._own_width, 1.0)
        if not text:
            raise Unsuitable("is empty", 'fill it, or declare missing = ""')
        return (*self._encoded(text), *[0.0] * bool(self.missing))

    def _encoded(self, text: str) -> tuple[float, ...]:
        if self.kind == "category":
            if text not in self.values and not self.other:
                raise Unsuitable("is not among the declared values", "add it to values if it is public, or set other = true")
            place = self.values.index(text) if text in self.values else len(self.values)
            return tuple(float(place == index) for index in range(self._own_width))
        number = _number_in(text)
        if self.range is None:
            return (number,)
        low, high = self.range
        inside = min(max(number, low), high)
        share = math.log1p(inside - low) / math.log1p(high - low) if self.log else (inside - low) / (high - low)
        return (2 * share - 1,)


def _number_in(text: str) -> float:
    try:
        number = float(text) if "_" not in text else math.nan  # Python reads 1_000 as a thousand, other programs do not
    except ValueError:
        number = math.nan
    if not abs(number) <= _LARGEST_FLOAT32:
        raise Unsuitable("is not a finite number", "write a number, or declare the text that stands for a missing one")
    return number


class Columns:
    """The declared inputs of a table, in the order of their declaration, which is that of the model's inputs.

    ``declared`` is the declaration as a recipe has it; None for names of numbers.

    >>> columns = Columns.of({"age": {"kind": "number", "range": [0, 100]}, "sex": {"kind": "category", "values": ["f", "m"]}})
    >>> columns.vector({"sex": "m", "age": " 50", "name": "not declared, not used"})
    [0.0, 0.0, 1.0]
    """

    def __init__(self, columns: Mapping[str, Column], declared: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.columns = dict(columns)
        self.declared = declared
        self.inputs = {name: column for name, column in columns.items() if column.width}
        self.width = sum(column.width for column in columns.values())

    @classmethod
    def of(cls, declared: Mapping[str, Mapping[str, Any]]) -> Columns:
        """The columns that a recipe declares under ``[columns]``."""
        found = cls({name: _column(f"columns.{name}", given) for name, given in declared.items()}, declared)
        if not found.inputs:
            raise InputError(f"columns declares {', '.join(declared) or 'nothing'}; at least one column must be an input")
        return found

    def vector(self, row: Mapping[str, str]) -> list[float]:
        """The inputs of the model for one row, given as the text of each column; Unsuitable names the column that has none."""
        inputs: list[float] = []
        for name, column in self.inputs.items():
            if name not in row:
                raise Unsuitable(f"has no column {name!r}", "it must have all columns that the model was trained on")
            try:
                inputs += column.vector(row[name])
            except Unsuitable as error:
                raise Unsuitable(f"has a cell in column {name!r} that {error.fault}", error.remedy) from None
        return inputs


def declaration(key: str, value: Any) -> dict[str, Any]:
    """Check ``[columns]`` of a recipe, and return it."""
    if not isinstance(value, Mapping):
        raise InputError(f"{key} is {value!r}; it must be a table with a declaration for each column")
    if value:
        Columns.of(value)
    return {name: dict(given) for name, given in value.items()}


def _column(key: str, given: Any) -> Column:
    kind = given.get("kind") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in _OPTIONS:
        kinds = "number, category or ignored"
        raise InputError(f'{key} is {given!r}; it must be like {{ kind = "number", range = [0, 100] }}, of kind {kinds}')
    options = _OPTIONS[kind]
    for option, value in given.items():
        if option != "kind" and option not in options:
            raise InputError(f"{key}.{option} = {value!r} is unknown; a {kind} column takes {', '.join(options) or 'none'}")
    found: dict[str, Any] = {option: _OPTION_READERS[option](f"{key}.{option}", given.get(option)) for option in options}
    if kind == "category" and (not found["values"] or set(found["values"]) & set(found["missing"])):
        raise InputError(f"{key}.values is {given.get('values')!r}; it must name all values but the missing one")
    return Column(kind, **found)


def _flag(key: str, value: Any) -> bool:
    return value is not None and require_flag(key, value)


def _texts(key: str, given: Any) -> tuple[str, ...]:
    """A text or a list of different ones; whole numbers are taken as the text they are written as."""
    texts = () if given is None else given if isinstance(given, list | tuple) else [given]
    if any(isinstance(text, bool) or not isinstance(text, str | int) for text in texts):
        raise InputError(f"{key} is {given!r}; it must be a list of texts")
    stripped = tuple(str(text).strip() for text in texts)
    if len(set(stripped)) != len(texts):
        raise InputError(f"{key} is {given!r}; it must be a list of different texts")
    return stripped


def _range(key: str, given: Any) -> tuple[float, float]:
    try:
        low, high = (_number(end) for end in given)
    except (TypeError, ValueError):
        low = high = 0
    if not low < high:
        raise InputError(f"{key} is {given!r}; it must be two numbers, the smaller first: public limits, not those of the data")
    return low, high


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST_FLOAT32:
        raise ValueError
    return float(value)


_OPTION_READERS = {"range": _range, "log": _flag, "values": _texts, "other": _flag, "missing": _texts}
