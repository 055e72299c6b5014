"""The idx files in which MNIST and Fashion-MNIST are published, plain or compressed with gzip.

An idx file is two zero bytes, a code for the type of its elements (8: unsigned bytes), the number of dimensions, each
dimension as four bytes, most significant first, and then the elements.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dp_microadam.errors import InputError

FILE_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_UNSIGNED_BYTES = 8
_SIDE = 28
_NUM_CLASSES = 10


def read_folder(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, then test images and labels, from the four files in ``folder``.

    Raises:
        InputError: naming the file, if one is missing, cut short, too long or not what its name says.
    """
    paths = [_find(folder, name) for name in FILE_NAMES]
    train_images, train_labels = _read_pair(*paths[:2])
    test_images, test_labels = _read_pair(*paths[2:])
    return train_images, train_labels, test_images, test_labels


def _read_pair(image_path: Path, label_path: Path) -> tuple[Tensor, Tensor]:
    images = read_idx(image_path, dimensions=3)
    labels = read_idx(label_path, dimensions=1)
    if images.shape[1:] != (_SIDE, _SIDE):
        raise InputError(
            f"{image_path} holds images of {images.shape[1]}×{images.shape[2]} pixels; they must be {_SIDE}×{_SIDE}"
        )
    if len(images) != len(labels):
        raise InputError(f"{label_path} holds {len(labels)} labels for the {len(images)} images of {image_path.name}")
    if not len(images):
        raise InputError(f"{image_path} holds no images")
    if int(labels.max()) >= _NUM_CLASSES:
        raise InputError(f"{label_path} holds the label {int(labels.max())}; labels must be 0 to {_NUM_CLASSES - 1}")
    return images.unsqueeze(1), labels.long()


def read_idx(path: Path, *, dimensions: int) -> Tensor:
    """The uint8 tensor in ``path``, which must have so many dimensions and nothing after its last element."""
    content = _content(path)
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise InputError(f"{path} ends after {len(content)} bytes, within its header of {header}; fetch it again")
    if content[:4] != bytes((0, 0, _UNSIGNED_BYTES, dimensions)):
        raise InputError(
            f"{path} starts with the bytes {content[:4].hex(' ')}; an idx file of this kind starts with "
            f"00 00 {_UNSIGNED_BYTES:02x} {dimensions:02x}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    expected = 1
    for length in shape:
        expected *= length
    if len(content) - header != expected:
        raise InputError(
            f"{path} has {len(content) - header} bytes of data where its header announces {expected}; fetch it again"
        )
    elements = np.frombuffer(content, dtype=np.uint8, offset=header)
    return torch.from_numpy(elements.reshape(shape).copy())


def _content(path: Path) -> bytes:
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as stream:
                return stream.read()
        return path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is not a whole gzip file ({error}); fetch it again") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


def _find(folder: Path, name: str) -> Path:
    """The file called ``name``, also compressed, also with a dot before ``idx`` as some copies have it."""
    for candidate in (name, name.replace("-idx", ".idx")):
        for suffix in ("", ".gz"):
            path = folder / f"{candidate}{suffix}"
            if path.is_file():
                return path
    raise InputError(f"{folder} lacks {name} (plain or .gz); it must hold {', '.join(FILE_NAMES)}")
