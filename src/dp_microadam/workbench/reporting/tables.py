"""Tables of reports, on the page and as CSV, and numbers as they stand in them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard


@dataclass(frozen=True)
class Cell:
    """Content of a table cell: one or more lines. ``best`` is set in bold, ``faint`` in grey."""

    lines: tuple[str, ...]
    best: bool = False
    faint: bool = False


def cell(*lines: object, best: bool = False, faint: bool = False) -> Cell:
    """A cell with these lines."""
    return Cell(tuple(str(line) for line in lines), best, faint)


@dataclass(frozen=True)
class Table:
    """A table. The first column names the row; the others hold numbers, or text if ``words`` is true.

    Its file is named after ``name``.
    """

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    words: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        header: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        note: str = "",
        words: bool = False,
    ) -> Table:
        """Build a table from rows of cells or of any values, which are converted by ``str``."""
        filled = tuple(tuple(one if isinstance(one, Cell) else cell(one) for one in row) for row in rows)
        return cls(name, title, tuple(header), filled, note, words)

    def left(self, column: int) -> bool:
        """Whether a column is aligned to the left."""
        return self.words or column == 0

    def csv(self) -> str:
        """The table as CSV; several lines of a cell are separated by semicolons.

        >>> Table.of("t", "Figures", ["σ", "accuracy"], [[3, cell("70.6", "on test data")]]).csv()
        'σ,accuracy\\n3,70.6; on test data\\n'
        """
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows(["; ".join(one.lines) for one in row] for row in self.rows)
        return file.getvalue()


def is_number(value: Any) -> TypeGuard[float]:
    """Whether ``value`` is a finite number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def confidence_in_words(confidence: float) -> str:
    """A confidence in percent, rounded down, with two decimals or as many as tell it from certainty.

    >>> confidence_in_words(0.95), confidence_in_words(1 - 0.05 / 3), confidence_in_words(1 - 1e-7)
    ('95 %', '98.33 %', '99.99999 %')
    """
    decimals = max(2, math.ceil(-math.log10(1 - confidence) - 1e-6) - 2)
    percent = math.floor(100 * confidence * 10**decimals + 1e-6) / 10**decimals
    return f"{percent:.{decimals}f}".rstrip("0").rstrip(".") + " %"


def in_bytes(count: float) -> str:
    """A number of bytes with a unit.

    >>> in_bytes(812), in_bytes(26010), in_bytes(2.5e9)
    ('812 B', '26 kB', '2.5 GB')
    """
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{float(f'{count / limit:.3g}'):g} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """A duration in seconds, minutes or hours.

    >>> duration(4.2), duration(301.2), duration(7384)
    ('4.2 s', '5 min 01 s', '2 h 03 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
