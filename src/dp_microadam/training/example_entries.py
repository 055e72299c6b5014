"""Finds the attributes of a Dataset that have one entry per example: rows of tensors, file names, records.

``data_digest.py`` uses them to verify the order of examples, ``held_out.py`` to find examples that two Datasets share. Only
attributes are read, through Subsets, ConcatDatasets and nested Datasets; no example is fetched.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from dp_microadam.errors import InputError

Rows = NDArray[np.int64]

_FEW = 64
"""Longer containers have one entry per example, if anything, and are not searched for nested containers."""

_LONG = 16
"""A longer list of numbers is the content of an example rather than an index."""

_DEPTH = 6
"""How deep nested attributes are searched."""

_SAMPLE = 4096
"""Number of entries, evenly spread, that are inspected to classify a sequence."""

_MODULES_WITHOUT_EXAMPLES = """
_asyncio _io _queue _random _thread asyncio concurrent io logging multiprocessing queue random socket sqlite3 threading weakref
"""
_WITHOUT_EXAMPLES = frozenset(_MODULES_WITHOUT_EXAMPLES.split())
"""Standard modules whose objects (locks, loggers, generators, handles) do not determine the order of examples."""


@dataclass(frozen=True, eq=False)
class Entries:
    """A sequence with one entry for each example of a Dataset.

    ``rows`` maps examples to entries; None means that entry i belongs to example i. If ``known`` is False, the Dataset uses
    some of the entries, but which ones is unknown. ``place`` are the strings next to it in its Dataset, such as the folder
    that file names are relative to.
    """

    values: Any
    rows: Rows | None = None
    known: bool = True
    place: tuple[tuple[str, str], ...] = ()

    def at(self, rows: Rows | None, known: bool = True) -> Entries:
        """The entries of the examples at ``rows``."""
        if rows is not None:
            rows = rows if self.rows is None else self.rows[rows]
        return Entries(self.values, self.rows if rows is None else rows, self.known and known, self.place)

    def tell_examples_apart(self) -> bool:
        """Whether a different order of examples would be noticed: entries are more than indices or classes, and most differ."""
        count = len(self.values) if self.rows is None else len(self.rows)
        if is_arrow(self.values):
            return True  # it has a fingerprint
        if is_array(self.values) and not of_objects(self.values):
            if self.values.ndim > 1:
                return bool(self.values[:1].reshape(-1).shape[0] > 1)
            if _of_whole_numbers(self.values):
                return False
        if not count:
            return False
        sample = np.unique(np.linspace(0, count - 1, min(count, _SAMPLE)).astype(np.int64))
        found = [self.values[int(place if self.rows is None else self.rows[place])] for place in sample]
        if not any(map(_is_telling, found)):
            return False  # positions, or classes
        return len({_key(entry) for entry in found}) >= (len(found) + 1) // 2


def unwrapped(data: Any) -> tuple[Any, list[int] | None]:
    """The Dataset under nested Subsets, and the indices they select; None for all."""
    positions: list[int] | None = None
    while isinstance(data, Subset) and own_ids(data) is None:
        own = [int(index) for index in data.indices]
        positions = own if positions is None else [own[position] for position in positions]
        data = data.dataset
    return data, positions


def own_ids(data: Any) -> list[Any] | None:
    """``data.example_ids``, an attribute or a method, as a list; None if there is none.

    Raises:
        InputError: if they are not one name or number for each example.
    """
    kind = type(data).__name__
    if not (isinstance(data, Dataset) or is_arrow(data)) or not hasattr(data, "example_ids"):
        return None
    ids = data.example_ids() if callable(data.example_ids) else data.example_ids
    if isinstance(ids, Tensor | np.ndarray):
        ids = ids.tolist()
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise InputError(f"example_ids of {kind} is a {type(ids).__name__}; it must be a sequence of names or integers")
    if len(ids) != len(data):
        raise InputError(f"example_ids of {kind} has {len(ids)} entries for {len(data)} examples; it must have one for each")
    wrong = next((one for one in ids if not isinstance(one, str | bytes | int | np.integer | PurePath)), None)
    if wrong is not None:
        raise InputError(f"example_ids of {kind} contains a {type(wrong).__name__}; it must contain names or integers")
    return [os.fspath(one) if isinstance(one, PurePath) else int(one) if isinstance(one, np.integer) else one for one in ids]


def ids_of(data: Any) -> list[Any] | None:
    """The ids of the examples of ``data``, through Subsets and ConcatDatasets; None if some have none."""
    base, positions = unwrapped(data)
    ids = own_ids(base)
    if ids is None and isinstance(base, ConcatDataset):
        parts = [ids_of(part) for part in base.datasets]
        ids = None if any(part is None for part in parts) else [one for part in parts if part for one in part]
    return ids if ids is None or positions is None else [ids[position] for position in positions]


def entries_of(data: Any) -> tuple[list[Entries], list[Any]]:
    """The sequences of ``data`` with one entry per example, and its other arrays with at least as many rows as examples."""
    search = _Search()
    return search.of(data), search.other_arrays


class _Search:
    """One search through a Dataset; ``other_arrays`` are arrays that do not have one row per example."""

    def __init__(self) -> None:
        self.other_arrays: list[Any] = []
        self._entered: set[int] = set()

    def of(self, data: Any) -> list[Entries]:
        base, positions = unwrapped(data)
        rows = None if positions is None else np.asarray(positions, dtype=np.int64)
        return [entries.at(rows) for entries in self._of_base(base)]

    def _of_base(self, data: Any) -> list[Entries]:
        if is_array(data) or isinstance(data, list | deque):
            return [Entries(data)]
        if isinstance(data, Mapping):
            return [Entries(value) for value in data.values() if is_array(value) or isinstance(value, list | tuple)]
        if isinstance(data, tuple):
            return [Entries(value) for value in data] if all(map(is_array, data)) else [Entries(data)]
        if is_arrow(data):
            return [Entries(data).at(_arrow_positions(data))]
        if isinstance(data, ConcatDataset):
            return [entries for part in data.datasets for entries in self.of(part)]
        if isinstance(data, StackDataset):
            parts = data.datasets.values() if isinstance(data.datasets, dict) else data.datasets
            return [entries for part in parts for entries in self.of(part)]
        return [] if id(data) in self._entered else self._of_object(data)

    def _of_object(self, data: Any) -> list[Entries]:
        self._entered.add(id(data))
        count = len(data) if hasattr(data, "__len__") else -1
        attributes = attributes_of(data)
        place = tuple(sorted((name, _text(value)) for name, value in attributes if isinstance(value, str | bytes | PurePath)))
        held = [found for _, value in attributes for found in self._sequences(value, _DEPTH)]
        candidates = [values for values in held if not isinstance(values, _Inner | _Joined) and len(values) == count]
        positions = [rows for rows in map(_positions, candidates) if rows is not None]
        result = []
        for values in held:
            if isinstance(values, _Joined):
                result += [entries for rows in _selections(len(values), count, positions) for entries in values.parts(rows)]
            elif isinstance(values, _Inner):
                inner = self.of(values.data)
                selections = _selections(len(values.data), count, positions)
                result += [entries.at(rows) for rows in selections for entries in inner]
                result += [] if selections else [entries.at(None, known=False) for entries in inner]
            else:
                selections = _selections(len(values), count, positions)
                result += [Entries(values, rows) for rows in selections]
                if not selections and is_array(values) and len(values) >= count:
                    self.other_arrays.append(values)
        return [entries if entries.place else Entries(entries.values, entries.rows, entries.known, place) for entries in result]

    def _sequences(self, value: Any, depth: int) -> Iterator[Any]:
        """Sequences and Datasets in an attribute, or in its own attributes."""
        if depth == 0 or value is None or isinstance(value, str | bytes | int | float | PurePath):
            return
        if is_array(value):
            if value.ndim:
                yield value
        elif is_table(value):
            for column in value.columns if hasattr(value, "columns") else [None]:
                yield (value if column is None else value[column]).to_numpy()
        elif isinstance(value, list | tuple | deque | range):
            yield value
            if len(value) <= _FEW:
                inside: list[Any] = list(value)
                if len(inside) > 1 and all(is_array(one) and one.ndim for one in inside):
                    yield _Joined(inside)
                for one in inside:
                    yield from self._sequences(one, depth - 1)
        elif isinstance(value, Mapping):
            yield from (list(value), list(value.values()))
            if len(value) <= _FEW:
                for one in value.values():
                    yield from self._sequences(one, depth - 1)
        elif isinstance(value, Dataset) or is_arrow(value):
            if hasattr(value, "__len__"):
                yield _Inner(value)
        elif is_searched(value) and id(value) not in self._entered:
            self._entered.add(id(value))
            for _, one in attributes_of(value):
                yield from self._sequences(one, depth - 1)


class _Inner:
    """A Dataset inside another."""

    def __init__(self, data: Any) -> None:
        self.data = data


class _Joined:
    """Several arrays, concatenated."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._arrays = arrays
        self._ends = np.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def parts(self, rows: Rows | None) -> Iterator[Entries]:
        for array, end in zip(self._arrays, self._ends, strict=True):
            inside = None if rows is None else rows[(rows >= end - len(array)) & (rows < end)] - (end - len(array))
            yield Entries(array, inside)


