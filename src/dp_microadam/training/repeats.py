"""Detects training data that holds an example several times."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, TensorDataset

from dp_microadam.errors import InputError
from dp_microadam.training.example_entries import ids_of, unwrapped
from dp_microadam.training.held_out import share_examples

_MOST_PARTS = 50
"""Of concatenated datasets, those compared with each other."""


def refuse_repeats(train: Any) -> None:
    """Refuse training data that visibly holds an example several times.

    ε is stated for one entry of the training data. An example with ten entries, as in oversampling, is protected far less.
    Copies are not recognised.

    Raises:
        InputError: for repeated indices of a Subset, datasets concatenated with themselves, repeated ``example_ids``, or
            tensors expanded along their first dimension.
    """
    _, positions = unwrapped(train)
    ids = ids_of(train)
    parts = train.datasets if isinstance(train, ConcatDataset) else []
    if positions is not None and len(set(positions)) < len(positions):
        where = "the indices of a Subset repeat"
    elif ids is not None and len(set(ids)) < len(ids):
        where = "example_ids repeat"
    elif any(share_examples(one, other) for one, other in combinations(parts[:_MOST_PARTS], 2)):
        where = "concatenated datasets share examples"
    elif any(isinstance(leaf, Tensor) and leaf.dim() and len(leaf) > 1 and leaf.stride(0) == 0 for leaf in _tensors(train)):
        where = "a tensor is expanded along its first dimension"
    else:
        return
    raise InputError(
        f"train holds the same example several times ({where}), and ε is stated for one entry; remove repeats, and weight the "
        "loss of examples that should count more"
    )


def _tensors(data: Any) -> list[Any]:
    return tree_leaves(
        data.tensors if isinstance(data, TensorDataset) else data if isinstance(data, dict | tuple | Tensor) else []
    )
