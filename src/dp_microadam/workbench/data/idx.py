"""Reader for the idx files of MNIST and Fashion-MNIST, plain or gzip-compressed.

An idx file is two zero bytes, a code for the type of its elements (8: unsigned bytes), the number of dimensions, each
dimension as four bytes, most significant first, and then the elements.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.arrays import Arrays
from dp_microadam.workbench.data.catalogue import IDX_FILES
from dp_microadam.workbench.data.contents import Bytes, Reading

_UNSIGNED_BYTES = 8
_SIDE = 28
_NUM_CLASSES = 10


def files_of(folder: Path) -> list[Path]:
    """The four files in ``folder``: training images and labels, test images and labels.

    Raises:
        InputError: naming one that is missing.
    """
    return [_find(folder, name) for name in IDX_FILES]


def read_folder(folder: Path, reading: Reading) -> tuple[Arrays, Arrays]:
    """Read the training and the test part.

    Raises:
        InputError: naming the file, if one is missing, truncated, too long or of another kind than its name says.
    """
    train_images, train_labels, test_images, test_labels = files_of(folder)
    return _read_pair(train_images, train_labels, reading), _read_pair(test_images, test_labels, reading)


def _read_pair(image_path: Path, label_path: Path, reading: Reading) -> Arrays:
    images = read_idx(image_path, reading, dimensions=3)
    labels = read_idx(label_path, reading, dimensions=1)
    if images.shape[1:] != (_SIDE, _SIDE):
        raise InputError(
            f"{image_path} holds images of {images.shape[1]}×{images.shape[2]} pixels; they must be {_SIDE}×{_SIDE}"
        )
    if len(images) != len(labels):
        raise InputError(
            f"{label_path} holds {len(labels)} labels for the {len(images)} images of {image_path.name}; fetch both again"
        )
    if not len(images):
        raise InputError(f"{image_path} holds no images; fetch it again")
    if labels.max() >= _NUM_CLASSES:
        raise InputError(f"{label_path} holds an invalid label; labels must be 0 to {_NUM_CLASSES - 1}")
    return Arrays([images[:, None]], labels.astype(np.int64))


def read_idx(path: Path, reading: Reading, *, dimensions: int) -> Bytes:
    """Read the array in an idx file; it must have ``dimensions`` dimensions and no trailing bytes."""
    content = reading.content(path)
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise InputError(f"{path} ends after {len(content)} bytes, within its header of {header}; fetch it again")
    start = bytes(content[:4])
    if start != bytes((0, 0, _UNSIGNED_BYTES, dimensions)):
        raise InputError(
            f"{path} starts with the bytes {start.hex(' ')}; an idx file of this kind starts with "
            f"00 00 {_UNSIGNED_BYTES:02x} {dimensions:02x}, fetch it again"
        )
    shape = struct.unpack(f">{dimensions}I", bytes(content[4:header]))
    expected = math.prod(shape)
    if len(content) - header != expected:
        raise InputError(
            f"{path} has {len(content) - header} bytes of data where its header announces {expected}; fetch it again"
        )
    return content[header:].reshape(shape)


def _find(folder: Path, name: str) -> Path:
    """The file called ``name``, possibly gzip-compressed, or with a dot before ``idx`` as in some copies."""
    for candidate in (name, name.replace("-idx", ".idx")):
        for suffix in ("", ".gz"):
            path = folder / f"{candidate}{suffix}"
            if path.is_file():
                return path
    raise InputError(f"{folder} lacks {name} (plain or .gz); it must hold {', '.join(IDX_FILES)}")