def attributes_of(value: Any) -> list[tuple[str, Any]]:
    """Names and values of an object's attributes, including those in ``__slots__``."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{kind.__name__.lstrip('_')}{name}"
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return list(found.items())


def is_searched(value: Any) -> bool:
    """Whether the attributes of ``value`` may determine which examples there are.

    Those of callables (transforms, tokenizers, functions, classes) do not, nor do those of locks, loggers, random generators
    and open files.
    """
    if isinstance(value, Dataset):
        return True
    kind = type(value)
    return not (callable(value) or kind.__module__.partition(".")[0] in _WITHOUT_EXAMPLES) and bool(attributes_of(value))


def is_table(value: Any) -> bool:
    """Whether it is a pandas DataFrame or Series, or has the same interface."""
    return hasattr(value, "iloc") and hasattr(value, "to_numpy")


def is_arrow(value: Any) -> bool:
    """Whether it is a Dataset of Hugging Face's ``datasets``: an Arrow table, and optionally indices into it."""
    return hasattr(value, "_fingerprint") and hasattr(getattr(value, "_data", None), "table")


def _arrow_positions(data: Any) -> Rows | None:
    indices = getattr(data, "_indices", None)
    return None if indices is None else np.asarray(indices.column(0).to_pylist(), dtype=np.int64)


