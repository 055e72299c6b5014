"""Labelled data sets: examples as arrays, splits that never go through a user, and how a batch is prepared.

How many examples a user has is private, and so is the number of examples of all users together: no message names either. The
number of users is public.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dp_microadam.errors import InputError
from dp_microadam.training.program import RawInput
from dp_microadam.validation import require_in_closed_open, require_integer
from dp_microadam.workbench.data.catalogue import KnownData
from dp_microadam.workbench.data.columns import Columns
from dp_microadam.workbench.data.rows import Problems, unreadable

if TYPE_CHECKING:
    from dp_microadam.workbench.data.images import ImageFolder

Examples = tuple[Tensor, Tensor] | Dataset[Any]
"""Inputs and labels (int64 [N]) as tensors in memory, or a map-style Dataset of such pairs."""

UserIds = NDArray[np.str_]
"""One id per example."""


@dataclass(frozen=True, eq=False)
class Arrays:
    """N examples: inputs, labels as int64, and N ids of ``users`` if it is known whose each example is.

    Texts are an array of objects, which ``encode`` turns into tokens.
    """

    inputs: NDArray[Any]
    labels: NDArray[np.int64]
    users: UserIds | None = None
    encode: Callable[[list[str]], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return self.inputs.shape[1:]

    def part(self, rows: NDArray[np.int64]) -> Examples:
        """The examples with these indices, as tensors."""
        chosen = self.inputs[rows]
        inputs = torch.from_numpy(chosen) if self.encode is None else self.encode(chosen.tolist())
        return inputs, torch.from_numpy(self.labels[rows])


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
    train_users: UserIds | None = None
    """The user of each training example, if the data say whose each example is; likewise for the other parts."""
    validation_users: UserIds | None = None
    test_users: UserIds | None = None
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


@dataclass(frozen=True, eq=False)
class Source:
    """Where a data set lies, and what a recipe says about it. A reader gets one, and adds to ``problems`` what is wrong."""

    name: str
    data: KnownData
    place: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: Columns | None = None
    """The declared columns of a table, if there are any."""
    image_size: int | None = None
    encode: Callable[[list[str]], Tensor] | None = None
    """Turns texts into tokens."""
    labelled: bool = True
    """Whether labels of texts are read."""
    verify: bool = True
    """Whether files must be the published ones."""
    problems: Problems = field(default_factory=Problems)

    def content(self, path: Path) -> bytes:
        """The whole content of a file, decompressed if its name ends in .gz; an archive as it is.

        Raises:
            InputError: naming the file, if it cannot be read, is damaged, or is not the published one.
        """
        name = path.name
        try:
            content = path.read_bytes()
            if name.endswith(".gz") and not name.endswith(".tar.gz"):
                content, name = gzip.decompress(content), name.removesuffix(".gz")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{path} is not a whole gzip file ({error}); fetch it again") from None
        except OSError as error:
            raise unreadable(path, error) from None
        expected = self.data.digests.get(name) if self.verify else None
        if expected is not None and hashlib.sha256(content).hexdigest() != expected:
            raise InputError(
                f"{path} is not the published {name} of {self.name} (its SHA-256 differs); fetch it again with dp-microadam "
                f"data get {self.name}, or set verify_data=false if it is your own data in this format"
            )
        return content


@dataclass(frozen=True, eq=False)
class Found:
    """What a reader has found. Without a test part of its own, one is split off the training part."""

    train: Arrays | ImageFolder
    test: Arrays | ImageFolder | None
    classes: int | Sequence[str]
    """Their number or their names."""
    raw: RawInput | None = None
    notes: tuple[str, ...] = ()


def size_of(examples: Examples) -> int:
    """The number of examples."""
    return len(examples[1]) if isinstance(examples, tuple) else len(examples)  # type: ignore[arg-type]


class Preparation:
    """Preprocesses batches of (inputs, labels): resize images if necessary, convert to float, normalize by public constants.

    Formal guarantees: every example is transformed on its own, by constants that do not depend on the data.

    >>> data = LabelledData("pixels", 2, (1, 1, 2), (0.5,), (0.25,), *3 * [(torch.empty(0), torch.empty(0))])
    >>> Preparation(data)((torch.tensor([[[[0, 255]]]], dtype=torch.uint8), torch.tensor([1])))[0]
    tensor([[[[-2.,  2.]]]])
    """

    def __init__(self, data: LabelledData) -> None:
        self._as_they_are = data.tokens
        self._size = (data.example_shape[1], data.example_shape[2]) if data.images else None
        # Pixels range from 0 to 255, but their constants are for 0 to 1.
        unit = 255.0 if data.images else 1.0
        shape = (-1, 1, 1) if data.images else (-1,)
        self._mean = torch.tensor(data.mean or (0.0,)).view(shape) * unit
        self._scale = 1 / (torch.tensor(data.std or (1 / unit,)).view(shape) * unit)

    def __call__(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self._as_they_are:
            return batch
        inputs, labels = batch
        if self._size is not None and tuple(inputs.shape[-2:]) != self._size:
            inputs = resized(inputs.float(), self._size)
        mean, scale = self._mean.to(inputs.device), self._scale.to(inputs.device)
        return (inputs - mean).mul_(scale), labels


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images [B, C, H, W] of floating-point numbers (bilinear, with antialiasing)."""
    return F.interpolate(images, size, mode="bilinear", align_corners=False, antialias=True)


def split(
    count: int, fraction: float, seed: int, *, size: int | None = None, train_size: int | None = None, of: str = "examples"
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


def split_by_user(users: UserIds, fraction: float, seed: int, *, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Like ``split``, with all examples of a user in the same part; returns indices of examples.

    ``fraction`` is that of the users, and ``size`` a number of users. Users are numbered by their first example, so for one
    example per user this is the split of examples.

    Formal guarantees: which users are held out depends only on their number and the public ``seed``. No user is in both parts.

    >>> rest, held_out = split_by_user(np.array(["a", "b", "a", "c", "c", "a"]), 0.4, seed=0)
    >>> sorted(rest.tolist()), sorted(held_out.tolist())
    ([0, 1, 2, 5], [3, 4])
    """
    _, first, which = np.unique(users, return_index=True, return_inverse=True)
    rest, held_out = split(len(first), fraction, seed, size=size, of="users")
    place = np.empty(len(first), dtype=np.int64)  # in the order of the two parts, of each user by the number of its id
    place[np.argsort(first)[np.concatenate([held_out.numpy(), rest.numpy()])]] = np.arange(len(first))
    places = place[which]
    order = torch.from_numpy(np.argsort(places, kind="stable"))
    ends = int((places < len(held_out)).sum())
    return order[ends:], order[:ends]


def count_users(users: UserIds) -> int:
    """The number of users, which is public."""
    return len(np.unique(users))


def add_shared_users(problems: Problems, place: Path, train: UserIds | None, test: UserIds | None) -> None:
    """Add a problem if a user has examples in both; None stands for data without ids, which cannot be compared."""
    if train is not None and test is not None and np.isin(test[test != ""], train).any():
        fault = "has examples of the same user in the training part and in the test part, whose figures would be private"
        problems.add(f"{place} {fault}", "each user must be in one part")
