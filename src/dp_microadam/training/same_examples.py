"""Which examples datasets have in common, and whether all ranks have them in the same order. No example is read for it.

Examples are known by their numbers in a Dataset (or in another with the same content), by the memory they lie in, and by
``example_ids``, an attribute or method of a Dataset that gives a name or integer for each example.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from types import GeneratorType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from dp_microadam.errors import InputError
from dp_microadam.training.distributed import Ranks

_Rows = NDArray[np.int64]

_FEW, _DEPTH = 64, 4
"""The longest container, and the deepest, that is searched for datasets."""


def share_examples(one: Any, other: Any) -> bool:
    """Whether two datasets visibly share examples; ``example_ids`` alone decide if both have them.

    >>> data = TensorDataset(torch.zeros(10, 3))
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
    theirs = list(_bases(other))
    return any(_meet(*mine, *their) for mine in _bases(one) for their in theirs)


def refuse_shared_users(users: Any, held_out: Any) -> None:
    """Raise InputError if a user has training examples and held-out ones, whose metrics would be private.

    Both are ids, one per example; None stands for data without ids, which cannot be compared. An id that is a number on one
    side and text on the other is the same.

    >>> refuse_shared_users(np.array([3, 5]), ["4", "5"])
    Traceback (most recent call last):
        ...
    dp_microadam.errors.InputError: a user has examples in the training data and in the held-out data, ...
    """
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
    elif any(len(np.unique(rows)) < len(rows) for _, rows in _bases(train)):
        where = "the indices of a Subset repeat"
    elif any(share_examples(one, other) for one, other in combinations(parts, 2)):
        where = "concatenated datasets share examples"
    elif any(len(rows) > 1 and not stride for base, rows in _bases(train) for _, _, stride, _ in _memory(base)):
        where = "a tensor is expanded along its first dimension"
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
    return any(share_examples(train, data) for data in _held_by(loader, _DEPTH, set()))


def _held_by(value: Any, depth: int, entered: set[int]) -> Iterator[Any]:
    if not depth or id(value) in entered or value is None or isinstance(value, str | bytes | int | float | type):
        return
    entered.add(id(value))
    if isinstance(value, Dataset) or _is_array(value) or _is_arrow(value):
        yield value
        return
    inside: list[Any] = []
    if isinstance(value, list | tuple | Mapping):
        yield value
        inside = list(value.values() if isinstance(value, Mapping) else value) if len(value) <= _FEW else []
    elif isinstance(value, GeneratorType):
        inside = list(value.gi_frame.f_locals.values()) if value.gi_frame else []
    elif hasattr(value, "dataset"):
        inside = [value.dataset]
    elif depth == _DEPTH or not callable(value):
        inside = list(_attributes(value).values())
    for one in inside:
        yield from _held_by(one, depth - 1, entered)


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


def _bases(data: Any, rows: _Rows | None = None) -> Iterator[tuple[Any, _Rows]]:
    """The datasets that ``data`` takes its examples from, and which rows of them."""
    if not hasattr(data, "__len__") or (_is_array(data) and not data.ndim):
        return
    if rows is None:
        parts = list(data.values()) if isinstance(data, Mapping) else data
        columns = isinstance(data, tuple | Mapping) and len(parts) > 0 and all(_is_array(one) and one.ndim for one in parts)
        rows = np.arange(min(map(len, parts)) if columns else len(data))
    if isinstance(data, Subset):
        yield from _bases(data.dataset, np.asarray(data.indices, dtype=np.int64)[rows])
    elif isinstance(data, ConcatDataset):
        for part, end in zip(data.datasets, data.cumulative_sizes, strict=True):
            first = end - len(part)  # type: ignore[arg-type]
            yield from _bases(part, rows[(rows >= first) & (rows < end)] - first)
    elif isinstance(data, StackDataset):
        for part in data.datasets.values() if isinstance(data.datasets, dict) else data.datasets:
            yield from _bases(part, rows)
    elif _is_arrow(data):
        indices = getattr(data, "_indices", None)  # into a table that a selection shares with the whole
        yield f"fingerprint {data._fingerprint}", rows
        yield data._data, rows if indices is None else np.asarray(indices.column(0).to_pylist(), dtype=np.int64)[rows]
    else:
        yield data, rows
        for held in _attributes(data).values() if isinstance(data, Dataset) else ():
            if (isinstance(held, Dataset) or _is_arrow(held)) and hasattr(held, "__len__") and len(held) == len(data):
                yield from _bases(held, rows)  # which another Dataset transforms


