"""Tables and texts with labels: CSV files, JSON lines, and npz files with an array of labels and one of inputs.

A column, or a third array, may say whose each example is. The classes, the constants for normalization, and what is declared
about columns are public: they are given by the user, never taken from the data.
"""

from __future__ import annotations

import zipfile
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dp_microadam.errors import InputError
from dp_microadam.training.program import RawInput, RawTensor
from dp_microadam.validation import require_integer
from dp_microadam.workbench.data.catalogue import KnownData
from dp_microadam.workbench.data.columns import Column, Columns, Unsuitable
from dp_microadam.workbench.data.dataset import Arrays, Found, Source, add_shared_users
from dp_microadam.workbench.data.raw import RawImages, RawRows
from dp_microadam.workbench.data.rows import Problems, open_rows, text_of, unreadable, user_of, word_of


@dataclass(frozen=True)
class Layout:
    """What a recipe says about a table or about texts.

    ``label`` and ``user`` are names of columns; ``classes`` the number of classes or their names; ``text`` is the column of
    texts, None for a table. ``columns`` declares the inputs of a table; None: all other columns are numbers. ``header`` names
    the columns of a CSV file whose first line does not.
    """

    label: str | None
    classes: int | tuple[str, ...]
    user: str | None = None
    text: str | None = None
    columns: Columns | None = None
    header: Sequence[str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes; a number of them stands for labels 0, 1, …"""
        return tuple(map(str, range(self.classes))) if isinstance(self.classes, int) else self.classes

    def label_of(self) -> Callable[[Any], int]:
        """The function from a cell to the number of its class; a language model's texts have none."""
        number = {name: index for index, name in enumerate(self.names)}
        given = f"0 to {len(number) - 1}" if isinstance(self.classes, int) else f"one of {list(self.names)}"

        def read(cell: Any) -> int:
            found = number.get(word_of(cell))
            if found is None:
                raise Unsuitable("is an invalid label", f"by data_options.classes it must be {given}")
            return found

        return read


def layout_of(data: KnownData, options: Mapping[str, Any], columns: Columns | None = None, *, labelled: bool = True) -> Layout:
    """What the options of a recipe say about a table or about texts."""
    user, texts = options.get("user_column"), data.kind == "text"
    names = {"text": options.get("text", "text")} if texts else {}
    names |= {"label": options.get("label", data.header[-1] if data.header else "label")} if labelled else {}
    names |= {} if user is None else {"user_column": user}
    for option, name in names.items():
        if not isinstance(name, str) or not name or list(names.values()).count(name) > 1:
            raise InputError(f"data_options.{option} is {name!r}; it must be the name of a column, another for each")
        if columns is not None and name in columns.columns:
            raise InputError(f"columns.{name} is declared, but data_options.{option} is the same column; leave one of them out")
    header = options.get("header", data.header or None)
    if header is not None and (not isinstance(header, list | tuple) or not all(isinstance(name, str) for name in header)):
        raise InputError(f"data_options.header is {header!r}; it must be a list with the name of each column")
    classes = data.classes or _classes(options.get("classes")) if labelled else ()
    return Layout(names.get("label"), classes, user, names.get("text"), columns, header)


def _classes(given: Any) -> int | tuple[str, ...]:
    if isinstance(given, list | tuple) and len(set(given)) == len(given) > 1 and all(isinstance(name, str) for name in given):
        return tuple(name.strip() for name in given)
    if given is None or isinstance(given, list | tuple | str):
        raise InputError(
            f"data_options.classes is {given!r}; it must be the number of classes or a list of their names; they are public "
            "and are never taken from the data"
        )
    return require_integer("data_options.classes", given, 2)


def read_table(source: Source) -> Found:
    """The parts of a table, from CSV or npz files, or of texts, from CSV files or JSON lines.

    A test file may lack the column of users. Problems of all files are found before any is refused.
    """
    layout = layout_of(source.data, source.options, source.columns, labelled=source.labelled)
    parts: list[Arrays] = []
    if source.data.header and source.columns is None:
        raise InputError(f"{source.name} needs [columns], which say what its columns are; the recipe {source.name} has them")
    for path in files_of(source):
        try:
            if path.suffix.lower() == ".npz":
                parts.append(_read_npz(path, layout, bool(parts), source.problems))
                continue
            found, layout = _read_rows(path, layout, bool(parts), source)
            parts.append(found)
        except InputError as error:
            source.problems.add_error(error)
    if len(parts) == 2:
        add_shared_users(source.problems, source.place, parts[0].users, parts[1].users)
    source.problems.refuse()
    train, test, shape = parts[0], parts[1] if len(parts) == 2 else None, parts[0].shape
    if test is not None and test.shape != shape:
        raise InputError(f"{source.place} holds training and test data of different shapes; both must have the same columns")
    raw: RawInput | None = None if layout.text else RawTensor(shape, "float32")
    if len(shape) == 3:
        raw = RawImages(shape[0], shape[1:])
    elif layout.columns is not None:
        raw = RawRows(layout.columns.declared or tuple(layout.columns.columns), layout.header or ())
    return Found(train, test, layout.classes or 1, raw)


def files_of(source: Source) -> list[Path]:
    """The published files; or the file itself, or the training and the test file in a folder."""
    place = source.place
    if source.data.downloads:
        paths = [place / name for name in source.data.downloads]
        for path in paths:
            source.content(path)  # refuses another file than the published one
        return paths
    endings = (".csv", ".jsonl" if source.data.kind == "text" else ".npz")
    if place.is_file():
        if place.suffix.lower() not in endings:
            raise InputError(f"data_folder is {str(place)!r}; it must be a {' or '.join(endings)} file, or a folder of them")
        return [place]
    listed = [[place / f"{part}{ending}" for ending in endings] for part in ("train", "test")]
    found = [next((path for path in paths if path.is_file()), None) for paths in listed]
    if None in found:
        wanted = " or ".join(f"train{ending} and test{ending}" for ending in endings)
        raise InputError(f"{place} must hold {wanted}; or name a single file")
    return [path for path in found if path is not None]


def _without_remarks(line: str) -> str:
    """A line of Adult's files, which have a remark at the beginning and full stops after the labels."""
    return "\n" if line.startswith("|") else line.rstrip().removesuffix(".") + "\n"


def _read_rows(path: Path, layout: Layout, may_lack_users: bool, source: Source) -> tuple[Arrays, Layout]:
    """The examples of a file, and the layout with the names of the columns that are inputs, if they have names."""
    names, rows = open_rows(path, layout.header, _without_remarks if source.name == "adult" else None)
    layout = _with_columns(path, names, layout, may_lack_users)
    inputs = {} if layout.columns is None else {name: _vector_of(one) for name, one in layout.columns.inputs.items()}
    readers: dict[str, Callable[[Any], Any]] = {layout.text: text_of} if layout.text else {**inputs}
    readers |= {layout.label: layout.label_of()} if layout.label else {}
    readers |= {layout.user: user_of} if layout.user else {}
    vectors, texts, labels, users = array("f"), [], array("q"), []
    usable, problems = True, source.problems
    for line, row in rows:
        cells: dict[str, Any] = {}
        if isinstance(row, Unsuitable):
            problems.add(f"{path} has a row that {row.fault}", row.remedy, [f"line {line}"])
        else:
            for name, read in readers.items():
                try:
                    cells[name] = read(row.get(name))
                except Unsuitable as error:
                    problems.add(f"{path} has a cell in column {name!r} that {error.fault}", error.remedy, [f"line {line}"])
        if len(cells) < len(readers):
            usable = False
            continue
        texts.append(cells.get(layout.text or ""))
        for name in inputs:
            vectors.extend(cells[name])
        labels.append(cells.get(layout.label or "", 0))
        users.append(cells.get(layout.user or ""))
    if usable and not labels:
        raise InputError(f"{path} holds no examples; it must have at least one")
    if layout.columns is None:
        found = np.array(texts, dtype=object)
    else:
        found = np.frombuffer(vectors, np.float32).reshape(len(labels), layout.columns.width)
    return Arrays(found, np.array(labels), np.array(users, np.str_) if layout.user else None, source.encode), layout


def _vector_of(column: Column) -> Callable[[str], tuple[float, ...]]:
    cached = lru_cache(4096)(column.vector)
    return lambda cell: cached(cell.strip())


def _with_columns(path: Path, names: Sequence[str], layout: Layout, may_lack_users: bool) -> Layout:
    """The layout with the columns that are inputs, and without users if the file may lack and lacks them."""
    if not names and path.suffix.lower() == ".jsonl":
        return layout
    if may_lack_users and layout.user not in names:
        layout = replace(layout, user=None)
    for option, name in (("text", layout.text), ("label", layout.label), ("user_column", layout.user)):
        if name is not None and name not in names:
            raise InputError(f"{path} has no column {name!r}; data_options.{option} must name one of its columns")
    if layout.text:
        return layout
    others = [name for name in names if name not in (layout.label, layout.user)]
    if layout.columns is None:
        if not others:
            raise InputError(f"{path} has no columns besides {', '.join(map(repr, names))}; it must have inputs of the model")
        return replace(layout, columns=Columns({name: Column() for name in others}))
    for name in others:
        if name not in layout.columns.columns:
            raise InputError(
                f"{path} has a column {name!r} that is not declared; name it there, use ignored for what is not needed"
            )
    for name in layout.columns.inputs:
        if name not in others:
            raise InputError(f"{path} has no column {name!r}, which is an input; it must have all of them")
    return layout


def _read_npz(path: Path, layout: Layout, may_lack_users: bool, problems: Problems) -> Arrays:
    if layout.columns is not None or layout.header is not None:
        raise InputError(f"{path} holds arrays of numbers; [columns] and data_options.header are for CSV files, leave them out")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = dict(archive)
    except (zipfile.BadZipFile, zlib.error, ValueError, TypeError, EOFError, NotImplementedError):
        raise InputError(f"{path} is not a complete npz file of plain arrays; write it again") from None
    except OSError as error:
        raise unreadable(path, error) from None
    user = None if may_lack_users and layout.user not in arrays else layout.user
    labels, ids = arrays.pop(str(layout.label), None), None if user is None else arrays.pop(user, None)
    if labels is None or len(arrays) != 1 or (user is not None and ids is None):
        users = f", the users, called {user!r} (data_options.user_column)," if user else ""
        raise InputError(
            f"{path} must hold {2 + bool(user)} arrays: the labels, called {layout.label!r} (data_options.label){users} and "
            "the inputs"
        )
    (inputs,) = arrays.values()
    if ids is not None and (ids.shape != labels.shape or ids.dtype.kind not in "iufU"):
        raise InputError(f"{path} has an array {user!r} of type {ids.dtype}; it must be one name or number per label")
    if labels.ndim != 1 or inputs.ndim not in (2, 4) or len(inputs) != len(labels) or inputs.dtype.kind not in "fiub":
        raise InputError(
            f"{path} holds inputs of shape {inputs.shape} and labels of shape {labels.shape}; they must be numbers [N, columns]"
            " or images [N, channels, height, width], with labels [N]"
        )
    if not len(labels):
        raise InputError(f"{path} holds no examples; it must have at least one")
    if inputs.ndim == 4 and inputs.dtype != np.uint8:
        raise InputError(f"{path} holds images of type {inputs.dtype}; they must be uint8, 0 to 255")
    if inputs.ndim == 2:
        inputs = inputs.astype(np.float32)
    if not np.isfinite(inputs).all():
        raise InputError(f"{path} holds missing or infinite numbers; every input must be a finite number")

    def column(name: str, cells: Sequence[Any], read: Callable[[Any], Any]) -> list[Any]:
        found = []
        for row, cell in enumerate(cells, 1):
            try:
                found.append(read(cell))
            except Unsuitable as error:
                problems.add(f"{path} has an entry of {name!r} that {error.fault}", error.remedy, [f"row {row}"])
        return found

    numbers = np.array(column(str(layout.label), labels.tolist(), layout.label_of()), np.int64)
    return Arrays(inputs, numbers, None if ids is None else np.array(column(str(user), ids.tolist(), user_of), np.str_))
