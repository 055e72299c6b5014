"""Tables and texts with labels, in CSV files or JSON lines.

A column may say whose each example is. The classes, the constants for normalization, and what is declared
about columns are public: they are given by the user, never taken from the data.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dp_microadam.errors import InputError
from dp_microadam.validation import require_integer
from dp_microadam.workbench.data.catalogue import KnownData
from dp_microadam.workbench.data.columns import Column, Columns, Unsuitable
from dp_microadam.workbench.data.dataset import Arrays, Found, Source, add_shared_users
from dp_microadam.workbench.data.raw import RawRows
from dp_microadam.workbench.data.rows import open_rows, text_of, user_of, word_of

_SHOWN = 20
"""Names of classes in a message."""


@dataclass(frozen=True)
class Layout:
    """What a recipe says about a table or about texts.

    ``label``, ``user`` and ``text`` are names of columns, ``text`` None for a table. ``classes`` are the names of the classes,
    none where there are no labels. ``columns`` declares the inputs of a table; None: all other columns are numbers. ``header``
    names the columns of a CSV file whose first line does not.
    """

    label: str | None
    classes: tuple[str, ...]
    user: str | None = None
    text: str | None = None
    columns: Columns | None = None
    header: Sequence[str] | None = None


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


def _classes(given: Any) -> tuple[str, ...]:
    """Names of the classes; a number of them stands for labels 0, 1, …"""
    if isinstance(given, list | tuple) and len(set(given)) == len(given) > 1 and all(isinstance(name, str) for name in given):
        return tuple(name.strip() for name in given)
    if given is None or isinstance(given, list | tuple | str):
        raise InputError(
            f"data_options.classes is {given!r}; it must be the number of classes or a list of their names; they are public "
            "and are never taken from the data"
        )
    return tuple(map(str, range(require_integer("data_options.classes", given, 2))))


def read_table(source: Source) -> Found:
    """The parts of a table, or of texts.

    A test file may lack the column of users. Problems of all files are found before any is refused.
    """
    layout = layout_of(source.data, source.options, source.columns, labelled=source.labelled)
    parts: list[Arrays] = []
    if source.data.header and source.columns is None:
        raise InputError(f"{source.name} needs [columns], which say what its columns are; the recipe {source.name} has them")
    for path in files_of(source):
        try:
            found, layout = _read_rows(path, layout, bool(parts), source)
            parts.append(found)
        except InputError as error:
            source.problems.add_error(error)
    if len(parts) == 2:
        add_shared_users(source.problems, source.place, parts[0].users, parts[1].users)
    source.problems.refuse()
    raw = None
    if layout.columns is not None:
        raw = RawRows(layout.columns.declared or tuple(layout.columns.columns), layout.header or ())
    return Found(parts[0], parts[1] if len(parts) == 2 else None, layout.classes or ("text",), raw)


def files_of(source: Source) -> list[Path]:
    """The published files; or the file itself, or the training and the test file in a folder."""
    place = source.place
    if source.data.downloads:
        paths = [place / name for name in source.data.downloads]
        for path in paths:
            source.content(path)  # refuses another file than the published one
        return paths
    endings = (".csv", ".jsonl") if source.data.kind == "text" else (".csv",)
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
    number = {name: index for index, name in enumerate(layout.classes)}

    def label_of(cell: Any) -> int:
        if word_of(cell) not in number:
            shown = ", ".join([*layout.classes[:_SHOWN], *["…"] * (len(number) > _SHOWN)])
            raise Unsuitable("is an invalid label", f"by data_options.classes it must be one of {shown}")
        return number[word_of(cell)]

    inputs = {} if layout.columns is None else {name: one.vector for name, one in layout.columns.inputs.items()}
    readers: dict[str, Callable[[Any], Any]] = {layout.text: text_of} if layout.text else {**inputs}
    readers |= {layout.label: label_of} if layout.label else {}
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
