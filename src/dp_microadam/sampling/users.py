"""Users as the unit of privacy: which examples belong to whom, and which of them enter a step.

Of each sampled user at most k examples are drawn, anew in every step, and the mean of their gradients is clipped as a whole. So
a user moves the sum by at most the clipping norm, whatever they have and however much of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.noise.randomness import Randomness
from dp_microadam.validation import require_integer

Integers = NDArray[np.int64]

# A further pass through the model takes about as long as this part of a full physical batch: users with few examples are
# processed beside those with more, if that adds fewer rows of padding.
_WORTH_OF_A_PASS = 1 / 8


class WeightedRows(NamedTuple):
    """A physical batch of users: each has the same number of consecutive rows, and row j of user i has weight (i, j).

    ``rows`` are numbers of examples, or the examples themselves. The weights of a user's rows add up to one. Rows that only
    fill up have weight zero; they repeat the user's first, so that they are no more unusual than what the user has.
    """

    rows: Any
    weights: Tensor


class Units:
    """The examples of each user, for a run whose unit of privacy is the user.

    ``users`` has one id per example: integers or strings in a list, array or tensor. Users are numbered in the order of their
    first example. How many examples a user has is private: it is not in the representation, and pickling is refused.

    Formal guarantees: every example belongs to exactly one user. :meth:`draw` takes of a user with at most ``most`` examples
    all of them, of any other ``most`` at random without replacement, each set of that size with the same probability (up to
    ties among uniform numbers of 53 bits), independently of other users and steps.

    >>> units = Units(["ann", "bob", "ann", "ann", "eve"], most=2)
    >>> units, len(units)
    (Units(3 users, at most 2 examples of each in a step), 3)
    >>> numbers, counts = units.draw(np.array([1, 2]), 0, Randomness.seeded(0))
    >>> numbers.tolist(), counts.tolist()
    ([1, 4], [1, 1])
    """

    def __init__(self, users: Any, most: int) -> None:
        self.most = require_integer("examples_per_user", most, 1)
        _, first, place = np.unique(_as_ids(users), return_index=True, return_inverse=True)
        numbers = np.argsort(np.argsort(first))[place.ravel()]  # in the order of their first examples
        self._members: Integers = np.argsort(numbers, kind="stable").astype(np.int64, copy=False)
        self._offsets: Integers = np.concatenate([[0], np.cumsum(np.bincount(numbers))]).astype(np.int64)

    def __len__(self) -> int:
        """The number of users, which is public."""
        return len(self._offsets) - 1

    def belong_to(self, examples: int) -> bool:
        """Whether there is one id for each of so many examples."""
        return examples == len(self._members)

    def some_examples(self, count: int) -> Tensor:
        """The numbers of ``count`` examples, repeated if there are fewer: the result's length says nothing of the data."""
        return torch.from_numpy(np.arange(count) % len(self._members))

    def draw(self, users: Integers, step: int, randomness: Randomness) -> tuple[Integers, Integers]:
        """The numbers of the examples that these users bring to a step, user by user, and how many each brings."""
        starts, sizes = self._offsets[users], self._offsets[users + 1] - self._offsets[users]
        counts = np.minimum(sizes, self.most)
        before = np.cumsum(sizes) - sizes
        places = np.repeat(starts - before, sizes) + np.arange(sizes.sum())
        if (sizes > self.most).any():
            first = int(places.min())
            uniforms = randomness.uniforms("examples of users", step, int(places.max()) + 1 - first, first=first)
            # Within each user by their uniform numbers; the first of each are taken, in the order of the data.
            order = np.lexsort((uniforms[places - first], np.repeat(np.arange(len(users)), sizes)))
            rank = np.arange(len(places)) - np.repeat(before, sizes)
            places = places[np.sort(order[rank < self.most])]
        return self._members[places], counts

    def batches(self, users: Integers, step: int, randomness: Randomness, physical_batch_size: int) -> tuple[WeightedRows, ...]:
        """What these users bring to a step, as physical batches of at most ``physical_batch_size`` rows.

        Users are put together by the number of their examples, so that few rows are padding.
        """
        examples, counts = self.draw(users, step, randomness)
        starts = np.cumsum(counts) - counts
        found = []
        for who, width in _together(counts, self.most, physical_batch_size):
            column = np.arange(width)
            present = column < counts[who, None]
            places = starts[who, None] + np.where(present, column, 0)
            weights = np.where(present, 1 / counts[who, None], 0.0)
            found.append(WeightedRows(torch.from_numpy(examples[places].ravel()), torch.from_numpy(weights)))
        return tuple(found)

    def digest(self) -> str:
        """A digest that several processes compare; it is private, and neither written nor shown."""
        return hashlib.sha256(self._members.tobytes() + self._offsets.tobytes()).hexdigest()

    def __repr__(self) -> str:
        return f"Units({len(self)} users, at most {self.most} examples of each in a step)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PrivacyError("which examples belong to which user is private and cannot be saved; keep the ids with the data")


