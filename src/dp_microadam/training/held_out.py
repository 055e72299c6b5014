"""Detects whether two datasets share examples, without comparing values, or users."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from enum import Enum
from pathlib import Path, PurePath
from types import GeneratorType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dp_microadam.errors import InputError
from dp_microadam.training.data_digest import content_digest
from dp_microadam.training.example_entries import (
    Entries,
    are_numbers,
    attributes_of,
    entries_of,
    ids_of,
    is_array,
    is_arrow,
    is_searched,
    of_objects,
    unwrapped,
)

__all__ = ["reads_examples", "refuse_shared_users", "share_examples", "unwrapped"]


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
    mine, theirs = ({str(each) for each in (ids.tolist() if is_array(ids) else ids)} for ids in (users, held_out))
    if not mine.isdisjoint(theirs):
        raise InputError(
            "a user has examples in the training data and in the held-out data, whose metrics would be private; the "
            "data must be divided by user"
        )


def share_examples(one: Any, other: Any) -> bool:
    """Whether two datasets visibly share examples.

    Shared examples are recognised by indices into the same Dataset, by memory (views of one tensor or of one memory-mapped
    file), by identical objects in lists, and by names: the same files in lists of files, or the same ``example_ids``, which
    alone decide if both datasets have them. Only attributes with one entry per example are compared, including those of nested
    Datasets; a common tokenizer, transform, list of class names or folder does not count.

    Copies are not recognised, nor are examples that code computes from something both datasets have.

    >>> from torch.utils.data import Subset
    >>> data = [[number] for number in range(10)]
    >>> share_examples(Subset(data, [0, 1]), Subset(data, [1, 2])), share_examples(Subset(data, [0, 1]), Subset(data, [2]))
    (True, False)
    >>> share_examples(data, data[:2]), share_examples(data[2:], data[:2])
    (True, False)
    >>> import torch
    >>> images = torch.zeros(10, 3)
    >>> share_examples((images,), images[5:6]), share_examples(images[::2], images[1::2])
    (True, False)
    """
    ids, other_ids = ids_of(one), ids_of(other)
    (base, positions), (other_base, other_positions) = unwrapped(one), unwrapped(other)
    if base is other_base:
        return positions is None or other_positions is None or not set(positions).isdisjoint(other_positions)
    if ids is not None and other_ids is not None and not (_count_up(base) and _count_up(other_base)):
        return not set(ids).isdisjoint(other_ids)
    (entries, arrays), (other_entries, other_arrays) = entries_of(one), entries_of(other)
    if not (entries or other_entries or arrays or other_arrays):
        return _name_one_source(base, other_base)
    mapped = _MappedFiles()
    mine, theirs = ([_Seen(each, mapped) for each in _once(found)] for found in (entries, other_entries))
    return any(each.meets(one) for each in mine for one in theirs) or _views_overlap(arrays, other_arrays, mapped)


def reads_examples(loader: Any, train: Any) -> bool:
    """Whether a loader of any type visibly reads examples of ``train``: data it holds, or a generator's variables, share some.

    >>> import torch
    >>> images = torch.zeros(10, 3)
    >>> loader = torch.utils.data.DataLoader(images[4:8])
    >>> reads_examples(loader, (images[:8],)), reads_examples(iter(loader), (images[:4],))
    (True, False)
    """
    return any(share_examples(train, data) for data in _held_by(loader, _DEPTH, set()))


_DEPTH, _FEW = 4, 64
"""How deep a loader is searched for data, and the longest list whose entries are searched too."""


def _held_by(value: Any, depth: int, entered: set[int]) -> Iterator[Any]:
    if depth == 0 or id(value) in entered or value is None or isinstance(value, _ATOMS):
        return
    entered.add(id(value))
    if isinstance(value, Dataset | list | tuple | Mapping) or is_array(value) or is_arrow(value):
        yield value
    if isinstance(value, Dataset) or is_array(value) or is_arrow(value):
        return
    if hasattr(value, "dataset"):
        inside: list[Any] = [value.dataset]
    elif isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple):
        inside = list(value) if len(value) <= _FEW else []
    elif isinstance(value, GeneratorType):
        inside = list(value.gi_frame.f_locals.values()) if value.gi_frame else []
    else:
        inside = [held for _, held in attributes_of(value)] if depth == _DEPTH or is_searched(value) else []
    for one in inside:
        yield from _held_by(one, depth - 1, entered)


def _count_up(data: Any) -> bool:
    """Whether ids are just 0, 1, 2 …, which different Datasets can have in common."""
    return all(place == each for place, each in enumerate(ids_of(data) or ()))


def _name_one_source(one: Any, other: Any) -> bool:
    """Whether two Datasets have only settings, these are equal, and they name a file or folder."""
    named = any(isinstance(value, str | bytes | PurePath) for _, value in attributes_of(one))
    alike = type(one) is type(other) and isinstance(one, Dataset) and named
    return alike and content_digest(one) == content_digest(other)


class _Seen:
    """What identifies the examples of one :class:`Entries`: their list, memory, objects and files."""

    def __init__(self, entries: Entries, mapped: _MappedFiles) -> None:
        self._entries = entries
        self._memory: list[_Memory] = []
        self._keys: dict[str, set[Hashable]] = {}
        values = entries.values
        if is_arrow(values):
            self._memory = [part for each in _arrow_memory(entries) for part in mapped.placed(each)]
        elif is_array(values) and not of_objects(values):
            self._memory = mapped.placed(_memory_of_rows(values, entries.rows))
        else:
            examples = list(values) if entries.rows is None else [values[row] for row in entries.rows]
            if any(map(_may_tell, examples[:: max(1, len(examples) // _SAMPLE)])):
                self._look_into(examples, mapped)

    def _look_into(self, examples: list[Any], mapped: _MappedFiles) -> None:
        found: dict[str, list[Hashable]] = {"object": [], "file": []}
        memory: list[Any] = []
        records: list[list[Any]] = []
        for example in examples:
            if type(example) is str:
                found["file"] += [example] if _names_a_file(example) else []
                continue
            leaves = (
                list(example) if type(example) is tuple and _SIMPLE.issuperset(map(type, example)) else list(_leaves(example))
            )
            memory += [leaf for leaf in leaves if is_array(leaf) and not of_objects(leaf) and leaf.ndim]
            files = [os.fsdecode(leaf) for leaf in leaves if _names_a_file(leaf)]
            found["file"] += files
            if files and len(leaves) > 1:
                records.append(leaves)
            # A tuple of numbers may be a constant that Python keeps once; dicts and lists are made for their examples.
            if isinstance(example, dict | list) or not all(isinstance(leaf, _ATOMS) for leaf in leaves):
                found["object"].append(id(example))
        place = _place_of(found["file"], self._entries.place)
        self._keys = {kind: _own(keys) for kind, keys in found.items()}
        self._keys["file"] = {_located(str(name), place) for name in self._keys["file"]}
        if not self._keys["file"]:  # frames of a film: the file and a number name the example
            simple = [leaves for leaves in records if all(isinstance(leaf, _ATOMS) for leaf in leaves)]
            texts = [tuple(os.fsdecode(one) if isinstance(one, bytes | PurePath) else one for one in each) for each in simple]
            self._keys["example"] = _own(list(texts))
        self._keys["example"] = {(place, key) for key in self._keys.get("example", ())}
        own = _own([_address(each) for each in memory])
        whole = _joined([_memory_of_rows(each[None], None) for each in memory if _address(each) in own])
        self._memory = [part for each in whole for part in mapped.placed(each)]

    def meets(self, other: _Seen) -> bool:
        mine, theirs = self._entries, other._entries
        if not (mine.known and theirs.known) and not (
            (mine.known and mine.rows is None) or (theirs.known and theirs.rows is None)
        ):
            return False  # both use some of the same entries, but which ones is unknown
        named = self._keys.get("file")  # in one list, but perhaps of two folders
        if mine.values is theirs.values and not is_array(mine.values) and not named:
            return _same_places(mine, theirs) and (is_arrow(mine.values) or Entries(mine.values).tell_examples_apart())
        return any(_overlap(each, one) for each in self._memory for one in other._memory) or any(
            not keys.isdisjoint(other._keys.get(kind, ())) for kind, keys in self._keys.items()
        )


def _same_places(one: Entries, other: Entries) -> bool:
    return one.rows is None or other.rows is None or bool(np.isin(one.rows, other.rows).any())


_ATOMS = (str, bytes, bool, int, float, complex, type(None), PurePath, Enum, np.generic, type)
"""Types of values that may be shared by many examples."""

_SIMPLE = frozenset({str, bytes, int, float, bool, type(None)})

_SAMPLE = 256
"""Number of examples of a sequence that are inspected to see whether they can identify examples."""


def _once(entries: list[Entries]) -> list[Entries]:
    """Remove duplicates: the same sequence may be held under several names."""
    return list({(id(each.values), id(each.rows), each.known, each.place): each for each in entries}.values())


def _may_tell(example: Any) -> bool:
    """Whether an entry can identify an example: it has its own memory or identity, or names a file."""
    if isinstance(example, _ATOMS):
        return _names_a_file(example)
    return isinstance(example, dict | list) or any(
        not isinstance(leaf, _ATOMS) or _names_a_file(leaf) for leaf in _leaves(example)
    )


_OFTEN = 4
"""A value that occurs more often does not identify an example: a class, a common mask, a film with many frames."""


def _own(keys: list[Hashable]) -> set[Hashable]:
    """The keys that belong to single examples; none if most of the sequence repeats."""
    counts = Counter(keys)
    return {key for key, count in counts.items() if count <= _OFTEN} if 2 * len(counts) >= len(keys) else set()


def _leaves(example: Any, depth: int = 4) -> Iterator[Any]:
    """The values in an example's entry, inside dicts, lists, tuples and objects."""
    if isinstance(example, _ATOMS) or is_array(example) or depth == 0:
        yield example
    elif isinstance(example, Mapping):
        for value in example.values():
            if isinstance(value, _ATOMS):
                yield value
            else:
                yield from _leaves(value, depth - 1)
    elif isinstance(example, list | tuple):
        for value in example[:1] if are_numbers(example) else example:
            if isinstance(value, _ATOMS):
                yield value
            else:
                yield from _leaves(value, depth - 1)
    elif is_searched(example):
        for _, value in attributes_of(example):
            yield from _leaves(value, depth - 1)
    else:
        yield example


