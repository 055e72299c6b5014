"""Reads the rows of a CSV file: inputs, labels and users, and everything that is wrong with them.

Training and ``dp-microadam data check`` read a file with the same function. Training refuses a file with problems by a sentence
without lines or values; the check lists all lines, for the owner of the data.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.arrays import Arrays
from dp_microadam.workbench.data.columns import Column, Columns, Number, Unsuitable
from dp_microadam.workbench.data.users import as_ids

_ROWS_AT_ONCE = 16_384
_LINES_NAMED = 10


@dataclass(frozen=True)
class Layout:
    """What a recipe says about a table.

    ``label`` and ``user`` are names of columns, ``classes`` the number of classes or their names. ``columns`` declares the
    inputs; None: all other columns are numbers. ``header`` names the columns of a file whose first line does not.
    """

    label: str
    classes: int | Sequence[str]
    user: str | None = None
    columns: Columns | None = None
    header: tuple[str, ...] | None = None


@dataclass(frozen=True)
class CsvFile:
    """A CSV file and how to read it. ``clean`` changes a line before it is read."""

    path: Path
    layout: Layout
    may_lack_users: bool = False
    clean: Callable[[str], str] | None = None


@dataclass
class Problems:
    """What is wrong with the cells of a file: for each fault in a column, the remedy and the lines."""

    path: Path
    counted: str = "line"
    found: dict[tuple[str, str], tuple[str, list[int]]] = field(default_factory=dict)

    def add(self, column: str, fault: str, remedy: str, lines: Iterable[int]) -> None:
        """``column`` is empty for a fault of whole rows."""
        self.found.setdefault((column, fault), (remedy, []))[1].extend(lines)

    def sentences(self) -> Iterator[str]:
        """One sentence per fault, with the lines, for the owner of the data."""
        for (column, fault), (remedy, lines) in self.found.items():
            named = [str(line) for line in sorted(lines)[:_LINES_NAMED]]
            where = f"{self.counted}{'s' * (len(named) > 1)} {', '.join(named)}{' and more' * (len(lines) > _LINES_NAMED)}"
            what = f"a cell in column {column!r}" if column else "a row"
            yield f"{self.path} has in {where} {what} that {fault}; {remedy}"

    def refuse(self) -> None:
        """Raise InputError if there are any, without lines: they are private."""
        for (column, fault), (remedy, _) in self.found.items():
            what = f"a cell in column {column!r}" if column else "a row"
            raise InputError(f"{self.path} has {what} that {fault}; {remedy} (dp-microadam data check RECIPE names the lines)")


def read_rows(file: CsvFile) -> tuple[Arrays, Problems]:
    """Read a file; the inputs of cells with problems are left as zeros.

    Raises:
        InputError: if it is not a CSV file with the columns of its layout, or has no rows.
    """
    path, layout = file.path, file.layout
    problems = Problems(path)
    inputs, labels, users = [], [], []
    for cells in blocks(file, problems):
        columns = input_columns(file, cells.at)
        parts = [cells.encoded(name, column) for name, column in columns.items()]
        inputs.append(np.concatenate(parts, axis=1, dtype=np.float32))
        labels.append(cells.encoded(layout.label, _Label(layout.classes))[:, 0].astype(np.int64))
        if layout.user in cells.at:
            users.append(cells.users(layout.user))
    found = Arrays([np.concatenate(inputs)], np.concatenate(labels), np.concatenate(users) if users else None)
    if not len(found) and not problems.found:
        raise InputError(f"{path} holds no examples; it must have at least one")
    return found, problems


def blocks(file: CsvFile, problems: Problems) -> Iterator[Cells]:
    """The rows of a file, some thousand at a time, all with as many cells as the header. Empty lines are passed over.

    The last block may be empty, so that the header of a file without rows is looked at as well.
    """
    path = file.path
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream if file.clean is None else map(file.clean, stream), skipinitialspace=True)
            at = _places(path, file.layout.header or [name.strip() for name in next(reader, [])])
            lines: list[int] = []
            rows: list[list[str]] = []
            begins = reader.line_num + 1
            for row in reader:
                if len(row) == len(at):
                    lines.append(begins)
                    rows.append(row)
                elif row:
                    remedy = "every row must have one cell for each column"
                    problems.add("", f"does not have {len(at)} cells like the header", remedy, [begins])
                begins = reader.line_num + 1
                if len(rows) == _ROWS_AT_ONCE:
                    yield Cells(at, lines, rows, problems)
                    lines, rows = [], []
            yield Cells(at, lines, rows, problems)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    except csv.Error:
        raise InputError(f"{path} is not a CSV file; cells must be separated by commas, and quotes closed") from None


def _places(path: Path, header: Sequence[str]) -> dict[str, int]:
    if len(header) == 1 and (";" in header[0] or "\t" in header[0]):
        raise InputError(f"{path} has its cells separated by semicolons or tabs; they must be separated by commas")
    for place, name in enumerate(header):
        if name in header[:place]:  # not quoted: in a file without a header it is a cell of an example
            raise InputError(
                f"{path} has the same name for columns {header.index(name) + 1} and {place + 1}; the first line must give each "
                "column a name of its own"
            )
    return {name: place for place, name in enumerate(header)}


def input_columns(file: CsvFile, at: dict[str, int]) -> dict[str, Column]:
    """The columns that are inputs, in the order of the model's inputs, if the file has those of its layout.

    Raises:
        InputError: naming a column that is missing or not declared.
    """
    path, layout = file.path, file.layout
    if layout.label not in at or len(at) < 2:
        raise InputError(
            f"{path} must have one column {layout.label!r} and others; data_options.label names the column of labels"
        )
    if layout.user is not None and layout.user not in at and not file.may_lack_users:
        raise InputError(
            f"{path} must have one column {layout.user!r} and others; data_options.user_column names that of users"
        )
    others = [name for name in at if name not in (layout.label, layout.user)]
    if layout.columns is None:
        if not others:
            raise InputError(f"{path} must have columns beside {layout.label!r} and {layout.user!r}, the inputs of the model")
        return {name: Number() for name in others}
    declared = layout.columns.columns
    undeclared = [name for name in others if name not in declared]
    absent = [name for name, column in declared.items() if column.width and name not in others]
    if undeclared or absent:
        wrong, remedy = (undeclared, "declare it, if only as ignored") if undeclared else (absent, "it must have all of them")
        raise InputError(
            f"{path} has {'a' if undeclared else 'no'} column {wrong[0]!r}, which [columns] "
            f"{'does not declare' if undeclared else 'declares as an input'}; {remedy}"
        )
    return {name: column for name, column in declared.items() if column.width}


@dataclass
class Cells:
    """The cells of some rows of a file: where each column is, the line in which each row begins, and the rows."""

    at: dict[str, int]
    lines: list[int]
    rows: list[list[str]]
    problems: Problems

    def of(self, name: str) -> list[str]:
        """The text of each cell in a column."""
        place = self.at[name]
        return [row[place].strip() for row in self.rows]

    def encoded(self, name: str, column: Column | _Label) -> NDArray[np.float64]:
        """The vector of each cell, [rows, width]. Different texts are encoded once."""
        texts = self.of(name)
        number_of = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        vectors = np.zeros((len(number_of), column.width))
        unsuitable = {}
        for text, number in number_of.items():
            try:
                vectors[number] = column.vector(text)
            except Unsuitable as error:
                unsuitable[text] = error
        if unsuitable:
            for line, text in zip(self.lines, texts, strict=True):
                if text in unsuitable:
                    self.problems.add(name, unsuitable[text].fault, unsuitable[text].remedy, [line])
        return vectors[np.fromiter((number_of[text] for text in texts), np.int64, len(texts))]

    def users(self, name: str) -> NDArray[np.str_]:
        """The user of each row."""
        ids = as_ids(np.array(self.of(name), dtype=np.str_))
        nobody = np.flatnonzero(ids == "")
        if len(nobody):
            lines = [self.lines[row] for row in nobody]
            self.problems.add(name, "names no user", "every row must name its user", lines)
        return ids


@dataclass(frozen=True)
class _Label:
    """The column of labels: the number of a class, or its name."""

    classes: int | Sequence[str]
    width: int = 1

    def vector(self, text: str) -> tuple[float, ...]:
        if not isinstance(self.classes, int):
            names = [name.strip() for name in self.classes]
            if text in names:
                return (names.index(text),)
            raise Unsuitable(f"is a label that is not among classes = {names}", "name all of them in data_options.classes")
        if text.isdecimal() and len(text) < 10 and int(text) < self.classes:
            return (int(text),)
        raise Unsuitable("is an invalid label", f"with classes = {self.classes} labels must be 0 to {self.classes - 1}")
