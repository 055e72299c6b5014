"""Texts to be classified, from files or standard input."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.text import ENDINGS, problem_of_text, rows_of

TEXT_ENDINGS = (*ENDINGS, ".txt")
STANDARD_INPUT = Path("-")


def texts_in(file: Path, column: str) -> Iterator[tuple[str, str]]:
    """The texts in a file, each with its name: ``column`` of a CSV file or of JSON lines, the lines of any other file.

    ``-`` is standard input, one text per line. Lines without anything are passed over.

    Raises:
        InputError: naming the file and the line, if it cannot be used.
    """
    tabular = file.suffix.lower() in ENDINGS
    try:
        for number, (line, text) in enumerate(_column(file, column) if tabular else _lines(file), 1):
            if (problem := problem_of_text(text, column)) is not None:
                raise InputError(f"{file}, line {line}: {problem}; remove the line, or mend it")
            yield f"{file} {'row' if tabular else 'line'} {number if tabular else line}", text
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from None


def _column(file: Path, column: str) -> Iterator[tuple[int, Any]]:
    for line, row in rows_of(file):
        if isinstance(row, str):
            raise InputError(f"{file}, line {line}: {row}; remove the line, or mend it")
        if column not in row:
            raise InputError(f"{file} has no column {column!r}, in which the model was given texts; name it so")
        yield line, row[column]


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    if file == STANDARD_INPUT:
        buffer = getattr(sys.stdin, "buffer", None)
        stream = sys.stdin if buffer is None else io.TextIOWrapper(buffer, encoding="utf-8-sig", errors="surrogateescape")
        yield from _without_empty(stream)
        return
    with file.open(encoding="utf-8-sig", errors="surrogateescape") as stream:
        yield from _without_empty(stream)


def _without_empty(stream: Any) -> Iterator[tuple[int, str]]:
    return ((line, text.rstrip("\n")) for line, text in enumerate(stream, 1) if text.strip())