def _names_a_file(value: Any) -> bool:
    """Whether it is a path, or a string with a file extension and without spaces (spaces are allowed if it has folders)."""
    if isinstance(value, PurePath):
        return True
    if not isinstance(value, str | bytes) or len(value) > _LONGEST_NAME:
        return False
    name, _, ending = (value if isinstance(value, str) else os.fsdecode(value)).rpartition(".")
    if not (name and 0 < len(ending) <= _LONGEST_ENDING and ending.isascii() and ending.isalnum() and ending[0].isalpha()):
        return False
    return "/" in name or len(name.split(maxsplit=1)) == 1


_LONGEST_NAME, _LONGEST_ENDING = 4096, 8


def _place_of(names: list[Hashable], place: tuple[tuple[str, str], ...]) -> Hashable:
    """What relative file names are relative to: a folder that contains them, otherwise all strings next to them."""
    first = next((str(name) for name in names if not os.path.isabs(str(name))), None)
    if first is None:
        return ""
    folders = [text for _, text in place if "\0" not in text] + [""]
    return next((os.path.realpath(folder) for folder in folders if os.path.lexists(Path(folder, first))), place)


def _located(name: str, place: Hashable) -> Hashable:
    if os.path.isabs(name):
        return os.path.normpath(name) if "//" in name or "/." in name else name
    return os.path.normpath(os.path.join(place, name)) if isinstance(place, str) else (place, os.path.normpath(name))