def _meet(one: Any, rows: _Rows, other: Any, other_rows: _Rows) -> bool:
    """Whether two bases have an example in common at these rows."""
    if (one is other or _equal(one, other)) and np.isin(rows, other_rows).any():
        return True
    if not _identities(one, rows).isdisjoint(_identities(other, other_rows)):
        return True
    theirs = [(space, start + stride * other_rows, length) for space, start, stride, length in _memory(other)]
    return any(
        space == their_space and _overlap(start + stride * rows, length, their_starts, their_length)
        for space, start, stride, length in _memory(one)
        for their_space, their_starts, their_length in theirs
    )


def _equal(one: Any, other: Any) -> bool:
    """Whether two Datasets have the same content, as one folder read with two transforms."""
    if isinstance(one, str):
        return one == other
    if type(one) is not type(other) or not isinstance(one, Dataset) or len(one) != len(other):  # type: ignore[arg-type]
        return False
    try:
        return data_digest(one) == data_digest(other)
    except InputError:
        return False  # the order of its examples cannot be seen


def _identities(base: Any, rows: _Rows) -> set[int]:
    """Of lists with an entry for each example: addresses of the entries, and of arrays in them, that no other entry has."""
    held = _attributes(base).values() if isinstance(base, Dataset) else [base]
    found: Counter[int] = Counter()
    for entries in (one for one in held if isinstance(one, list) and len(one) == len(base)):
        for entry in (entries[row] for row in rows):
            leaves = list(entry.values()) if isinstance(entry, dict) else list(entry) if isinstance(entry, tuple) else [entry]
            arrays = [leaf for leaf in leaves[:_FEW] if _is_array(leaf) and leaf.ndim]
            found.update(array.data_ptr() if isinstance(array, Tensor) else array.ctypes.data for array in arrays)
            if isinstance(entry, dict | list) or (hasattr(entry, "__dict__") and not callable(entry)):
                found[id(entry)] += 1
    return {address for address, count in found.items() if count == 1}


def _memory(base: Any) -> list[tuple[str, int, int, int]]:
    """Of each array with a row per example: device, where the first row begins, how far it is to the next, and its length."""
    if isinstance(base, Dataset):
        held: Any = base.tensors if isinstance(base, TensorDataset) else _attributes(base).values()
        arrays = [one for one in held if _is_array(one) and one.ndim and len(one) == len(base)]  # type: ignore[arg-type]
    else:
        parts = base.values() if isinstance(base, Mapping) else base if isinstance(base, tuple | list) else [base]
        held = list(parts)
        arrays = [one for one in held if _is_array(one) and one.ndim] if len(held) <= _FEW else []
    found = []
    for array in arrays:
        if isinstance(array, Tensor) and array.layout == torch.strided:
            item, start, device = array.element_size(), array.data_ptr(), str(array.device)
            strides = [stride * item for stride in array.stride()]
        elif isinstance(array, np.ndarray):
            item, start, device = array.itemsize, array.__array_interface__["data"][0], "cpu"
            strides = list(array.strides)
        else:
            continue
        length = item + sum((size - 1) * abs(stride) for size, stride in zip(array.shape[1:], strides[1:], strict=True))
        # Rows of a transposed matrix lie between each other, and are told apart by where they begin.
        found.append((device, start, strides[0], min(length, abs(strides[0])) or length))
    return found


def _overlap(starts: _Rows, length: int, other_starts: _Rows, other_length: int) -> bool:
    other_starts = np.sort(other_starts)
    before = np.searchsorted(other_starts, starts + length)  # how many of the others begin before a row ends
    return bool((other_starts[before[before > 0] - 1] + other_length > starts[before > 0]).any())


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _is_arrow(value: Any) -> bool:
    """Whether it is a Dataset of Hugging Face's ``datasets``."""
    return hasattr(value, "_fingerprint") and hasattr(value, "_data")


