"""Declared columns of a table: how the text of a cell becomes inputs of a model.

Ranges and values are public. They come from the recipe and never from the data, so a row is encoded without any other row,
in training and wherever the model is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, ClassVar

from dp_microadam.errors import InputError

_LARGEST_FLOAT32 = 3.4e38


class Unsuitable(ValueError):
    """Raised for a cell that cannot be encoded. ``fault`` completes "a cell that …" and never contains the text of the cell."""

    def __init__(self, fault: str, remedy: str) -> None:
        super().__init__(fault)
        self.fault = fault
        self.remedy = remedy


@dataclass(frozen=True)
class Column:
    """One column. ``missing`` are the texts that stand for a missing value; if there are any, one input says whether it is."""

    missing: tuple[str, ...] = ()
    options: ClassVar[tuple[str, ...]] = ("missing",)

    @property
    def width(self) -> int:
        """How many inputs of the model the column becomes."""
        return self._own_width + bool(self.missing)

    def vector(self, text: str) -> tuple[float, ...]:
        """The inputs for a cell, whose text has no spaces around it. A missing value is all zeros, and a one at the end.

        Raises:
            Unsuitable: if the text is neither what the column declares nor declared as missing.
        """
        if text in self.missing:
            return (*[0.0] * self._own_width, 1.0)
        if not text:
            raise Unsuitable("is empty", 'fill it, or declare missing = ""')
        return (*self._encoded(text), *[0.0] * bool(self.missing))

    def clamps(self, text: str) -> bool:
        """Whether the cell holds a value outside the declared range, which becomes the nearest one inside."""
        return False

    @property
    def _own_width(self) -> int:
        return 1

    def _encoded(self, text: str) -> tuple[float, ...]:
        raise NotImplementedError


@dataclass(frozen=True)
class Number(Column):
    """A number. ``range`` is mapped to [-1, 1], with ``log`` by logarithm, and what lies outside is clamped to it.

    >>> Number(range=(0, 100)).vector("25"), Number(range=(0, 100)).vector("1000")
    ((-0.5,), (1.0,))
    >>> Number(("?",), range=(0, 100)).vector("?")
    (0.0, 1.0)
    """

    range: tuple[float, float] | None = None
    """None only for tables whose columns are not declared: numbers are taken as they are."""
    log: bool = False
    options = ("range", "log", "missing")

    def clamps(self, text: str) -> bool:
        return text not in self.missing and self.range is not None and not self.range[0] <= _finite(text) <= self.range[1]

    def _encoded(self, text: str) -> tuple[float, ...]:
        number = _finite(text)
        if self.range is None:
            return (number,)
        low, high = self.range
        inside = min(max(number, low), high)
        if self.log:
            return (2 * math.log1p(inside - low) / math.log1p(high - low) - 1,)
        return (2 * (inside - low) / (high - low) - 1,)


@dataclass(frozen=True)
class Category(Column):
    """One of ``values``: an input for each, of which one is 1. With ``other``, one more input is for all values not declared.

    >>> Category(values=("low", "high"), other=True).vector("high"), Category(values=("low", "high"), other=True).vector("new")
    ((0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    """

    values: tuple[str, ...] = ()
    other: bool = False
    options = ("values", "other", "missing")

    @property
    def _own_width(self) -> int:
        return len(self.values) + self.other

    def _encoded(self, text: str) -> tuple[float, ...]:
        if text not in self.values and not self.other:
            raise Unsuitable("is not among the declared values", "add it to values if it is public, or set other = true")
        place = self.values.index(text) if text in self.values else len(self.values)
        return tuple(float(place == index) for index in range(self._own_width))


@dataclass(frozen=True)
class Date(Column):
    """A day. ``range``, in ordinal numbers of days, is mapped to [-1, 1], and what lies outside is clamped to it.

    >>> year = (date(2023, 1, 1).toordinal(), date(2024, 1, 1).toordinal())
    >>> Date(range=year).vector("2022-07-02T10:30"), Date(range=year, format="%d.%m.%Y").vector("01.01.2024")
    ((-1.0,), (1.0,))
    """

    range: tuple[int, int] = (1, 2)
    format: str | None = None
    options = ("range", "format", "missing")

    def clamps(self, text: str) -> bool:
        return text not in self.missing and not self.range[0] <= self.day(text) <= self.range[1]

    def _encoded(self, text: str) -> tuple[float, ...]:
        low, high = self.range
        return (2 * (min(max(self.day(text), low), high) - low) / (high - low) - 1,)

    def day(self, text: str) -> int:
        """The ordinal number of the day."""
        try:
            return (datetime.strptime(text, self.format) if self.format else datetime.fromisoformat(text)).toordinal()
        except ValueError:
            like = f"of the format {self.format}" if self.format else "like 2024-01-31"
            raise Unsuitable(f"is not a date {like}", "write it so, or declare the format of the column") from None


@dataclass(frozen=True)
class Ignored(Column):
    """A column that is no input, such as a name or a number of a record."""

    options = ()

    @property
    def width(self) -> int:
        return 0

    def vector(self, text: str) -> tuple[float, ...]:
        return ()


def _finite(text: str) -> float:
    try:
        number = float(text) if "_" not in text else math.nan  # Python reads 1_000 as a thousand, other programs do not
    except ValueError:
        number = math.nan
    if not abs(number) <= _LARGEST_FLOAT32:
        raise Unsuitable("is not a finite number", "write a number, or declare the text that stands for a missing one")
    return number


class Columns:
    """The declared inputs of a table, in the order of their declaration, which is that of the model's inputs.

    >>> columns = Columns.of({"age": {"kind": "number", "range": [0, 100]}, "sex": {"kind": "category", "values": ["f", "m"]}})
    >>> columns.vector({"sex": "m", "age": " 50", "name": "not declared, not used"})
    [0.0, 0.0, 1.0]
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.columns = dict(columns)

    @classmethod
    def of(cls, declared: Mapping[str, Mapping[str, Any]]) -> Columns:
        """The columns that a recipe declares under ``[columns]``.

        Raises:
            InputError: naming the column and what is wrong with its declaration.
        """
        found = cls({name: _column(f"columns.{name}", given) for name, given in declared.items()})
        if not found.width:
            raise InputError(f"columns declares {', '.join(declared) or 'nothing'}; at least one column must be an input")
        return found

    @property
    def declared(self) -> dict[str, dict[str, Any]]:
        """The columns as a recipe declares them."""
        return {name: plain(column) for name, column in self.columns.items()}

    @property
    def width(self) -> int:
        """How many inputs a row becomes."""
        return sum(column.width for column in self.columns.values())

    def vector(self, row: Mapping[str, str]) -> list[float]:
        """The inputs of the model for one row, given as the text of each column.

        Raises:
            InputError: naming the column that is not there or cannot be encoded.
        """
        inputs: list[float] = []
        for name, column in self.columns.items():
            if column.width and name not in row:
                raise InputError(f"the row has no column {name!r}; it must have all declared columns")
            try:
                inputs += column.vector(row.get(name, "").strip())
            except Unsuitable as error:
                raise InputError(f"the row has a cell in column {name!r} that {error.fault}; {error.remedy}") from None
        return inputs


def declaration(key: str, value: Any) -> dict[str, Any]:
    """Check ``[columns]`` of a recipe, and return it as plain data in which declarations with the same meaning are equal."""
    if not isinstance(value, Mapping):
        raise InputError(f"{key} is {value!r}; it must be a table with a declaration for each column")
    return Columns.of(value).declared if value else {}


KINDS: Mapping[str, type[Column]] = {"number": Number, "category": Category, "date": Date, "ignored": Ignored}


def _column(key: str, given: Any) -> Column:
    kind = given.get("kind") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f'{key} is {given!r}; it must be like {{ kind = "number", range = [0, 100] }}, of kind {_or(KINDS)}')
    known = KINDS[kind].options
    for option, value in given.items():
        if option != "kind" and option not in known:
            raise InputError(f"{key}.{option} = {value!r} is unknown; a {kind} column takes {_or(known) if known else 'none'}")
    missing = _texts(f"{key}.missing", given.get("missing", []))
    if kind == "number":
        log = _flag(f"{key}.log", given.get("log", False))
        return Number(missing, _range(f"{key}.range", given.get("range"), _number, "two numbers", float), log)
    if kind == "category":
        values = _texts(f"{key}.values", given.get("values", []))
        if not values or set(values) & set(missing):
            raise InputError(f"{key}.values is {given.get('values')!r}; it must name all values but the missing one")
        return Category(missing, values, _flag(f"{key}.other", given.get("other", False)))
    if kind == "date":
        days = _range(f"{key}.range", given.get("range"), _day, "two dates like 2024-01-31", int)
        return Date(missing, days, _format(f"{key}.format", given.get("format")))
    return Ignored()


def plain(column: Column) -> dict[str, Any]:
    """The declaration of a column as a recipe has it."""
    declared: dict[str, Any] = {"kind": next(kind for kind, known in KINDS.items() if type(column) is known)}
    for option in column.options:
        value = getattr(column, option)
        if isinstance(column, Date) and option == "range":
            value = [date.fromordinal(day).isoformat() for day in value]
        if value not in (None, (), False):
            declared[option] = list(value) if isinstance(value, tuple) else value
    return declared


def _or(words: Sequence[str] | Mapping[str, Any]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{key} is {value!r}; it must be true or false")
    return value


def _texts(key: str, given: Any) -> tuple[str, ...]:
    """A text or a list of different ones; whole numbers are taken as the text they are written as."""
    texts = given if isinstance(given, list | tuple) else [given]
    if any(isinstance(text, bool) or not isinstance(text, str | int) for text in texts):
        raise InputError(f"{key} is {given!r}; it must be a list of texts")
    stripped = tuple(str(text).strip() for text in texts)
    if len(set(stripped)) != len(texts):
        raise InputError(f"{key} is {given!r}; it must be a list of different texts")
    return stripped


def _range(key: str, given: Any, read: Any, like: str, kind: type) -> Any:
    try:
        low, high = (read(end) for end in given)
    except (TypeError, ValueError):
        low = high = 0
    if not low < high:
        raise InputError(f"{key} is {given!r}; it must be {like}, the smaller first: public limits, not those of the data")
    return kind(low), kind(high)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST_FLOAT32:
        raise ValueError
    return float(value)


def _day(value: Any) -> int:
    moment = value if isinstance(value, date) else datetime.fromisoformat(value)
    return moment.toordinal()


def _format(key: str, value: Any) -> str | None:
    if value is None:
        return None
    day = datetime(2024, 10, 31)
    try:
        if datetime.strptime(day.strftime(value), value) == day:
            return str(value)
    except (TypeError, ValueError):
        pass
    raise InputError(f"{key} is {value!r}; it must name day, month and year, as in %d.%m.%Y")