_Memory = tuple[Hashable, NDArray[np.int64], NDArray[np.int64]]
"""Address space (a device, or a file that is mapped into memory), and first bytes and ends of what examples occupy there."""

_NOTHING = np.zeros(0, dtype=np.int64)


def _memory_of_rows(array: Any, rows: NDArray[np.int64] | None) -> _Memory:
    if not array.ndim or 0 in array.shape or (isinstance(array, Tensor) and str(array.layout) != "torch.strided"):
        return "cpu", _NOTHING, _NOTHING
    rows = np.arange(len(array)) if rows is None else rows
    strides = [stride * _item(array) for stride in array.stride()] if isinstance(array, Tensor) else list(array.strides)
    starts = _address(array) + rows * strides[0]
    reach = sum((size - 1) * abs(stride) for size, stride in zip(array.shape[1:], strides[1:], strict=True)) + _item(array)
    numbers = int(np.prod(array.shape[1:], dtype=np.int64))
    if reach > abs(strides[0]) and len(rows) * numbers <= _NUMBERS:  # rows lie between each other, as in a transposed matrix
        for size, stride in zip(array.shape[1:], strides[1:], strict=True):
            starts = (starts[:, None] + np.arange(size) * stride).reshape(-1)
        reach = _item(array)
    else:
        starts = starts + sum((size - 1) * min(stride, 0) for size, stride in zip(array.shape[1:], strides[1:], strict=True))
    return _device(array), starts, starts + reach


_NUMBERS = 1 << 24
"""Numbers of an array whose addresses are compared one by one."""


def _item(array: Any) -> int:
    return int(array.element_size() if isinstance(array, Tensor) else array.itemsize)


