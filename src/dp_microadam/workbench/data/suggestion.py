"""Writes a first declaration of the columns of a CSV file, for its owner to edit.

It reads private rows. What it writes must not be used before its owner has replaced what is not public knowledge.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import tomli_w

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.columns import Column, Unsuitable
from dp_microadam.workbench.data.rows import open_rows

_MISSING = ("", "?", "NA", "N/A", "na", "n/a", "nan", "NaN", "NULL", "null", "None", ".", "-")
_FORMATS = (None, "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d")
_MOST_VALUES = 60
_ROWS_PER_VALUE = 10
"""Values that fewer rows have are not written down: they may say who is in the data."""

_HEAD = """\
# A first declaration of {path}. PRIVATE: it was written from the rows of the file, which no ε accounts for.
# Everything marked "public?" becomes public with the model. Replace it by what is known without this file: a code book, the
# questions of a form, the limits of a device. Then remove the marks, and choose epsilon, steps and batch_size.
data = "table"
data_folder = {folder}
model = "mlp"
epsilon = 3.0
steps = 500
batch_size = 256

[data_options]
label = {label}
classes = {classes}  # public? all classes there may be

[columns]
"""


def suggest(path: Path, label: str | None = None) -> str:
    """A recipe, as TOML text, for the CSV file at ``path``; ``label`` names the column of labels, by default the last one.

    Raises:
        InputError: if it is not a CSV file with a header, or has no such column.
    """
    if path.suffix.lower() != ".csv" or not path.is_file():
        raise InputError(f"{str(path)!r} is not a CSV file; --suggest needs one, with a header")
    names, rows = open_rows(path)
    seen: dict[str, Counter[str]] = {name: Counter() for name in names}
    for line, row in rows:
        if isinstance(row, Unsuitable):
            raise InputError(f"{path} has a row that {row.fault} (line {line}); {row.remedy}")
        for name, text in row.items():
            seen[name][text.strip()] += 1
    label = names[-1] if label is None and names else label
    if label not in seen or len(seen) < 2 or not seen[label]:
        raise InputError(
            f"{path} has no column {label!r} beside others with rows below; name the column of labels with --label"
        )
    classes = sorted(seen.pop(label))
    head = _HEAD.format(path=path, folder=_toml(str(path)), label=_toml(label), classes=_toml(classes[:_MOST_VALUES]))
    return head + "".join(f"{_key(name)} = {_line(*_declared(name, texts))}\n" for name, texts in seen.items())


def _declared(name: str, texts: Counter[str]) -> tuple[Column, str]:
    """A declaration for a column with these texts, and a remark."""
    missing = tuple(text for text in _MISSING if text in texts)
    present = [text for text in texts if text not in missing]
    numbers = _numbers(Column("number"), present)
    if numbers:
        rows = sum(texts[text] for text in present)
        if len(present) == rows > 1 and all(number.is_integer() for number in numbers) and "id" in name.lower():
            return Column("ignored"), "a different number in every row"
        return Column("number", range=_around(min(numbers), max(numbers)), missing=missing), "public? the limits"
    for form in _FORMATS:
        if days := _numbers(Column("date", format=form), present):
            first, last = (date.fromordinal(int(day)).year for day in (min(days), max(days)))
            years = date(first, 1, 1).toordinal(), date(last, 12, 31).toordinal()
            return Column("date", range=years, format=form, missing=missing), "public? the years"
    common = tuple(sorted(text for text in present if texts[text] >= _ROWS_PER_VALUE))
    if common and len(common) <= _MOST_VALUES:
        rare = len(common) < len(present)
        left_out = f"; values of fewer than {_ROWS_PER_VALUE} rows are left out" if rare else ""
        return Column("category", values=common, other=rare, missing=missing), f"public? the values{left_out}"
    return Column("ignored"), "text with too many values, or with too few rows for each"


def _numbers(column: Column, texts: Sequence[str]) -> list[float]:
    """What the texts are as numbers or days; empty if one of them is none."""
    try:
        return [column.number(text) for text in texts]
    except Unsuitable:
        return []


def _around(low: float, high: float) -> tuple[float, float]:
    """A range of round numbers around both.

    >>> _around(17, 88), _around(0, 0.0312), _around(5, 5)
    ((10.0, 90.0), (0.0, 0.04), (4.0, 6.0))
    """
    if low == high:
        return low - 1.0, high + 1.0
    unit = 10.0 ** math.floor(math.log10(high - low))
    ends = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    return float(f"{ends[0]:.12g}"), float(f"{ends[1]:.12g}")


def _line(column: Column, remark: str) -> str:
    written = ", ".join(f"{option} = {_toml(value)}" for option, value in column.declared.items())
    return f"{{ {written} }}  # {remark}"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()


def _key(name: str) -> str:
    return tomli_w.dumps({name: 0}).removesuffix(" = 0\n")