def widths(most: int) -> list[int]:
    """The numbers of rows per user that physical batches come in: a few that grow by at most a half, the last is ``most``.

    >>> widths(20)
    [1, 2, 3, 4, 6, 8, 12, 16, 20]
    """
    found = [1]
    while found[-1] < most:
        power = 1 << (found[-1].bit_length() - 1)
        found.append(min(most, found[-1] + max(1, power // 2)))
    return found


def _together(counts: Integers, most: int, physical_batch_size: int) -> Iterator[tuple[Integers, int]]:
    """Groups of users for one pass each, as indices into ``counts``, and the number of rows that each user has there."""
    table = np.array(widths(most))
    width_of = table[np.searchsorted(table, counts)]
    occurring = np.unique(width_of).tolist()
    waiting = np.empty(0, dtype=np.int64)
    for width, wider in zip(occurring, [*occurring[1:], None], strict=True):
        waiting = np.sort(np.concatenate([waiting, np.flatnonzero(width_of == width)]))
        room = physical_batch_size // width
        full = len(waiting) // room * room
        rest = waiting[full:]
        if wider is None or (wider - width) * len(rest) > _WORTH_OF_A_PASS * physical_batch_size:
            full, rest = len(waiting), rest[:0]
        for start in range(0, full, room):
            yield waiting[start : min(start + room, full)], width
        waiting = rest


_NOBODY = ("", "nan", "none", "nat", "<na>", "null", "n/a")
"""What missing ids become when an array or a table of strings is made of them, in any case."""


def _as_ids(users: Any) -> NDArray[Any]:
    """The ids as an array of integers or strings.

    NumPy would take ids that are masked or end in NUL for others, and two users that are taken for one move a sum by twice C.
    """
    if np.ma.is_masked(users):
        raise InputError("users is an array in which ids are masked; every example must have one")
    if isinstance(users, Tensor):
        users = users.detach().cpu().numpy()
    if isinstance(users, Sequence) and not isinstance(users, str):
        kinds = {str if isinstance(one, str) else type(one) for one in users}
        if len(kinds) > 1 and not all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds):
            raise InputError("users holds ids of different types; all must be integers, or all strings")
    found = np.asarray(users)
    texts = users if isinstance(users, Sequence) else found
    if found.ndim == 1 and found.dtype.kind in "OUS" and all(isinstance(one, str | bytes) for one in texts):
        plain = [one if isinstance(one, str) else one.decode("latin-1") for one in texts]
        if any(one.endswith("\0") or one.strip().lower() in _NOBODY for one in plain):
            raise InputError("users holds ids that are empty, say 'nan' or 'None', or end in NUL; give every user another id")
        found = found.astype(str) if found.dtype == object and all(isinstance(one, str) for one in texts) else found
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iuUS":
        raise InputError(
            f"users is an array of {found.ndim} dimensions and type {found.dtype}; it must have one id per example, an integer "
            "or a string, and none may be missing"
        )
    return found