def _address(array: Any) -> int:
    return int(array.data_ptr() if isinstance(array, Tensor) else array.__array_interface__["data"][0])


def _device(array: Any) -> Hashable:
    return str(array.device) if isinstance(array, Tensor) else "cpu"


def _arrow_memory(entries: Entries) -> Iterator[_Memory]:
    """The memory of an Arrow table's rows, column by column: of the values, or for strings and lists of their offsets."""
    for column in entries.values._data.table.columns:
        first = 0
        for chunk in column.chunks:
            rows = np.arange(len(chunk))
            if entries.rows is not None:
                rows = entries.rows[(entries.rows >= first) & (entries.rows < first + len(chunk))] - first
            first += len(chunk)
            buffers = chunk.buffers()
            try:
                width = chunk.type.bit_width // 8
            except ValueError:
                width = 8 if str(chunk.type).startswith("large") else 4
            if width and len(buffers) > 1 and buffers[1] is not None:
                starts = buffers[1].address + (chunk.offset + rows) * width
                yield "cpu", starts, starts + width


def _joined(memory: list[_Memory]) -> list[_Memory]:
    spaces = {space for space, _, _ in memory}
    return [
        (
            space,
            np.concatenate([starts for one, starts, _ in memory if one == space]),
            np.concatenate([ends for one, _, ends in memory if one == space]),
        )
        for space in spaces
    ]


def _overlap(one: _Memory, other: _Memory) -> bool:
    (space, starts, ends), (other_space, other_starts, other_ends) = one, other
    if space != other_space or not len(starts) or not len(other_starts):
        return False
    order = np.argsort(other_starts)
    furthest = np.maximum.accumulate(other_ends[order])  # by all that begin no later
    before = np.searchsorted(other_starts[order], ends)
    return bool((furthest[np.maximum(before - 1, 0)] > starts)[before > 0].any())


def _views_overlap(arrays: list[Any], others: list[Any], mapped: _MappedFiles) -> bool:
    """Whether arrays that Datasets cut into examples are different, overlapping parts of one array.

    Identical parts say nothing: they may be a table of constants, or be cut into examples differently.
    """
    places = [(_whole(array), mapped.placed(_whole(array))) for array in arrays if not of_objects(array)]
    other_places = [(_whole(array), mapped.placed(_whole(array))) for array in others if not of_objects(array)]
    return any(
        _overlap(mine, theirs)
        for (_, start, end), found in places
        for (_, other_start, other_end), all_found in other_places
        if not (np.array_equal(start, other_start) and np.array_equal(end, other_end))
        for mine in found
        for theirs in all_found
    )


def _whole(array: Any) -> _Memory:
    space, starts, ends = _memory_of_rows(array, np.array([0, len(array) - 1]))
    return (space, starts.min(keepdims=True), ends.max(keepdims=True)) if len(starts) else (space, starts, ends)


class _MappedFiles:
    """Memory-mapped files of this process, with which two maps of one file are recognised as the same."""

    def __init__(self) -> None:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines() if _MAPS.is_file() else []
        fields = [line.split(maxsplit=5) for line in lines]
        found = [(one[0].split("-"), one[2], (one[3], one[4])) for one in fields if len(one) > 5 and one[4] != "0"]
        self._starts = np.array([int(bounds[0], 16) for bounds, _, _ in found if int(bounds[1], 16) < 1 << 63], dtype=np.int64)
        self._ends = np.array([int(bounds[1], 16) for bounds, _, _ in found if int(bounds[1], 16) < 1 << 63], dtype=np.int64)
        self._offsets = np.array([int(offset, 16) for _, offset, _ in found], dtype=np.int64)[: len(self._starts)]
        self._files = [file for _, _, file in found]

    def placed(self, memory: _Memory) -> list[_Memory]:
        """The same memory, with addresses in mapped files replaced by file and offset."""
        space, starts, ends = memory
        if space != "cpu" or not len(self._starts) or not len(starts):
            return [memory]
        which = np.searchsorted(self._starts, starts, side="right") - 1
        inside = (which >= 0) & (starts < self._ends[np.maximum(which, 0)])
        result: list[_Memory] = [(space, starts[~inside], ends[~inside])]
        for each in np.unique(which[inside]):
            here = inside & (which == each)
            moved = int(self._offsets[each] - self._starts[each])
            result.append((self._files[each], starts[here] + moved, ends[here] + moved))
        return result


_MAPS = Path("/proc/self/maps")
"""Linux' list of mapped files; on other systems two maps of one file count as different data."""
