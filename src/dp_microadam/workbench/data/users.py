"""Whose each example is: ids of users, and splits that never go through one user's examples.

How many examples a user has is private, and so is the number of examples of all users together: no message names either. The
number of users is public.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.dataset import split

UserIds = NDArray[np.str_]
"""One id per example."""


def as_ids(given: NDArray[Any]) -> UserIds:
    """Ids as text without spaces around them, so that nobody counts as two users because of a space; missing ones are empty.

    >>> as_ids(np.array([" anna", "ben", "anna ", "nan", ""])).tolist()
    ['anna', 'ben', 'anna', '', '']
    >>> as_ids(np.array([3.0, np.nan])).tolist()
    ['3', '']
    """
    if given.dtype.kind == "f":  # as a column of whole numbers with gaps is often saved
        given = np.array(["" if np.isnan(number) else f"{number:.17g}" for number in given.tolist()], dtype=np.str_)
    found: UserIds = np.char.strip(given.astype(np.str_))
    return np.where(np.char.lower(found) == "nan", "", found)


def count_users(users: UserIds) -> int:
    """The number of users, which is public."""
    return len(np.unique(users))


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
    number = np.empty(len(first), dtype=np.int64)  # of each user, in the order of their first examples
    number[np.argsort(first)] = np.arange(len(first))
    rest, held_out = split(len(first), fraction, seed, size=size, of="users")
    place = np.empty(len(first), dtype=np.int64)
    place[np.concatenate([held_out.numpy(), rest.numpy()])] = np.arange(len(first))
    places = place[number[which]]
    order = np.argsort(places, kind="stable")
    ends = int((places < len(held_out)).sum())
    return torch.from_numpy(order[ends:]), torch.from_numpy(order[:ends])


def refuse_shared_users(train: UserIds | None, held_out: UserIds | None, where: str) -> None:
    """Raise InputError if a user has examples in both; None stands for data without ids, which cannot be compared."""
    if train is not None and held_out is not None and np.isin(held_out, train).any():
        raise InputError(
            f"{where} has examples of the same user in the training part and in the test part, whose figures would be private; "
            "each user must be in one part"
        )