def is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def of_objects(array: Any) -> bool:
    """Whether the entries of an array are Python objects or strings rather than numbers."""
    return isinstance(array, np.ndarray) and (array.dtype.hasobject or array.dtype.kind in "SU")


def _of_whole_numbers(array: Any) -> bool:
    if isinstance(array, Tensor):
        return not (array.is_floating_point() or array.is_complex())
    return bool(array.dtype.kind in "biu")


def _selections(length: int, count: int, positions: list[Rows]) -> list[Rows | None]:
    """How ``count`` examples index into ``length`` entries: one each, or by ``positions``; empty if unknown."""
    if length == count:
        return [None]
    fitting = [rows for rows in positions if length > count and int(rows.max(initial=0)) < length]
    # Small indices fit any sequence; those with the largest maximum were made for this one.
    return [max(fitting, key=lambda rows: int(rows.max(initial=0)))] if fitting else []


def _positions(values: Any) -> Rows | None:
    """``values`` as indices: distinct integers of at least 0; None if they are something else."""
    if isinstance(values, Tensor):
        if values.dim() != 1 or values.is_floating_point() or values.is_complex():
            return None
        values = values.detach().cpu().numpy()
    if not isinstance(values, np.ndarray):
        if not all(kind is int or issubclass(kind, np.integer) for kind in set(map(type, values))):
            return None
        try:
            values = np.asarray(values, dtype=np.int64)
        except OverflowError:
            return None
    if values.ndim != 1 or values.dtype.kind not in "iu" or not len(values) or values.min() < 0:
        return None
    return values.astype(np.int64) if len(np.unique(values)) == len(values) else None


def _is_telling(entry: Any, depth: int = _DEPTH) -> bool:
    """Whether an entry is more than an index or a class: a string, a float, or several numbers in an array."""
    if depth == 0 or entry is None or isinstance(entry, bool | int | np.integer):
        return False
    if isinstance(entry, str | bytes | PurePath | float | np.floating):
        return True
    if is_array(entry):
        return entry.reshape(-1).shape[0] > 1 or not _of_whole_numbers(entry)
    if are_numbers(entry):
        return True
    return any(_is_telling(value, depth - 1) for value in _inside(entry))


def _key(entry: Any, depth: int = _DEPTH) -> Any:
    """A hashable key that differs for most entries that differ."""
    if isinstance(entry, str | bytes | int | float | PurePath | np.generic):
        return entry
    if isinstance(entry, Tensor):
        return tuple(entry.detach().reshape(-1)[:_FEW].tolist())
    if isinstance(entry, np.ndarray):
        return entry.reshape(-1)[:_FEW].tobytes()
    return tuple(_key(value, depth - 1) for value in _inside(entry)) if depth else None


def are_numbers(entry: Any) -> bool:
    """Whether an entry is a long list of numbers, such as tokens or pixels."""
    return isinstance(entry, list | tuple) and len(entry) > _LONG and type(entry[0]) in (int, float)


def _inside(entry: Any) -> list[Any]:
    if isinstance(entry, Mapping):
        return list(entry.values())
    if isinstance(entry, list | tuple):
        return list(entry)
    return [value for _, value in attributes_of(entry)] if is_searched(entry) else []


def _text(value: str | bytes | PurePath) -> str:
    return os.fsdecode(value)
