"""Rows of CSV files and JSON lines, and everything that is wrong with the files of a data set.

Training and ``dp-microadam data check`` read files with the same functions. Training refuses a file by one sentence without
lines or values, which are private; the check lists all lines, for the owner of the data.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.columns import Unsuitable

_LONGEST_CELL = 2**31 - 1
"""In characters. Python's own limit is 131,072, which a long document exceeds."""
_PLACES = 100
_SHOWN = 20


class Refusal(InputError):
    """Raised for :class:`Problems`."""


@dataclass
class Problems:
    """What is wrong with the files of a data set: sentences, and the places where each was found, such as lines."""

    found: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def add(self, fault: str, remedy: str, places: Iterable[str] = ()) -> None:
        """A fault, the beginning of a sentence without anything private, how to remove it, and the private places."""
        self.found.setdefault((fault, remedy), []).extend(places)

    def add_error(self, error: InputError) -> None:
        """A fault of a file as a whole."""
        fault, _, remedy = str(error).partition("; ")
        self.add(fault, remedy)

    def sentences(self) -> Iterator[str]:
        """One sentence per fault, with the places, for the owner of the data."""
        for (fault, remedy), places in self.found.items():
            named = ", ".join(dict.fromkeys(places[:_PLACES])) + ", …" * (len(places) > _PLACES)
            yield _sentence(f"{fault} ({named})" if places else fault, remedy)

    def refuse(self) -> None:
        """Raise Refusal if there are any: all of those that have no private places, else the first one without them."""
        public = [_sentence(*problem) for problem, places in self.found.items() if not places]
        if len(public) > 1:
            shown = [*public[:_SHOWN], *(["and more, which dp-microadam data check lists"] if len(public) > _SHOWN else [])]
            raise Refusal(f"the data have {len(public)} problems to remove:\n  " + "\n  ".join(shown))
        for problem, places in self.found.items():
            raise Refusal(_sentence(*problem) + " (dp-microadam data check RECIPE says where)" * bool(places))


def _sentence(fault: str, remedy: str) -> str:
    return f"{fault}; {remedy}" if remedy else fault


def unreadable(path: Path, error: OSError) -> InputError:
    """The error for a file that cannot be opened."""
    return InputError(f"{path} cannot be read: {error.strerror or error}")


Row = tuple[int, dict[str, Any] | Unsuitable]
"""The number of a row's first line, and its cells by column, or what is wrong with it as a whole."""

Read = TypeVar("Read")

_NOT_UTF8 = Unsuitable("is not valid UTF-8", "save the file in that encoding")


def open_rows(
    path: Path, header: Sequence[str] | None = None, clean: Callable[[str], str] | None = None
) -> tuple[list[str], Iterator[Row]]:
    """The names of the columns, and the rows of a CSV file or of JSON lines. Rows without anything are passed over.

    ``header`` names the columns of a CSV file whose first line does not; ``clean`` changes a line before it is read.

    Raises:
        InputError: if the file cannot be read, or two columns have the same name.
    """
    try:
        stream = path.open(newline="", encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise unreadable(path, error) from None
    if path.suffix.lower() == ".jsonl":
        with stream:
            rows = list(_json_rows(stream))
        return list(dict.fromkeys(name for _, row in rows if isinstance(row, dict) for name in row)), iter(rows)
    return _csv_rows(path, stream, header, clean)


def read_rows(file: Path, rows: Iterable[Row], read: Callable[[dict[str, Any]], Read]) -> Iterator[tuple[int, int, Read]]:
    """Number and line of each row, and what ``read`` makes of it; the first that cannot be used is refused by its line."""
    for number, (line, row) in enumerate(rows, 1):
        try:
            if isinstance(row, Unsuitable):
                raise row
            found = read(row)
        except Unsuitable as error:
            raise InputError(f"{file} line {line}: {error}") from None
        yield number, line, found


def text_of(cell: Any) -> str:
    """The cell if it is a text that can be used; raises Unsuitable if not."""
    if not isinstance(cell, str):
        raise Unsuitable("is no text", "it must be a string")
    if not cell.strip():
        raise Unsuitable("is empty", "write a text, or remove the row")
    if not _is_utf8(cell):
        raise _NOT_UTF8
    return cell


def word_of(cell: Any) -> str:
    """A label or user as text, the way a CSV file would hold it. 3.0 is 3, so that nobody counts as two users."""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    return "" if cell is None else str(cell).strip()


def user_of(cell: Any) -> str:
    """The user whom the cell names; raises Unsuitable if it names none."""
    if word_of(cell).lower() in ("", "nan"):
        raise Unsuitable("names no user", "every row must name its user")
    return word_of(cell)


def _is_utf8(text: str) -> bool:
    """Whether all bytes of the text were UTF-8: reading keeps others as lone surrogates."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _csv_rows(
    path: Path, stream: TextIO, header: Sequence[str] | None, clean: Callable[[str], str] | None
) -> tuple[list[str], Iterator[Row]]:
    csv.field_size_limit(_LONGEST_CELL)
    broken: set[int] = set()

    def lines() -> Iterator[str]:
        with stream:
            for number, line in enumerate(stream, 1):
                if not _is_utf8(line):
                    broken.add(number)
                yield line if clean is None else clean(line)

    reader = csv.reader(lines(), skipinitialspace=True, strict=True)
    try:
        names = [name.strip() for name in header or next(reader, [])]
    except OSError as error:
        raise unreadable(path, error) from None
    except csv.Error:
        raise InputError(f"{path} is not a CSV file; cells must be separated by commas, and quotes closed") from None
    if len(names) == 1 and (";" in names[0] or "\t" in names[0]):
        raise InputError(f"{path} has its cells separated by semicolons or tabs; they must be separated by commas")
    for place, name in enumerate(names):
        if name in names[:place]:  # not quoted: in a file without a header it is a cell of an example
            raise InputError(
                f"{path} has the same name for columns {names.index(name) + 1} and {place + 1}; the first line must give each "
                "column a name of its own"
            )

    def rows() -> Iterator[Row]:
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error:
                yield line, Unsuitable("has quotes that do not match", "a cell with quotes or line breaks must be quoted")
                continue
            if not broken.isdisjoint(range(line, reader.line_num + 1)):
                yield line, _NOT_UTF8
            elif len(cells) == len(names):
                yield line, dict(zip(names, cells, strict=True))
            elif cells:
                fault = f"does not have {len(names)} cells like the header"
                yield line, Unsuitable(fault, "every row must have one cell for each column; quote texts with commas")

    return names, rows()


def _json_rows(stream: TextIO) -> Iterator[Row]:
    for line, text in enumerate(stream, 1):
        if not _is_utf8(text):
            yield line, _NOT_UTF8
        elif text.strip():
            try:
                row = json.loads(text)
            except (ValueError, RecursionError):
                row = None
            yield line, row if isinstance(row, dict) else Unsuitable("is no JSON object", "every line must hold one")
