"""Checks the table of a recipe for its owner: everything that training would refuse, with lines, and notes about the values.

Training reads the same files with the same functions, but says neither lines nor notes: both depend on private rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dp_microadam.errors import InputError
from dp_microadam.workbench.data import adult, places, table
from dp_microadam.workbench.data.catalogue import known
from dp_microadam.workbench.data.columns import Columns
from dp_microadam.workbench.data.contents import MEMORY_GIB, Reading
from dp_microadam.workbench.data.csv_rows import CsvFile, Problems, blocks, input_columns
from dp_microadam.workbench.data.dataset import LabelledData
from dp_microadam.workbench.data.preparation import Preparation
from dp_microadam.workbench.data.sources import declared_columns, table_layout

PRIVATE = "this is for the owner of the data: it was read from private rows, do not publish it"

_UNSCALED = 10.0
"""Inputs beyond this size get a note. Values that were normalized, or mapped from a range, are of size one."""


@dataclass
class TableCheck:
    """Sentences about a table: ``problems`` are what training refuses, ``notes`` what it accepts but its owner should know."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_table(
    name: str,
    folder: str | None,
    columns: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    load: Callable[[], LabelledData],
    memory_gib: float = MEMORY_GIB,
) -> TableCheck:
    """Check a table. ``load`` is what training would call; it must be a function of the same files and options.

    Formal guarantees: there are problems exactly if ``load`` raises InputError.
    """
    found = TableCheck()
    try:
        declared = declared_columns(name, columns, options)
        place = places.find(name, known(name), folder)
        reading = Reading(name, map_above=int(memory_gib * 2**30))
        if known(name).kind == "adult":
            found.problems += [text for _, problems in adult.read(place, reading, declared) for text in problems.sentences()]
        else:
            found.problems += table.problems_of(place, reading, table_layout(declared, options))
        if not found.problems:
            data = load()
            files = _csv_files(name, place, declared, options)
            found.notes += _unscaled(data, files) if declared is None else _clamped(files)
    except InputError as error:
        found.problems.append(str(error))
    return found


def _unscaled(data: LabelledData, files: Sequence[CsvFile]) -> Iterator[str]:
    """Columns with numbers that are large as they reach the model."""
    if data.images or not isinstance(data.train, tuple):
        return
    largest = Preparation(data)(data.train)[0].abs().amax(dim=0)
    names = [str(column + 1) for column in range(len(largest))]
    if files:
        names = [repr(name) for name in input_columns(files[0], next(blocks(files[0], Problems(files[0].path))).at)]
    wrong = [name for name, large in zip(names, (largest > _UNSCALED).tolist(), strict=True) if large]
    if wrong:
        yield (
            f"column {', '.join(wrong)} is not scaled: numbers beyond ±{_UNSCALED:g} reach the model; declare ranges in "
            "[columns], or give data_options.mean and std"
        )


def _csv_files(name: str, place: Path, declared: Columns | None, options: Mapping[str, Any]) -> list[CsvFile]:
    if known(name).kind == "adult":
        return adult.csv_files(place, declared)
    layout = table_layout(declared, options)
    paths = [path for path in table.files_of(place) if path.suffix.lower() == ".csv"]
    return [CsvFile(path, layout, may_lack_users=part > 0) for part, path in enumerate(paths)]


def _clamped(files: Sequence[CsvFile]) -> Iterator[str]:
    """Columns with values outside the declared range."""
    outside: dict[str, None] = {}
    for file in files:
        for cells in blocks(file, Problems(file.path)):
            for name, column in input_columns(file, cells.at).items():
                if any(column.clamps(text) for text in set(cells.of(name))):
                    outside[name] = None
    for name in outside:
        yield f"column {name!r} has values outside its declared range, which are clamped to it"
