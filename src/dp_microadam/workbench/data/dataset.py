"""Labelled data sets with training, validation and test parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dp_microadam.errors import InputError
from dp_microadam.training.raw_inputs import RawInput
from dp_microadam.validation import require_in_closed_open, require_integer

Examples = tuple[Tensor, Tensor] | Dataset[Any]
"""Inputs and labels (int64 [N]) as tensors in memory, or a map-style Dataset of such pairs."""

TEST_FRACTION, TEST_SEED = 0.2, 0
"""The test part of data that come without one. Fixed, so that it does not depend on the split into training and validation."""


@dataclass(frozen=True, eq=False)
class LabelledData:
    """A data set: training, validation and test part, and its public metadata.

    Images are uint8 [C, H, W]. ``mean`` and ``std`` are one number per channel for pixels scaled to [0, 1], or one per column
    of a table; empty: inputs are not normalized. They are public, and never computed from the data.
    """

    name: str
    num_classes: int
    example_shape: tuple[int, ...]
    """Shape of one input of the model."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train: Examples
    validation: Examples
    test: Examples
    train_users: NDArray[np.str_] | None = None
    """The user of each training example, if the data say whose each example is; likewise for the other parts."""
    validation_users: NDArray[np.str_] | None = None
    test_users: NDArray[np.str_] | None = None
    held_out_rows: Tensor | None = None
    """With users: positions of the validation examples before training and validation part were divided."""
    tokens: bool = False
    """Whether inputs are tokens of texts, which only the model prepares further."""
    classes: tuple[str, ...] = ()
    """Names of the classes, which are public; numbers if none are given."""
    raw: RawInput | None = None
    """How files become examples like these, for a deployed model."""
    notes: tuple[str, ...] = ()
    """What the owner of the data should know about them."""

    def __post_init__(self) -> None:
        if not self.classes:
            object.__setattr__(self, "classes", tuple(str(number) for number in range(self.num_classes)))

    @property
    def images(self) -> bool:
        """Whether inputs are images, [C, H, W], rather than rows of a table."""
        return len(self.example_shape) == 3


def size_of(examples: Examples) -> int:
    """The number of examples."""
    return len(examples[1]) if isinstance(examples, tuple) else len(examples)  # type: ignore[arg-type]


def split(
    count: int,
    fraction: float,
    seed: int,
    *,
    size: int | None = None,
    train_size: int | None = None,
    of: str = "examples",
) -> tuple[Tensor, Tensor]:
    """Split ``count`` examples at random into a remaining and a held-out part of ``fraction`` (or ``size``); returns indices.

    A fraction of 0 holds out none. Of what remains, ``train_size`` examples are used, if it is given. ``of`` says what is
    divided, for messages.

    Formal guarantees: the split depends only on ``count`` and the public ``seed``, not on the content of the examples. The
    privacy guarantee of a training run covers the first part: adding or removing one of its examples, for a fixed split.

    >>> rest, held_out = split(10, 0.2, seed=0)
    >>> len(rest), len(held_out), sorted([*rest.tolist(), *held_out.tolist()]) == list(range(10))
    (8, 2, True)
    """
    require_in_closed_open("validation_fraction", fraction, 0, 1)
    require_integer("split_seed", seed, 0)
    held_out = round(count * fraction) if size is None else require_integer("validation_size", size, 1)
    if not (0 < held_out < count or (fraction == 0 < count and size is None)):
        given = f"validation_fraction is {fraction}" if size is None else f"validation_size is {size}"
        raise InputError(f"{given}; of {count} {of} it must leave at least one in each part")
    order = torch.from_numpy(np.random.default_rng(seed).permutation(count))
    if train_size is not None and require_integer("train_size", train_size, 1) > count - held_out:
        raise InputError(
            f"train_size is {train_size}; of {count} {of}, {count - held_out} are not held out, take at most these"
        )
    return order[held_out:][:train_size], order[:held_out]


def some_rows(count: int, size: int | None, seed: int) -> Tensor:
    """Indices of ``size`` of ``count`` test examples at random; all of them, in their order, if it is None.

    >>> some_rows(3, None, seed=0), len(some_rows(3, 2, seed=0))
    (tensor([0, 1, 2]), 2)
    """
    if size is None:
        return torch.arange(count)
    if require_integer("test_size", size, 1) > count:
        raise InputError(f"test_size is {size}; there are {count} test examples, take at most these")
    return torch.from_numpy(np.random.default_rng(seed).permutation(count)[:size])
