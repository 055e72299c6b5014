"""Reader for CIFAR-10 and CIFAR-100: the published binary and Python versions, as a folder or a tar.gz archive.

A record of the binary version is its labels, one byte each (CIFAR-100: first the coarse, then the fine one), and 3,072
pixels: red, green, blue, each row by row. The python version is a pickle of a dict with the same pixels and lists of labels.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_microadam.errors import InputError
from dp_microadam.validation import require_one_of
from dp_microadam.workbench.data.arrays import Arrays
from dp_microadam.workbench.data.contents import Bytes, Reading, too_large

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Version:
    """One published version of a data set: its archive, the folder inside it, and the files in that folder."""

    archive: str
    folder: str
    train: tuple[str, ...]
    test: str
    pickled: bool

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test)


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_VERSIONS = {
    "cifar10": (
        Version("cifar-10-binary.tar.gz", "cifar-10-batches-bin", tuple(f"{b}.bin" for b in _BATCHES), "test_batch.bin", False),
        Version("cifar-10-python.tar.gz", "cifar-10-batches-py", _BATCHES, "test_batch", True),
    ),
    "cifar100": (
        Version("cifar-100-binary.tar.gz", "cifar-100-binary", ("train.bin",), "test.bin", False),
        Version("cifar-100-python.tar.gz", "cifar-100-python", ("train",), "test", True),
    ),
}

_LABELS: Mapping[str, Mapping[str, tuple[int, str, int]]] = {
    "cifar10": {"fine": (0, "labels", 10)},
    "cifar100": {"coarse": (0, "coarse_labels", 20), "fine": (1, "fine_labels", 100)},
}
"""By data set and kind of label: its byte in a binary record, its key in the pickled dict, and the number of classes."""


def num_classes(name: str, labels: str = "fine") -> int:
    """Number of classes; CIFAR-100 has ``"fine"`` and ``"coarse"`` labels."""
    kinds = _LABELS[name]
    return kinds[require_one_of("labels", labels, tuple(kinds))][2]


def locate(name: str, place: Path) -> tuple[Version, Path]:
    """The version found at ``place``, and its folder or archive; the binary version is preferred.

    Raises:
        InputError: if there is none, or one lacks a file.
    """
    versions = _VERSIONS[name]
    if place.is_file():
        for version in versions:
            if place.name == version.archive:
                return version, place
        raise InputError(f"{place} is not an archive of {name}; it must be called {' or '.join(v.archive for v in versions)}")
    for version in versions:
        for folder in (place, place / version.folder):
            present = [file for file in version.files if (folder / file).is_file()]
            if len(present) == len(version.files):
                return version, folder
            if present:
                missing = next(file for file in version.files if file not in present)
                raise InputError(f"{folder} lacks {missing}; it must hold {', '.join(version.files)}")
        if (place / version.archive).is_file():
            return version, place / version.archive
    raise InputError(
        f"{place} holds no {name}; it must hold {' or '.join(v.archive for v in versions)}, or the files inside one of them"
    )


def files_of(name: str, place: Path) -> list[Path]:
    """The files that :func:`read` would open."""
    version, holder = locate(name, place)
    return [holder] if holder.is_file() else [holder / file for file in version.files]


def read(name: str, place: Path, reading: Reading, labels: str = "fine") -> tuple[Arrays, Arrays]:
    """Read the training and the test part.

    Formal guarantees: pickles are loaded, after their digest was compared, by a restricted unpickler that can only create
    numbers, strings, lists, dicts and numpy arrays; a pickle that refers to anything else is refused.

    Raises:
        InputError: naming the file, if it is missing, damaged or not the published one.
    """
    byte, key, classes = _LABELS[name][require_one_of("labels", labels, tuple(_LABELS[name]))]
    version, holder = locate(name, place)
    parts: dict[str, Arrays] = {}
    for file, source, content in _contents(version, holder, reading):
        if version.pickled:
            images, found = _unpickled(source, content, key)
        else:
            images, found = _records(source, content, byte, len(_LABELS[name]))
        if len(found) == 0:
            raise InputError(f"{source} holds no images; fetch it again")
        if found.min() < 0 or found.max() >= classes:
            raise InputError(f"{source} holds an invalid label; labels must be 0 to {classes - 1}")
        parts[file] = Arrays([images], found)
    return _joined([parts[file] for file in version.train]), parts[version.test]


def _joined(parts: Sequence[Arrays]) -> Arrays:
    return Arrays([array for part in parts for array in part.inputs], np.concatenate([part.labels for part in parts]))


def _contents(version: Version, holder: Path, reading: Reading) -> Iterator[tuple[str, str, Bytes]]:
    """Name, location (for messages) and content of each file in a folder or archive."""
    if holder.is_dir():
        for file in version.files:
            yield file, str(holder / file), reading.content(holder / file)
        return
    reading.require_published_file(holder)
    missing = set(version.files)
    try:
        with tarfile.open(holder, "r:gz") as archive:
            for member in archive:
                file = Path(member.name).name
                if member.isfile() and file in missing and Path(member.name).parent.name == version.folder:
                    missing.remove(file)
                    if member.size > reading.map_above:
                        raise InputError(too_large(holder, reading.map_above))
                    stream = archive.extractfile(member)
                    assert stream is not None
                    yield file, f"{holder}:{file}", np.frombuffer(bytearray(stream.read()), np.uint8)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise InputError(f"{holder} is not a whole tar.gz archive ({error}); fetch it again") from None
    if missing:
        raise InputError(f"{holder} lacks {version.folder}/{min(missing)}; fetch it again")


def _records(source: str, content: Bytes, label_byte: int, label_bytes: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    length = label_bytes + _PIXELS
    if len(content) % length:
        raise InputError(f"{source} has {len(content)} bytes, not a multiple of the {length} of a record; fetch it again")
    records = content.reshape(-1, length)
    return records[:, label_bytes:].reshape(-1, *_SHAPE), records[:, label_byte].astype(np.int64)


def _unpickled(source: str, content: Bytes, key: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    try:
        # latin1 is what numpy asks for to read arrays that Python 2 pickled.
        batch = _ArraysOnly(io.BytesIO(content.tobytes()), encoding="latin1").load()
    except InputError as error:
        raise InputError(f"{source} {error}; fetch it again") from None
    except Exception:  # whatever a damaged pickle makes the unpickler or numpy raise
        raise InputError(f"{source} is not a whole pickle; fetch it again") from None
    images = batch.get("data") if isinstance(batch, dict) else None
    labels = batch.get(key) if isinstance(batch, dict) else None
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (_PIXELS,):
        raise InputError(f"{source} holds no data of {_PIXELS} bytes per image; it must be a batch of the python version")
    if not isinstance(labels, list) or len(labels) != len(images) or not all(type(label) is int for label in labels):
        raise InputError(f"{source} does not hold {key}, one whole number per image")
    return images.reshape(-1, *_SHAPE), np.array(labels, dtype=np.int64)


class _ArraysOnly(pickle.Unpickler):
    """Unpickler restricted to what numpy needs to rebuild arrays, so that a pickle cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if (module, name) == ("_codecs", "encode"):
            return _latin1_bytes
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _empty_array
        raise InputError(f"refers to {module}.{name}, which is not data; it was not run")


def _empty_array(kind: type, shape: tuple[int, ...], code: Any) -> NDArray[Any]:
    """Stands in for numpy's ``_reconstruct``: an empty array, which the pickle fills afterwards."""
    return np.ndarray.__new__(np.ndarray, (0,), "b")


def _latin1_bytes(text: str, encoding: str) -> bytes:
    """Stands in for ``codecs.encode``, with which Python 3 stores bytes in pickle protocols up to 2."""
    return text.encode("latin1")
