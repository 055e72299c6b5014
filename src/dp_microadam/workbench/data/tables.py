"""Readers for tables and texts with labels: CSV files, JSON lines, and npz files with an array of labels and one of inputs.

A column, or a third array, may say whose each example is. The classes, the constants for normalization, and what is declared
about columns are public: they are given by the user, never taken from the data.
"""

from __future__ import annotations

import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.training.program import RawInput, RawTensor
from dp_microadam.validation import require_integer
from dp_microadam.workbench.data.catalogue import KnownData
from dp_microadam.workbench.data.columns import Column, Columns, Unsuitable
from dp_microadam.workbench.data.dataset import Arrays, Found, Source, add_shared_users, as_ids
from dp_microadam.workbench.data.files import Reading, unreadable
from dp_microadam.workbench.data.raw import RawImages, RawRows
from dp_microadam.workbench.data.rows import Problems, open_rows, text_of

_UNSCALED = 10.0
"""Inputs beyond this size get a note. Values that were normalized, or mapped from a range, are of size one."""


@dataclass(frozen=True)
class Layout:
    """What a recipe says about a table or about texts.

    ``label`` and ``user`` are names of columns; ``classes`` the number of classes or their names; ``text`` is the column of
    texts, None for a table. ``columns`` declares the inputs of a table; None: all other columns are numbers. ``header`` names
    the columns of a CSV file whose first line does not; ``clean`` changes a line before it is read.
    """

    label: str | None
    classes: int | tuple[str, ...]
    user: str | None = None
    text: str | None = None
    columns: Columns | None = None
    header: Sequence[str] | None = None
    clean: Callable[[str], str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes; a number of them stands for labels 0, 1, …"""
        return tuple(map(str, range(self.classes))) if isinstance(self.classes, int) else self.classes

    @property
    def wrong_label(self) -> Unsuitable:
        """What is wrong with a label that is none of the classes."""
        if isinstance(self.classes, int):
            remedy = f"with classes = {self.classes} labels must be 0 to {self.classes - 1}"
            return Unsuitable("is an invalid label", remedy)
        fault = f"is a label that is not among classes = {list(self.classes)}"
        return Unsuitable(fault, "name all of them in data_options.classes")


def layout_of(data: KnownData, options: Mapping[str, Any], columns: Columns | None = None, *, labelled: bool = True) -> Layout:
    """What the options of a recipe say about a table or about texts.

    Raises:
        InputError: for an option that cannot be used.
    """
    user, texts = options.get("user_column"), data.kind == "text"
    names = {"text": options.get("text", "text")} if texts else {}
    names |= {"label": options.get("label", "label")} if labelled else {}
    names |= {} if user is None else {"user_column": user}
    for option, name in names.items():
        if not isinstance(name, str) or not name or list(names.values()).count(name) > 1:
            raise InputError(f"data_options.{option} is {name!r}; it must be the name of a column, another for each")
        if columns is not None and name in columns.columns:
            raise InputError(f"columns.{name} is declared, but data_options.{option} is the same column; leave one of them out")
    header = options.get("header")
    if header is not None and (not isinstance(header, list | tuple) or not all(isinstance(name, str) for name in header)):
        raise InputError(f"data_options.header is {header!r}; it must be a list with the name of each column")
    classes = data.classes or _classes(options.get("classes")) if labelled else ()
    header = None if header is None else tuple(name.strip() for name in header)
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
    """The parts of a table, from CSV or npz files."""
    layout = layout_of(source.data, source.options, source.columns)
    parts, layout = _read_parts(source, layout)
    shape = parts[0].shape
    if any(part.shape != shape for part in parts):
        raise InputError(f"{source.place} holds training and test data of different shapes; both must have the same columns")
    if len(parts) == 1 and isinstance(parts[0].inputs, np.memmap):
        raise InputError(f"{source.place} is memory-mapped; give a folder with train.npz and test.npz for data of this size")
    raw: RawInput = RawTensor(shape, "float32")
    if len(shape) == 3:
        raw = RawImages(shape[0], shape[1:])
    elif layout.columns is not None:
        columns = tuple(layout.columns.columns) if source.columns is None else source.columns.declared
        raw = RawRows(columns, layout.header or ())
    return Found(parts[0], parts[1] if len(parts) == 2 else None, layout.classes, raw)


def read_adult(source: Source) -> Found:
    """The Adult census data (Becker and Kohavi, 1996) in the two files of the UCI repository.

    They have no header, spaces after the commas, ``?`` for what is missing; the test file begins with a remark and has a full
    stop after each label.
    """
    if source.columns is None:
        raise InputError("adult needs [columns], which say what its columns are; the recipe adult has them")

    def without_remark(line: str) -> str:
        return "\n" if line.startswith("|") else line.rstrip().removesuffix(".") + "\n"

    layout = Layout("income", source.data.classes, None, None, source.columns, source.data.header, without_remark)
    (train, test), _ = _read_parts(source, layout)
    return Found(train, test, layout.classes, RawRows(source.columns.declared, source.data.header))


def read_texts(source: Source) -> Found:
    """The parts of labelled texts, from CSV files or JSON lines."""
    layout = layout_of(source.data, source.options, labelled=source.labelled)
    parts, _ = _read_parts(source, layout)
    parts = [replace(part, encode=source.encode) for part in parts]
    return Found(parts[0], parts[1] if len(parts) == 2 else None, layout.classes or 1)


def files_of(source: Source) -> list[Path]:
    """The file itself, or the training and the test file in a folder; those of Adult if they are the published ones."""
    place = source.place
    if source.data.kind == "adult":
        paths = [place / name for name in source.data.downloads]
        for path in paths:
            source.reading.require_published(path)
        return paths
    endings = (".csv", ".jsonl" if source.data.kind == "text" else ".npz")
    if place.is_file():
        if place.suffix.lower() not in endings:
            raise InputError(f"data_folder is {str(place)!r}; it must be a {' or '.join(endings)} file, or a folder of them")
        return [place]
    found = []
    for part in ("train", "test"):
        paths = [place / f"{part}{ending}" for ending in endings]
        found += [path for path in paths if path.is_file()][:1]
    if len(found) != 2:
        wanted = " or ".join(f"train{ending} and test{ending}" for ending in endings)
        raise InputError(f"{place} must hold {wanted}; or name a single file")
    return found


def _read_parts(source: Source, layout: Layout) -> tuple[list[Arrays], Layout]:
    """The examples of each file, and the layout with the names of the columns that are inputs, if they have names.

    A test file may lack the column of users. Problems of all files are found before any is refused.
    """
    parts = []
    for number, path in enumerate(files_of(source)):
        try:
            if path.suffix.lower() == ".npz":
                parts.append(_read_npz(path, source.reading, layout, number > 0, source.problems))
                continue
            if path.is_file() and source.reading.is_large(path):
                remedy = "set data_memory_gib higher" if layout.text else "save it as npz"
                raise source.reading.too_large(path, "is text", remedy)
            found, layout = _read_rows(path, layout, number > 0, source.problems)
            parts.append(found)
        except InputError as error:
            source.problems.add_error(error)
    if len(parts) == 2:
        add_shared_users(source.problems, source.place, parts[0].users, parts[1].users)
    source.problems.refuse()
    return parts, layout


def _read_rows(path: Path, layout: Layout, may_lack_users: bool, problems: Problems) -> tuple[Arrays, Layout]:
    names, rows = open_rows(path, layout.header, layout.clean)
    layout = _with_columns(path, names, layout, may_lack_users)
    number = {name: index for index, name in enumerate(layout.names)}

    def label_of(cell: Any) -> int:
        if number and _word(cell) not in number:
            raise layout.wrong_label
        return number.get(_word(cell), 0)

    def user_of(cell: Any) -> str:
        if _word(cell).lower() in ("", "nan"):
            raise Unsuitable("names no user", "every row must name its user")
        return _word(cell)

    def vector_of(column: Column) -> Callable[[str], tuple[float, ...]]:
        cached = lru_cache(4096)(column.vector)
        return lambda cell: cached(cell.strip())

    inputs = {} if layout.columns is None else {name: vector_of(one) for name, one in layout.columns.inputs.items()}
    readers: dict[str, Callable[[Any], Any]] = {layout.text: text_of} if layout.text else {**inputs}
    readers |= {layout.label: label_of} if layout.label else {}
    readers |= {layout.user: user_of} if layout.user else {}
    vectors, texts, labels, users = array("f"), [], array("q"), []
    usable = True
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
    return Arrays(found, np.array(labels), as_ids(np.array(users, dtype=np.str_)) if layout.user else None), layout


def _with_columns(path: Path, names: Sequence[str], layout: Layout, may_lack_users: bool) -> Layout:
    """The layout with the columns that are inputs, and without users if the file may lack and lacks them.

    Raises:
        InputError: naming a column that is missing or not declared.
    """
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


def _word(value: Any) -> str:
    """A label or user as text, the way a CSV file would hold it. 3.0 is 3, so that nobody counts as two users."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value).strip()


def table_notes(inputs: Tensor, raw: RawInput | None, declared: bool) -> Iterator[str]:
    """What training accepts without a word, but the owner of a table should know; from its rows, so it is private.

    ``inputs`` are those of the training part as they reach the model.
    """
    names = list(raw.inputs) if isinstance(raw, RawRows) else [f"number {number + 1}" for number in range(inputs.shape[1])]
    largest = inputs.abs().amax(dim=0).tolist()
    if not declared:
        wrong = [name for name, large in zip(names, largest, strict=True) if large > _UNSCALED]
        if wrong:
            yield (
                f"column {', '.join(wrong)} is not scaled: numbers beyond ±{_UNSCALED:g} reach the model; declare ranges in "
                "[columns], or give data_options.mean and std"
            )
    elif isinstance(raw, RawRows):
        ends = dict(zip(names, np.cumsum([column.width for column in raw.inputs.values()]).tolist(), strict=True))
        for name, column in raw.inputs.items():
            if column.range is not None and largest[ends[name] - column.width] == 1:
                yield f"column {name!r} reaches the end of its declared range, to which values beyond it are clamped"


def _read_npz(path: Path, reading: Reading, layout: Layout, may_lack_users: bool, problems: Problems) -> Arrays:
    if layout.columns is not None or layout.header is not None:
        raise InputError(f"{path} holds arrays of numbers; [columns] and data_options.header are for CSV files, leave them out")
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            arrays = {name: _array(path, archive, member, reading) for name, member in members.items()}
    except OSError as error:
        raise unreadable(path, error) from None
    except InputError:
        raise
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, NotImplementedError):
        raise InputError(f"{path} is not a complete npz file of plain arrays; write it again") from None
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
    if inputs.ndim == 2 and (inputs.dtype != np.float32 or not inputs.dtype.isnative):
        if isinstance(inputs, np.memmap):
            raise InputError(f"{path} holds {inputs.dtype} and is memory-mapped; save the inputs as float32")
        inputs = inputs.astype(np.float32)
    blocks = (inputs[start : start + 65536] for start in range(0, len(inputs), 65536))
    if inputs.dtype != np.uint8 and not all(np.isfinite(block).all() for block in blocks):
        raise InputError(f"{path} holds missing or infinite numbers; every input must be a finite number")
    found = None if ids is None else as_ids(ids)
    if found is not None and (found == "").any():
        rows = (f"row {row + 1}" for row in np.flatnonzero(found == ""))
        problems.add(f"{path} has a row that names no user", "every row must name its user", rows)
    return Arrays(inputs, _labels(path, labels, layout, problems), found)


