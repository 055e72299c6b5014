"""Which examples datasets have in common, and whether all ranks have them in the same order. No example is read for it.

Examples are known by their numbers in a Dataset (or in another with the same content), by the memory they lie in, and by
``example_ids``, an attribute or method of a Dataset that gives a name or integer for each example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from hashlib import blake2b
from itertools import combinations
from pathlib import PurePath
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, Dataset, Subset

from dp_microadam.errors import InputError
from dp_microadam.training.distributed import Ranks

_Rows = NDArray[np.int64]

_FEW, _DEPTH = 64, 4
"""The longest container, and the deepest, that is searched for datasets."""


def share_examples(one: Any, other: Any) -> bool:
    """Whether two datasets visibly share examples; ``example_ids`` alone decide if both have them.

    >>> data = torch.utils.data.TensorDataset(torch.zeros(10, 3))
    >>> share_examples(Subset(data, [0, 1]), Subset(data, [1, 2])), share_examples(Subset(data, [0, 1]), Subset(data, [2]))
    (True, False)
    >>> images = torch.zeros(10, 3)
    >>> share_examples((images,), images[5:6]), share_examples(images[::2], images[1::2])
    (True, False)
    """
    ids, other_ids = ids_of(one), ids_of(other)
    counted = ids == list(range(len(ids or ()))) and other_ids == list(range(len(other_ids or ())))
    if ids is not None and other_ids is not None and not counted:  # 0, 1, 2 … name the examples of any Dataset
        return not set(ids).isdisjoint(other_ids)
    mine, theirs = list(_places(one)), list(_places(other))
    met = any(_meet(place, their) for place in mine for their in theirs)
    return met or _reads_from(one, theirs) or _reads_from(other, mine)


def refuse_shared_users(users: Any, held_out: Any) -> None:
    """Raise InputError if a user has training examples and held-out ones; both are ids, one per example, or None."""
    if users is None or held_out is None:
        return
    mine, theirs = ({str(each) for each in (ids.tolist() if _is_array(ids) else ids)} for ids in (users, held_out))
    if not mine.isdisjoint(theirs):
        raise InputError(
            "a user has examples in the training data and in the held-out data, whose metrics would be private; the "
            "data must be divided by user"
        )


def refuse_repeats(train: Any) -> None:
    """Refuse training data that visibly holds an example several times.

    ε is stated for one entry of the training data. An example with ten entries, as in oversampling, is protected far less.

    Raises:
        InputError: for repeated indices of a Subset, datasets concatenated with themselves, repeated ``example_ids``, or
            tensors expanded along their first dimension.
    """
    ids = ids_of(train)
    parts = train.datasets[:_FEW] if isinstance(train, ConcatDataset) else []
    if ids is not None and len(set(ids)) < len(ids):
        where = "example_ids repeat"
    elif any(len(np.unique(starts)) < len(starts) for _, starts, _ in _places(train)):
        where = "the indices of a Subset repeat, or a tensor is expanded along its first dimension"
    elif any(share_examples(one, other) for one, other in combinations(parts, 2)):
        where = "concatenated datasets share examples"
    else:
        return
    raise InputError(
        f"train holds the same example several times ({where}), and ε is stated for one entry; remove repeats, and weight the "
        "loss of examples that should count more"
    )


def reads_examples(loader: Any, train: Any) -> bool:
    """Whether a loader of any type visibly reads examples of ``train``: data it holds, or a generator's variables, share some.

    >>> images = torch.zeros(10, 3)
    >>> loader = torch.utils.data.DataLoader(images[4:8])
    >>> reads_examples(loader, (images[:8],)), reads_examples(iter(loader), (images[:4],))
    (True, False)
    """
    return any(share_examples(train, data) for data in _held_by(loader, _DEPTH))


def _held_by(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, Dataset | list | tuple | Mapping) or _is_array(value) or _is_arrow(value):
        yield value
    inside: Any = ()
    if isinstance(value, list | tuple | Mapping):
        inside = (value.values() if isinstance(value, Mapping) else value) if len(value) <= _FEW else ()
    elif isinstance(value, GeneratorType):
        inside = value.gi_frame.f_locals.values() if value.gi_frame else ()
    elif hasattr(value, "dataset"):
        inside = [value.dataset]
    elif not isinstance(value, Dataset | type) and (depth == _DEPTH or not callable(value)):
        inside = getattr(value, "__dict__", {}).values()
    for one in list(inside) if depth > 1 else ():
        yield from _held_by(one, depth - 1)


def ids_of(data: Any) -> list[Any] | None:
    """``example_ids`` of ``data``, through Subsets and ConcatDatasets; None if there are none.

    Raises:
        InputError: if they are not one name or integer for each example.
    """
    if not isinstance(data, Dataset) and not _is_arrow(data):
        return None
    ids = getattr(data, "example_ids", None)
    if ids is None:
        if isinstance(data, Subset):
            inner = ids_of(data.dataset)
            return None if inner is None else [inner[index] for index in data.indices]
        parts = [ids_of(part) for part in data.datasets] if isinstance(data, ConcatDataset) else [None]
        return None if None in parts else [one for part in parts for one in part or ()]
    ids = ids() if callable(ids) else ids
    ids = ids.tolist() if _is_array(ids) else ids
    if not isinstance(ids, Sequence) or isinstance(ids, str) or len(ids) != len(data) or any(isinstance(i, float) for i in ids):
        count = f"of length {len(ids)}" if hasattr(ids, "__len__") else ""
        raise InputError(
            f"example_ids of {type(data).__name__} is a {type(ids).__name__} {count}; it must be a sequence of names or "
            f"integers, one for each of {len(data)} examples"
        )
    return [one if isinstance(one, bytes) else str(one) if not isinstance(one, int | np.integer) else int(one) for one in ids]


def _places(data: Any, rows: _Rows | None = None) -> Iterator[tuple[Any, _Rows, int]]:
    """Where examples come from: a Dataset, their numbers and 1; or a device, their addresses and their length."""
    if rows is None:
        columns = (data.values() if isinstance(data, Mapping) else data) if isinstance(data, tuple | Mapping) else ()
        rows = np.arange(min((_length(one) for one in columns if _is_array(one) and one.ndim), default=_length(data)))
    if isinstance(data, Subset):
        yield from _places(data.dataset, np.asarray(data.indices, dtype=np.int64)[rows])
    elif isinstance(data, ConcatDataset):
        for part, end in zip(data.datasets, data.cumulative_sizes, strict=True):
            first = end - len(part)  # type: ignore[arg-type]
            yield from _places(part, rows[(rows >= first) & (rows < end)] - first)
    elif _is_arrow(data):
        indices = getattr(data, "_indices", None)  # into a table that a selection shares with the whole
        yield f"fingerprint {data._fingerprint}", rows, 1
        yield data._data, rows if indices is None else np.asarray(indices.column(0).to_pylist(), dtype=np.int64)[rows], 1
    elif _is_array(data):
        yield from _memory(data, rows) if len(rows) else ()
    elif isinstance(data, list):
        yield "objects", _addresses(data, rows), 1
    elif isinstance(data, Dataset):
        yield data, rows, 1
        for one in _kept(data):
            if _length(one) == _length(data):
                yield from _places(one, rows)
    else:
        for one in _parts(data):
            yield from _places(one, rows) if _is_array(one) and one.ndim else ()


def _length(value: Any) -> int:
    return 0 if not hasattr(value, "__len__") or (_is_array(value) and not value.ndim) else len(value)


def _parts(value: Any) -> list[Any]:
    parts = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, tuple) else ()
    return list(parts[:_FEW])


def _kept(data: Any) -> list[Any]:
    """What a Dataset keeps that may have a row per example."""
    kept = [one for value in vars(data).values() for one in (value, *_parts(value))] if isinstance(data, Dataset) else []
    return [one for one in kept if isinstance(one, Dataset | list) or _is_array(one) or _is_arrow(one)]


def _reads_from(data: Any, places: list[tuple[Any, _Rows, int]], depth: int = _DEPTH) -> bool:
    """Whether a Dataset keeps something all of whose examples are at these places, whichever of them it reads."""
    return any(
        any(_within(place, whole) for place in _places(one) for whole in places)
        or (depth > 1 and _reads_from(one, places, depth - 1))
        for one in _kept(data)
    )


def _within(one: tuple[Any, _Rows, int], other: tuple[Any, _Rows, int]) -> bool:
    return len(one[1]) > 0 and _equal(one[0], other[0]) and bool(np.isin(one[1], other[1]).all())


def _meet(one: tuple[Any, _Rows, int], other: tuple[Any, _Rows, int]) -> bool:
    """Whether two places have an example in common."""
    (space, starts, length), (other_space, other_starts, other_length) = one, other
    if not _equal(space, other_space):
        return False
    other_starts = np.sort(other_starts)
    before = np.searchsorted(other_starts, starts + length)  # how many of the others begin before a row ends
    return bool((other_starts[before[before > 0] - 1] + other_length > starts[before > 0]).any())


def _equal(one: Any, other: Any) -> bool:
    """Whether two spaces are one; Datasets may have the same content, as one folder read with two transforms."""
    if one is other:
        return True
    if isinstance(one, str) or not isinstance(one, Dataset) or type(one) is not type(other) or len(one) != len(other):  # type: ignore[arg-type]
        return isinstance(one, str) and bool(one == other)
    try:
        return data_digest(one) == data_digest(other)
    except InputError:
        return False  # the order of its examples cannot be seen


def _addresses(entries: list[Any], rows: _Rows) -> _Rows:
    """Addresses of examples in a list, and of arrays in them, that no other example has."""
    found: Counter[int] = Counter()
    for entry in (entries[row] for row in rows):
        leaves = (leaf for leaf in tree_leaves(entry) if _is_array(leaf) and leaf.ndim)
        found.update(leaf.data_ptr() if isinstance(leaf, Tensor) else leaf.ctypes.data for leaf in leaves)
        own = isinstance(entry, dict | list) or (hasattr(entry, "__dict__") and not callable(entry))
        found.update([id(entry)] if own else ())
    return np.array([address for address, count in found.items() if count == 1], dtype=np.int64)


def _memory(array: Any, rows: _Rows) -> Iterator[tuple[str, _Rows, int]]:
    """Device, where rows begin, and their length; nothing if they do not lie in one piece."""
    if isinstance(array, np.ndarray):
        item, start, device, strides = array.itemsize, array.ctypes.data, "cpu", list(array.strides)
    elif array.layout == torch.strided:
        item, start, device = array.element_size(), array.data_ptr(), str(array.device)
        strides = [stride * item for stride in array.stride()]
    else:
        return
    length = item + sum((size - 1) * abs(stride) for size, stride in zip(array.shape[1:], strides[1:], strict=True))
    # Rows of a transposed matrix lie between each other, and are told apart by where they begin.
    yield device, start + strides[0] * rows, min(length, abs(strides[0])) or length


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _is_arrow(value: Any) -> bool:
    """Whether it is a Dataset of Hugging Face's ``datasets``."""
    return hasattr(value, "_fingerprint") and hasattr(value, "_data")


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
    """A digest of what determines which examples a Dataset has, and in which order: its ``example_ids``, or all its attributes.

    Attributes are followed through containers and Datasets to arrays, tables, texts, numbers, paths and dates; arrays above
    256 MB are hashed at 4,096 rows, and Hugging Face Datasets by their fingerprint. All else is left out: transforms, locks or
    files may differ where the data do not. The digest depends on private data; it is compared between ranks, and neither
    written nor shown.

    >>> images = torch.arange(6).view(3, 2)
    >>> data_digest((images,)) == data_digest((images.clone(),)), data_digest((images,)) == data_digest((images.flip(0),))
    (True, False)

    Raises:
        InputError: if nothing that was hashed distinguishes the examples, so that their order cannot be verified.
    """
    if ids_of(data) is None and isinstance(data, Subset | ConcatDataset):
        parts = [data.dataset] if isinstance(data, Subset) else data.datasets
        chosen = list(map(int, data.indices)) if isinstance(data, Subset) else None
        return _Content().of((chosen, [data_digest(part) for part in parts])).hex()
    content = _Content()
    digest = content.of(data).hex()
    if isinstance(data, Dataset) and len(data) > 1 and content.entries < len(data):  # type: ignore[arg-type]
        raise InputError(
            f"{type(data).__name__} has no attribute that distinguishes its examples, so several processes cannot verify that "
            "they have them in the same order; give it example_ids, a name or number for each example"
        )
    return digest


