"""Reader for tables with labels: CSV files with a header, or npz files with an array of labels and one of inputs.

A column, or a third array, may say whose each example is. The classes and the constants for normalization are public: they are
given by the user, never taken from the data.
"""

from __future__ import annotations

import csv
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from dp_microadam.data.arrays import Arrays
from dp_microadam.data.contents import Reading, too_large
from dp_microadam.data.dataset import TEST_FRACTION, TEST_SEED, split
from dp_microadam.data.users import UserIds, as_ids, refuse_shared_users, split_by_user
from dp_microadam.errors import InputError


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


def read(
    place: Path, reading: Reading, *, label: str, classes: int | Sequence[str], user: str | None = None
) -> tuple[Arrays, Arrays]:
    """Read the training and the test part; a fifth of a single file is the test part, or of its users if ``user`` is given.

    ``user`` names the column of users, which is not an input. A test file may lack it.

    Raises:
        InputError: naming the file, if it cannot be read or is not valid. Messages never contain values of the data.
    """
    parts = [_read_file(path, reading, label, classes, user, part) for part, path in enumerate(files_of(place))]
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


def columns_of(place: Path, label: str, user: str | None) -> tuple[str, ...]:
    """Names of the inputs: the columns of a CSV file in their order; none for npz files, whose columns have no names."""
    path = files_of(place)[0]
    if path.suffix.lower() != ".csv":
        return ()
    return tuple(_header(path)[index] for index in _columns(path, label, user, may_lack_users=False)[2])


def user_problems(place: Path, reading: Reading, label: str, user: str) -> Iterator[str]:
    """A sentence for each row without a user, and for users of both parts; for the owner of the data, as it names the rows."""
    found: list[UserIds | None] = []
    for part, path in enumerate(files_of(place)):
        try:
            _, _, ids = _reader_of(path)(path, reading, label, user, part > 0)
        except InputError as error:
            ids = None
            yield str(error)
        users = None if ids is None else as_ids(ids)
        for row in () if users is None else np.flatnonzero(users == ""):
            yield f"{path} has no user in row {row + 1} of column {user!r}; every row must name its user"
        found.append(None if users is None else users[users != ""])
    if len(found) == 2:
        refuse_shared_users(found[0], found[1], str(place))


def _rows_of(whole: Arrays, rows: NDArray[np.int64]) -> Arrays:
    return Arrays([whole.inputs[0][rows]], whole.labels[rows], None if whole.users is None else whole.users[rows])


def _reader_of(path: Path) -> Callable[[Path, Reading, str, str | None, bool], _Columns]:
    reader = {".csv": _read_csv, ".npz": _read_npz}.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"data_folder is {str(path)!r}; a table must be a .csv or .npz file, or a folder of them")
    return reader


def _read_file(path: Path, reading: Reading, label: str, classes: int | Sequence[str], user: str | None, part: int) -> Arrays:
    inputs, names, ids = _reader_of(path)(path, reading, label, user, part > 0)
    if not len(names):
        raise InputError(f"{path} holds no examples; it must have at least one")
    if inputs.dtype != np.uint8 and not _all_finite(inputs):
        raise InputError(f"{path} holds missing or infinite numbers; every input must be a finite number")
    users = None if ids is None else as_ids(ids)
    if users is not None and (users == "").any():
        raise InputError(
            f"{path} has rows without a user in column {user!r}; every row must name its user, find them with "
            "dp-microadam data check RECIPE"
        )
    return Arrays([inputs], _labels(path, names, classes), users)


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


def _read_csv(path: Path, reading: Reading, label: str, user: str | None, may_lack_users: bool) -> _Columns:
    try:
        if path.stat().st_size > reading.map_above:
            raise InputError(
                f"{path} is larger than data_memory_gib = {reading.map_above / 2**30:g}, and text cannot be memory-mapped; "
                "save it as npz"
            )
        column, users_at, others = _columns(path, label, user, may_lack_users)
        inputs = _load_columns(path, np.float32, others)
        names = _load_columns(path, np.str_, [column])[:, 0]
        users = None if users_at is None else _load_columns(path, np.str_, [users_at])[:, 0]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except InputError:
        raise
    except (ValueError, csv.Error):
        raise InputError(
            f"{path} is not a table of numbers with the same columns in every row; only column {label!r} may hold text"
            + (f", and column {user!r}" if user else "")
        ) from None
    return inputs, names, users


def _header(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8-sig") as stream:
        return [name.strip() for name in next(csv.reader(stream), [])]


def _columns(path: Path, label: str, user: str | None, may_lack_users: bool) -> tuple[int, int | None, list[int]]:
    header = _header(path)
    if header.count(label) != 1 or len(header) < 2:
        raise InputError(f"{path} must have one column {label!r} and others; data_options.label names the column of labels")
    if user is None or (may_lack_users and user not in header):
        users_at = None
    else:
        if header.count(user) != 1 or len(header) < 3:
            raise InputError(f"{path} must have one column {user!r} and others; data_options.user_column names that of users")
        users_at = header.index(user)
    column = header.index(label)
    return column, users_at, [index for index in range(len(header)) if index not in (column, users_at)]


def _load_columns(path: Path, kind: type, columns: list[int]) -> NDArray[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an empty table is refused with a sentence later
        return np.loadtxt(
            path, kind, comments=None, delimiter=",", skiprows=1, usecols=columns, ndmin=2, encoding="utf-8-sig", quotechar='"'
        )


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
