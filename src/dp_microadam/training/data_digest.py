"""Checks that all ranks have the same data in the same order: shards of differently ordered data would overlap."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import chain
from pathlib import PurePath
from typing import Any
from uuid import UUID

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from dp_microadam.errors import InputError
from dp_microadam.training.distributed import Ranks
from dp_microadam.training.example_entries import (
    Entries,
    attributes_of,
    entries_of,
    ids_of,
    is_array,
    is_arrow,
    is_searched,
    is_table,
    of_objects,
    own_ids,
    unwrapped,
)

_ROWS = 4096
"""Rows, evenly spread, that are hashed of an array that is too large; another order changes nearly all of them."""

_WHOLE = 1 << 28
"""Arrays up to this many bytes are hashed completely, which takes a third of a second."""

_PART = 16_384
"""Entries of a list that are hashed at once."""

_SIMPLE = frozenset({str, bytes, int, float, bool, type(None)})
"""Types whose ``repr`` is the same in every process and different for different values."""

_IN_WORDS = (complex, date, time, timedelta, tzinfo, Decimal, Fraction, UUID, slice, range, np.dtype, torch.dtype)


def require_same_data(ranks: Ranks, data: Any) -> None:
    """Check that all ranks have the same training data in the same order.

    Formal guarantees: if this returns, and what :func:`data_digest` looks at determines the examples, then index i is the same
    example on every rank, so that disjoint shards of indices are disjoint sets of examples.

    Raises:
        InputError: on every rank, if data or order differ; if a rank's data cannot be compared, on that rank, and
            :class:`ProcessLost` on the others.
    """
    if ranks.world_size == 1:
        return
    with ranks.together():
        digest = data_digest(data)
    ranks.require_same("the training data or its order (where only paths or settings differ, give it example_ids)", digest)


def data_digest(data: Any) -> str:
    """A digest of everything that determines which examples a Dataset has, and in which order.

    If the Dataset has ``example_ids``, an attribute or method that gives a name or integer for each example, only these are
    hashed. Otherwise all attributes are: strings, paths, numbers, lists, dicts, sets, dataclasses, tables and arrays, including
    those of nested objects and Datasets. Lists and strings are hashed completely, and so are arrays of up to 256 MB; of larger
    arrays 4096 rows are hashed. Hugging Face Datasets are identified by their fingerprint. Functions, transforms and other
    callables, locks, loggers, random generators and open files are left out, because they may differ between processes that
    have the same data. Paths are hashed as they are, so another root folder counts as other data unless there are
    ``example_ids``.

    The digest depends on private data. It is compared between ranks and neither written nor shown.

    >>> images = torch.arange(6).view(3, 2)
    >>> data_digest((images,)) == data_digest((images.clone(),)), data_digest((images,)) == data_digest((images.flip(0),))
    (True, False)

    Raises:
        InputError: if nothing that was hashed distinguishes the examples, so that their order cannot be verified.
    """
    content = _Hash()
    digest = content.of(data).hex()
    whole = isinstance(unwrapped(data)[0], list) and not content.left_out
    if not (whole or _order_is_seen(data)):
        raise InputError(
            f"{type(unwrapped(data)[0]).__name__} has no attribute that distinguishes its examples, so several processes "
            "cannot verify that they have them in the same order; give it example_ids, a name or number for each example"
        )
    return digest


def content_digest(data: Any) -> str:
    """:func:`data_digest` without the check that examples can be distinguished."""
    return _Hash().of(data).hex()


def _order_is_seen(data: Any) -> bool:
    base, _ = unwrapped(data)
    if ids_of(base) is not None or is_array(base) or isinstance(base, Mapping | tuple) or is_arrow(base):
        return True
    if isinstance(base, ConcatDataset):
        return all(map(_order_is_seen, base.datasets))
    count = len(base)
    if count < 2:
        return True
    entries, others = entries_of(base)
    # A corpus in one array, cut into examples of equal length, has more entries than examples.
    return any(map(Entries.tell_examples_apart, entries)) or any(one.ndim == 1 and len(one) >= 2 * count for one in others)


class _Hash:
    """Hashes values by their contents: never by identity or Python's ``hash``, which differ between processes."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, bytes]] = {}
        self._entered: list[int] = []
        self.left_out = False

    def of(self, value: Any) -> bytes:
        """32 bytes; the same for equal values of the same types."""
        if type(value) in _SIMPLE:
            return _joined(type(value).__name__, _plain(value))
        if id(value) in self._found:
            return self._found[id(value)][1]
        if id(value) in self._entered:
            return _joined("seen", str(len(self._entered) - self._entered.index(id(value))).encode())
        self._entered.append(id(value))
        result = self._of_whole(value)
        self._entered.pop()
        self._found[id(value)] = value, result  # kept alive, so that its id stays its own
        return result

    def _of_whole(self, value: Any) -> bytes:
        ids = own_ids(value)
        if ids is not None:
            return self._of_list("ids", ids)
        if isinstance(value, Dataset) and (found := unwrapped(value))[1] is not None:
            return _joined("subset", np.asarray(found[1], dtype=np.int64).tobytes(), self.of(found[0]))
        if is_array(value):
            return self._of_array(value)
        if is_arrow(value):
            return _joined("fingerprint", str(value._fingerprint).encode(), str(len(value)).encode())
        if is_table(value):
            columns = value.columns if hasattr(value, "columns") else [None]
            values = [(value if column is None else value[column]).to_numpy() for column in columns]
            return _joined("table", *map(self.of, (list(map(str, columns)), value.index.to_numpy(), values)))
        return self._of_python(value)

    def _of_python(self, value: Any) -> bytes:
        kind = type(value).__name__
        if isinstance(value, PurePath | str | bytes | bytearray):
            return _joined(kind if not isinstance(value, PurePath) else "path", _plain(value))
        if isinstance(value, Enum):
            return _joined(kind, value.name.encode())
        if isinstance(value, bool | int | float):
            return _joined(kind, _plain(value))
        if isinstance(value, np.generic):
            return _joined(value.dtype.str, value.tobytes())
        if isinstance(value, _IN_WORDS):
            return _joined(kind, repr(value).encode())
        if isinstance(value, list | tuple | deque):
            return self._of_list(kind, value if isinstance(value, list | tuple) else list(value))
        if isinstance(value, Mapping):  # in its order, which is that of iteration
            return _joined(kind, self._of_list("keys", list(value)), self._of_list("values", list(value.values())))
        if isinstance(value, set | frozenset):  # their order differs between processes
            return _joined(kind, *sorted(map(self.of, value)))
        if is_searched(value):
            size = str(len(value)).encode() if isinstance(value, Dataset) and hasattr(value, "__len__") else b""
            return _joined(kind, size, *(self._of_list(name, [one]) for name, one in sorted(attributes_of(value), key=_name)))
        self.left_out = True
        return _joined("left out")

    def _of_list(self, kind: str, values: Sequence[Any]) -> bytes:
        parts: list[bytes] = []
        for start in range(0, len(values), _PART):
            part = list(values[start : start + _PART])
            parts += [_joined("simple", repr(part).encode())] if _are_simple(part) else map(self.of, part)
        return _joined(kind, str(len(values)).encode(), *parts)

    def _of_array(self, array: Any) -> bytes:
        if of_objects(array):
            return _joined(str(array.shape), self._of_list(array.dtype.str, array.reshape(-1).tolist()))
        if isinstance(array, Tensor):
            if array.layout != torch.strided:
                array = array.detach().to_dense() if array.layout != torch.sparse_coo else array.detach().coalesce()
                if array.layout == torch.sparse_coo:
                    return _joined(str(tuple(array.shape)), *map(self.of, (array.indices(), array.values())))
            size = array.numel() * array.element_size()
        else:
            size = array.nbytes
        described = f"{tuple(array.shape)} {array.dtype}"
        if size > _WHOLE and array.ndim:
            rows = np.unique(np.linspace(0, len(array) - 1, min(len(array), _ROWS)).astype(np.int64))
            array = array[torch.from_numpy(rows)] if isinstance(array, Tensor) else array[rows]
        return _joined(described, _bytes(array))


def _joined(kind: str, *parts: bytes) -> bytes:
    """An unambiguous hash of several byte strings."""
    digest = hashlib.blake2b(digest_size=32)
    for part in (kind.encode(), *parts):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _are_simple(values: list[Any]) -> bool:
    """Whether ``repr`` identifies the list: it consists of strings and numbers, or tuples, lists or dicts of these."""
    for _ in range(4):
        kinds = set(map(type, values))
        if kinds <= _SIMPLE:
            return True
        if not kinds <= _SIMPLE | {tuple, list, dict}:
            return False
        inside = ([*one.keys(), *one.values()] if type(one) is dict else one for one in values if type(one) not in _SIMPLE)
        values = list(chain.from_iterable(inside))
    return False


def _plain(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, PurePath):
        return os.fsencode(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return hex(value).encode()
    return float.hex(value).encode() if isinstance(value, float) else repr(value).encode()


def _bytes(array: Any) -> bytes:
    if isinstance(array, Tensor):
        found = array.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return found.view(torch.uint8).numpy().tobytes() if found.numel() else b""
    return np.ascontiguousarray(array).tobytes()


def _name(attribute: tuple[str, Any]) -> str:
    return attribute[0]