def _attributes(value: Any) -> Mapping[str, Any]:
    return getattr(value, "__dict__", {})


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

    Attributes are followed through containers, objects and Datasets; arrays above 256 MB are hashed at 4,096 rows, and Hugging
    Face Datasets by their fingerprint. Callables, generators of random numbers, locks, loggers and files are left out: they may
    differ where the data do not. The digest depends on private data; it is compared between ranks, and neither written nor
    shown.

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
    try:
        digest = content.of(data).hex()
    except (ValueError, RecursionError):  # objects that hold each other
        content.entries = -1
    if isinstance(data, Dataset) and len(data) > 1 and content.entries < len(data):  # type: ignore[arg-type]
        raise InputError(
            f"{type(data).__name__} has no attribute that distinguishes its examples, so several processes cannot verify that "
            "they have them in the same order; give it example_ids, a name or number for each example"
        )
    return digest


_WHOLE, _SAMPLE = 1 << 28, 4096
_SIMPLE = frozenset({str, bytes, int, float, bool, type(None)})
_VALUES = frozenset({"builtins", "collections", "datetime", "decimal", "enum", "fractions", "pathlib", "uuid"})
"""Standard modules whose objects are data; those of others are locks, loggers, generators, files."""


class _Content(pickle.Pickler):
    """Hashes values by what pickle would write of them; ``entries`` are how many examples that tells apart.

    What is not data is left out, and what pickle writes differently in each process, or at length, is replaced by a digest.
    """

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=32)
        self.entries = 0
        super().__init__(SimpleNamespace(write=self.hash.update), protocol=5)
        self.fast = True  # without references to what occurred before, which depend on identity

    def of(self, value: Any) -> bytes:
        """32 bytes."""
        self.dump(value)
        return self.hash.digest()

    def persistent_id(self, value: Any) -> Any:
        if type(value) in _SIMPLE:
            return None
        if isinstance(value, Dataset) or _is_arrow(value):
            if (ids := ids_of(value)) is not None:
                self.entries = max(self.entries, len(ids))
                return "ids", *ids
            if _is_arrow(value):
                self.entries = max(self.entries, len(value))
                return "fingerprint", str(value._fingerprint), len(value)
            return None
        if _is_array(value):
            return self._of_array(value)
        if isinstance(value, list | tuple | deque):
            self._note(list(value) if len(value) > self.entries else [])
            return None
        if isinstance(value, dict):
            self._note(list(value))
            self._note(list(value.values()))
            return None
        if isinstance(value, set | frozenset):
            return "set", *sorted(_Content().of(one) for one in value)
        module = type(value).__module__.partition(".")[0]
        aside = callable(value) or (module in sys.stdlib_module_names and module not in _VALUES)
        return "left out" if aside or isinstance(value, torch.Generator | np.random.Generator | torch.device) else None

    def reducer_override(self, value: Any) -> Any:
        try:
            return value.__reduce_ex__(5)
        except Exception:  # what cannot be pickled is no data
            return str, ("left out",)

    def _note(self, values: list[Any]) -> None:
        """Note a list if its entries tell more examples apart than others did; whole numbers may be classes, or tokens."""
        sample = values[:: max(1, len(values) // _SAMPLE)] if len(values) > self.entries else []
        if sample and all(isinstance(one, int | np.integer | type(None)) for one in sample):
            self.entries = max(self.entries, len(values) // 2)
        elif sample and 2 * len({_Content().of(one) for one in sample}) >= len(sample):
            self.entries = len(values)

    def _of_array(self, array: Any) -> Any:
        if isinstance(array, np.ndarray) and (array.dtype.hasobject or array.dtype.kind in "SU"):
            return array.dtype.str, array.shape, _Content().of(self._noted(array.reshape(-1).tolist()))
        described = f"{tuple(array.shape)} {array.dtype}"
        if isinstance(array, Tensor):
            array = array.detach().cpu().to_dense() if array.layout != torch.strided else array.detach().cpu()
            array = array.resolve_conj().resolve_neg().contiguous()
            array = array.view(torch.uint16).numpy() if array.dtype == torch.bfloat16 else array.numpy()
        if array.ndim > 1 and array[:1].size > 1:
            self.entries = max(self.entries, len(array))
        elif array.ndim and array.dtype.kind == "f":
            self._note(array.reshape(-1).tolist())
        elif array.ndim:
            self.entries = max(self.entries, len(array) // 2)
        if array.nbytes > _WHOLE:
            array = array[:: max(1, len(array) // _SAMPLE)]
        return described, hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=32).digest()

    def _noted(self, values: list[Any]) -> list[Any]:
        self._note(values)
        return values
