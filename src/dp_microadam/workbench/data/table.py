"""Reader for tables with labels: CSV files, or npz files with an array of labels and one of inputs.

A column, or a third array, may say whose each example is. The classes, the constants for normalization, and what is declared
about columns are public: they are given by the user, never taken from the data.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.arrays import Arrays
from dp_microadam.workbench.data.contents import Reading, too_large
from dp_microadam.workbench.data.csv_rows import CsvFile, Layout, Problems, blocks, input_columns, read_rows
from dp_microadam.workbench.data.dataset import TEST_FRACTION, TEST_SEED, split
from dp_microadam.workbench.data.users import UserIds, as_ids, refuse_shared_users, split_by_user


def files_of(place: Path) -> list[Path]:
    """The file itself, or the training and the test file in a folder.

    Raises:
        InputError: if a folder lacks one of them.
    """
    if place.is_file():
        return [place]
    found = []
    for part in ("train", "test"):
        paths = [place / f"{part}{ending}" for ending in (".csv", ".npz")]
        found += [path for path in paths if path.is_file()][:1]
    if len(found) != 2:
        raise InputError(f"{place} must hold train.csv and test.csv, or train.npz and test.npz; or name a single file")
    return found


def read(place: Path, reading: Reading, layout: Layout) -> tuple[Arrays, Arrays]:
    """Read the training and the test part; a fifth of a single file is the test part, or of its users if they are known.

    A test file may lack the column of users.

    Raises:
        InputError: naming the file, if it cannot be read or is not valid. Messages never contain values of the data.
    """
    parts = []
    for part, path in enumerate(files_of(place)):
        found, problems = read_file(path, reading, layout, may_lack_users=part > 0)
        problems.refuse()
        parts.append(found)
    if len(parts) == 1:
        whole = parts[0]
        if isinstance(whole.inputs[0], np.memmap):
            raise InputError(f"{place} is memory-mapped; give a folder with train.npz and test.npz for data of this size")
        if whole.users is None:
            training, test = split(len(whole), TEST_FRACTION, TEST_SEED)
        else:
            training, test = split_by_user(whole.users, TEST_FRACTION, TEST_SEED)
        return _rows_of(whole, training.numpy()), _rows_of(whole, test.numpy())
    if parts[0].inputs[0].shape[1:] != parts[1].inputs[0].shape[1:]:
        raise InputError(f"{place} holds training and test data of different shapes; both must have the same columns")
    return parts[0], parts[1]


def columns_of(place: Path, layout: Layout) -> tuple[str, ...]:
    """Names of the inputs: the columns of a CSV file in their order; none for npz files, whose columns have no names."""
    path = files_of(place)[0]
    if path.suffix.lower() != ".csv":
        return ()
    file = CsvFile(path, layout)
    return tuple(input_columns(file, next(blocks(file, Problems(path))).at))


def problems_of(place: Path, reading: Reading, layout: Layout) -> Iterator[str]:
    """A sentence for everything that is wrong with the rows of each file; for the owner of the data, as it names lines."""
    users: list[UserIds | None] = []
    for part, path in enumerate(files_of(place)):
        try:
            found, problems = read_file(path, reading, layout, may_lack_users=part > 0)
        except InputError as error:
            yield str(error)
            continue
        yield from problems.sentences()
        users.append(None if found.users is None else found.users[found.users != ""])
    if len(users) == 2:
        try:
            refuse_shared_users(users[0], users[1], str(place))
        except InputError as error:
            yield str(error)


def read_file(path: Path, reading: Reading, layout: Layout, *, may_lack_users: bool) -> tuple[Arrays, Problems]:
    """The examples of one file, and what is wrong with its cells.

    Raises:
        InputError: for what is wrong with the file as a whole.
    """
    if path.suffix.lower() == ".csv":
        return read_csv(CsvFile(path, layout, may_lack_users), reading)
    if path.suffix.lower() != ".npz":
        raise InputError(f"data_folder is {str(path)!r}; a table must be a .csv or .npz file, or a folder of them")
    if layout.columns is not None or layout.header is not None:
        raise InputError(f"{path} holds arrays of numbers; [columns] and data_options.header are for CSV files, leave them out")
    inputs, names, ids = _read_npz(path, reading, layout.label, layout.user, may_lack_users)
    if not len(names):
        raise InputError(f"{path} holds no examples; it must have at least one")
    if inputs.dtype != np.uint8 and not _all_finite(inputs):
        raise InputError(f"{path} holds missing or infinite numbers; every input must be a finite number")
    problems = Problems(path, "row")
    users = None if ids is None else as_ids(ids)
    if users is not None and (users == "").any():
        nobody = [int(row) + 1 for row in np.flatnonzero(users == "")]
        problems.add(str(layout.user), "names no user", "every row must name its user", nobody)
    return Arrays([inputs], _labels(path, names, layout.classes), users), problems


def read_csv(file: CsvFile, reading: Reading) -> tuple[Arrays, Problems]:
    """The examples of a CSV file, and what is wrong with its cells; refused if it is larger than what may be kept in memory."""
    if file.path.is_file() and file.path.stat().st_size > reading.map_above:
        raise InputError(
            f"{file.path} is larger than data_memory_gib = {reading.map_above / 2**30:g}, and text cannot be memory-mapped; "
            "save it as npz"
        )
    return read_rows(file)


def _rows_of(whole: Arrays, rows: NDArray[np.int64]) -> Arrays:
    return Arrays([whole.inputs[0][rows]], whole.labels[rows], None if whole.users is None else whole.users[rows])


def _labels(path: Path, given: NDArray[Any], classes: int | Sequence[str]) -> NDArray[np.int64]:
    if isinstance(classes, int):
        try:
            labels = given.astype(np.int64)
        except (ValueError, OverflowError):
            labels = np.array([-1])
        if (given.dtype.kind == "f" and (labels != given).any()) or labels.min() < 0 or labels.max() >= classes:
            raise InputError(f"{path} holds an invalid label; with classes = {classes} labels must be 0 to {classes - 1}")
        return labels
    index = {name: number for number, name in enumerate(classes)}
    try:
        return np.array([index[str(name)] for name in given], dtype=np.int64)
    except KeyError:
        raise InputError(
            f"{path} holds a label that is not among classes = {list(classes)}; name all of them in data_options.classes"
        ) from None


_Columns = tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]
"""Inputs, labels, and users if there is a column of them."""


def _read_npz(path: Path, reading: Reading, label: str, user: str | None, may_lack_users: bool) -> _Columns:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            has_users = user is not None and (user in members or not may_lack_users)
            if label not in members or len(members) != 2 + has_users or (has_users and user not in members):
                users = f", the users, called {user!r} (data_options.user_column)," if has_users else ""
                raise InputError(
                    f"{path} must hold {2 + has_users} arrays: the labels, called {label!r} (data_options.label){users} and "
                    "the inputs"
                )
            arrays = {name: _array(path, archive, member, reading.map_above) for name, member in members.items()}
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except InputError:
        raise
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, NotImplementedError):
        raise InputError(f"{path} is not a complete npz file of plain arrays; write it again") from None
    labels = arrays.pop(label)
    users_found = arrays.pop(user) if user is not None and has_users else None
    (inputs,) = arrays.values()
    if users_found is not None and (users_found.shape != labels.shape or users_found.dtype.kind not in "iufU"):
        raise InputError(f"{path} has an array {user!r} of type {users_found.dtype}; it must be one name or number per label")
    if labels.ndim != 1 or inputs.ndim not in (2, 4) or len(inputs) != len(labels) or inputs.dtype.kind not in "fiub":
        raise InputError(
            f"{path} holds inputs of shape {inputs.shape} and labels of shape {labels.shape}; they must be numbers [N, columns]"
            " or images [N, channels, height, width], with labels [N]"
        )
    if inputs.ndim == 4 and inputs.dtype != np.uint8:
        raise InputError(f"{path} holds images of type {inputs.dtype}; they must be uint8, 0 to 255")
    in_place = inputs.dtype in (np.uint8, np.float32) and inputs.dtype.isnative
    if inputs.ndim == 2 and (inputs.dtype != np.float32 or not in_place):
        if isinstance(inputs, np.memmap):
            raise InputError(f"{path} holds {inputs.dtype} and is memory-mapped; save the inputs as float32")
        inputs = inputs.astype(np.float32)
    return inputs, labels, users_found


def _array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, map_above: int) -> NDArray[Any]:
    """An array of the archive: read into memory, or memory-mapped if it is large and stored without compression."""
    with archive.open(member) as stream:
        if member.file_size <= map_above:
            return npy.read_array(stream, allow_pickle=False)
        if member.compress_type != zipfile.ZIP_STORED:
            raise InputError(too_large(path, map_above))
        version = npy.read_magic(stream)
        header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = header(stream)
        if fortran or dtype.hasobject:
            raise ValueError("neither row-major nor numeric")
        offset = _data_offset(path, member) + stream.tell()
    return np.memmap(path, dtype, "c", offset, shape)


def _data_offset(path: Path, member: zipfile.ZipInfo) -> int:
    """Offset of a member's data: after its local header of 30 bytes, the last four of which are the lengths of two fields."""
    with path.open("rb") as raw:
        raw.seek(member.header_offset + 26)
        name, extra = np.frombuffer(raw.read(4), "<u2")
    return member.header_offset + 30 + int(name) + int(extra)


def _all_finite(inputs: NDArray[Any]) -> bool:
    return all(bool(np.isfinite(inputs[start : start + 65536]).all()) for start in range(0, len(inputs), 65536))
