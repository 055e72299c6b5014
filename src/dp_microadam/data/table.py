"""Reader for tables with labels: CSV files with a header, or npz files with an array of labels and one of inputs.

The classes and the constants for normalization are public: they are given by the user, never taken from the data.
"""

from __future__ import annotations

import csv
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from dp_microadam.data.arrays import Arrays
from dp_microadam.data.contents import Reading, too_large
from dp_microadam.data.dataset import split
from dp_microadam.errors import InputError

_TEST_FRACTION = 0.2
_TEST_SEED = 0
"""Fixed, so that the test part of a single file does not depend on the split into training and validation."""


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


def read(place: Path, reading: Reading, *, label: str, classes: int | Sequence[str]) -> tuple[Arrays, Arrays]:
    """Read the training and the test part; a fifth of a single file is the test part.

    Raises:
        InputError: naming the file, if it cannot be read or is not valid. Messages never contain values of the data.
    """
    parts = [_read_file(path, reading, label, classes) for path in files_of(place)]
    if len(parts) == 1:
        whole = parts[0]
        training, test = split(len(whole), _TEST_FRACTION, _TEST_SEED)
        inputs = whole.inputs[0]
        if isinstance(inputs, np.memmap):
            raise InputError(f"{place} is memory-mapped; give a folder with train.npz and test.npz for data of this size")
        return tuple(Arrays([inputs[rows.numpy()]], whole.labels[rows.numpy()]) for rows in (training, test))  # type: ignore[return-value]
    if parts[0].inputs[0].shape[1:] != parts[1].inputs[0].shape[1:]:
        raise InputError(f"{place} holds training and test data of different shapes; both must have the same columns")
    return parts[0], parts[1]


def _read_file(path: Path, reading: Reading, label: str, classes: int | Sequence[str]) -> Arrays:
    reader = {".csv": _read_csv, ".npz": _read_npz}.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"data_folder is {str(path)!r}; a table must be a .csv or .npz file, or a folder of them")
    inputs, names = reader(path, reading, label)
    if not len(names):
        raise InputError(f"{path} holds no examples; it must have at least one")
    if inputs.dtype != np.uint8 and not _all_finite(inputs):
        raise InputError(f"{path} holds missing or infinite numbers; every input must be a finite number")
    return Arrays([inputs], _labels(path, names, classes))


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


def _read_csv(path: Path, reading: Reading, label: str) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        if path.stat().st_size > reading.map_above:
            raise InputError(
                f"{path} is larger than data_memory_gib = {reading.map_above / 2**30:g}, and text cannot be memory-mapped; "
                "save it as npz"
            )
        column, others = _columns(path, label)
        inputs = _load_columns(path, np.float32, others)
        names = _load_columns(path, np.str_, [column])[:, 0]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except InputError:
        raise
    except (ValueError, csv.Error):
        raise InputError(
            f"{path} is not a table of numbers with the same columns in every row; only column {label!r} may hold text"
        ) from None
    return inputs, names


def _columns(path: Path, label: str) -> tuple[int, list[int]]:
    with path.open(newline="", encoding="utf-8-sig") as stream:
        header = [name.strip() for name in next(csv.reader(stream), [])]
    if header.count(label) != 1 or len(header) < 2:
        raise InputError(f"{path} must have one column {label!r} and others; data_options.label names the column of labels")
    column = header.index(label)
    return column, [index for index in range(len(header)) if index != column]


def _load_columns(path: Path, kind: type, columns: list[int]) -> NDArray[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an empty table is refused with a sentence later
        return np.loadtxt(
            path, kind, comments=None, delimiter=",", skiprows=1, usecols=columns, ndmin=2, encoding="utf-8-sig", quotechar='"'
        )


def _read_npz(path: Path, reading: Reading, label: str) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            if label not in members or len(members) != 2:
                raise InputError(
                    f"{path} must hold two arrays: the labels, called {label!r} (data_options.label), and the inputs"
                )
            arrays = {name: _array(path, archive, member, reading.map_above) for name, member in members.items()}
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except InputError:
        raise
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, NotImplementedError):
        raise InputError(f"{path} is not a complete npz file of plain arrays; write it again") from None
    labels = arrays.pop(label)
    (inputs,) = arrays.values()
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
    return inputs, labels


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