def _labels(path: Path, given: NDArray[Any], layout: Layout, problems: Problems) -> NDArray[np.int64]:
    if given.dtype.kind in "fb" and np.isfinite(given).all() and (given == np.floor(given.astype(float))).all():
        given = given.astype(np.int64)
    number = {name: index for index, name in enumerate(layout.names)}
    distinct, which = np.unique(given.astype(np.str_), return_inverse=True)
    labels = np.array([number.get(name, -1) for name in distinct.tolist()])[which]
    if labels.min() < 0:
        wrong = layout.wrong_label
        rows = (f"row {row + 1}" for row in np.flatnonzero(labels < 0))
        problems.add(f"{path} has an entry of {layout.label!r} that {wrong.fault}", wrong.remedy, rows)
    return labels


def _array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, reading: Reading) -> NDArray[Any]:
    """An array of the archive: read into memory, or memory-mapped if it is large and stored without compression."""
    with archive.open(member) as stream:
        if member.file_size <= reading.map_above:
            return npy.read_array(stream, allow_pickle=False)
        if member.compress_type != zipfile.ZIP_STORED:
            raise reading.too_large(path)
        version = npy.read_magic(stream)
        header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = header(stream)
        if fortran or dtype.hasobject:
            raise ValueError("neither row-major nor numeric")
        in_member = stream.tell()
    with path.open("rb") as raw:  # after the member's local header of 30 bytes, which ends with the lengths of two fields
        raw.seek(member.header_offset + 26)
        name, extra = np.frombuffer(raw.read(4), "<u2")
    return np.memmap(path, dtype, "c", member.header_offset + 30 + int(name) + int(extra) + in_member, shape)