_WHOLE, _SAMPLE = 1 << 28, 4096


class _Content:
    """Digests of values; ``entries`` are how many examples what was hashed tells apart."""

    def __init__(self) -> None:
        self.entries = 0

    def of(self, value: Any) -> bytes:
        """16 bytes; the same for everything that is no data."""
        if (ids := ids_of(value)) is not None:
            return self._of_entries(ids, names=True)
        if _is_arrow(value):
            self.entries = max(self.entries, len(value))
            return _hash(repr((value._fingerprint, len(value))).encode())
        if hasattr(value, "to_numpy"):
            value = value.to_numpy()
        if _is_array(value):
            return self._of_array(value)
        if value is None or isinstance(value, str | bytes | int | float | PurePath | date):
            return _hash(f"{type(value).__name__} {value!r}".encode())
        if isinstance(value, list | tuple):
            return self._of_entries(value)
        if isinstance(value, dict):
            return _hash(self._of_entries(list(value)), self._of_entries(list(value.values())))
        return self.of(vars(value)) if isinstance(value, Dataset) else _hash(b"left out")

    def _of_entries(self, values: Sequence[Any], *, names: bool = False) -> bytes:
        """Whole numbers may be classes, or tokens, so that half of them at most tell examples apart."""
        digests = [self.of(one) for one in values]
        whole = not names and all(isinstance(one, int | np.integer | type(None)) for one in values)
        self.entries = max(self.entries, len(digests) // 2 if whole else len(values) if names else len(set(digests)))
        return _hash(*digests)

    def _of_array(self, array: Any) -> bytes:
        if isinstance(array, np.ndarray) and (array.dtype.hasobject or array.dtype.kind in "SU"):
            return self._of_entries(array.tolist() if array.ndim else [array.item()])
        described = f"{tuple(array.shape)} {array.dtype}".encode()
        if isinstance(array, Tensor):
            array = array.detach().cpu().to_dense() if array.layout != torch.strided else array.detach().cpu()
            array = array.resolve_conj().resolve_neg().contiguous()
            array = array.view(torch.uint16).numpy() if array.dtype == torch.bfloat16 else array.numpy()
        if array.ndim:
            rows = len(array) if array[:1].size > 1 else len(np.unique(array)) if array.dtype.kind == "f" else len(array) // 2
            self.entries = max(self.entries, rows)
        if array.nbytes > _WHOLE:
            array = array[:: max(1, len(array) // _SAMPLE)]
        return _hash(described, np.ascontiguousarray(array).tobytes())


def _hash(*parts: bytes) -> bytes:
    found = blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()
