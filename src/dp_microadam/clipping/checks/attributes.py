"""Compares plain Python attributes of modules, in which a model may keep examples from one batch to the next.

``state.py`` covers what a checkpoint holds. Anything else that a module stores, in a tensor, a list or an object of its
own, is harmless if it does not depend on examples (a cache of positions). An attribute that still depends on examples after
another batch has passed, such as a queue of features, lets an example influence the gradients of steps it is not part of.
One that the next batch overwrites (the last attention map) does not, but whoever gets the model would get the last batch of
the training data with it.

Formal guarantees: after :func:`put_back_tensors` tensors and arrays that plain attributes hold, themselves or in a list,
deque or dict of up to 1,024 entries, are those of before, unless the independence check found them to depend neither on
examples nor on their number. Numbers and strings are left as they are, since a counter has to go on, and so are attributes
of objects that are no modules.
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

_SIMPLE = (int, float, str, tuple, type(None))
_MISSING = object()

# A vocabulary is not copied for every chunk of a batch.
_LARGEST_CONTAINER = 1024

# How deep objects in a module's attribute are searched.
_DEPTH = 4


def copy_of(model: nn.Module, *, share_state: bool = False) -> nn.Module:
    """A copy of the model with attributes of its own; with ``share_state`` it has the original's parameters and buffers."""
    kept: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if share_state}
    for module in model.modules():
        for leaf in tree_leaves([value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE]):
            if isinstance(leaf, Tensor) and not leaf.is_leaf:  # torch refuses to copy it with its graph
                kept[id(leaf)] = leaf.detach().clone()
    return copy.deepcopy(model, kept)


def plain_attributes(model: nn.Module, *, copied: bool = False) -> dict[str, list[Any]]:
    """The tensors, numbers and strings in each plain attribute, by the attribute's name; copies of them on request."""
    return {
        f"{name}.{key}" if name else key: [_copy(item) if copied else item for item in _contents(value, _DEPTH)]
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _OF_EVERY_MODULE
    }


def differing(one: Mapping[str, list[Any]], other: Mapping[str, list[Any]]) -> set[str]:
    """The names of attributes that differ; numbers are compared up to rounding."""
    return {
        name
        for name in one.keys() | other.keys()
        if len(one.get(name, ())) != len(other.get(name, ())) or not all(map(_agree, one.get(name, ()), other.get(name, ())))
    }


def holds_tensors(values: Iterable[Any]) -> bool:
    """Whether a tensor or array is among these values, or inside one."""
    return any(isinstance(item, Tensor | np.ndarray) for value in values for item in _contents(value, _DEPTH))


@contextmanager
def put_back_tensors(model: nn.Module, caches: Set[str]) -> Iterator[None]:
    """Put tensors in plain attributes of modules back on exit, also after an error, except in those named ``caches``."""
    before = [
        _Attributes(vars(module), {key for key in vars(module) if f"{name}.{key}".lstrip(".") in caches} if caches else caches)
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for attributes in before:
            attributes.put_back()


class _Attributes:
    """The plain attributes of one module, with shallow copies of containers and copies of tensors."""

    def __init__(self, attributes: dict[str, Any], caches: Set[str]) -> None:
        self._now = attributes
        self._caches = caches
        self._before = attributes.copy()
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        for key, value in attributes.items():
            if key in _OF_EVERY_MODULE or isinstance(value, _SIMPLE) or key in caches:
                continue
            if isinstance(value, Tensor) and not value.is_inference():
                self._tensors.append((value, value._version, value.detach().clone()))
            elif isinstance(value, list | dict | deque) and len(value) <= _LARGEST_CONTAINER:
                self._containers.append((value, dict(value) if isinstance(value, dict) else list(value)))

    def put_back(self) -> None:
        changed = [key for key, value in self._now.items() if self._before.get(key, _MISSING) is not value]
        for key in changed:
            if key not in _OF_EVERY_MODULE and key not in self._caches and holds_tensors([self._now[key]]):
                _set_or_delete(self._now, key, self._before.get(key, _MISSING))
        for container, entries in self._containers:
            if isinstance(container, dict):
                for key, value in list(container.items()):
                    if value is not entries.get(key, _MISSING) and holds_tensors([value]):
                        _set_or_delete(container, key, entries.get(key, _MISSING))
            elif len(container) != len(entries) or any(map(operator.is_not, container, entries)):
                known = {id(entry) for entry in entries}
                if holds_tensors(entry for entry in container if id(entry) not in known):
                    container.clear()
                    container.extend(entries)
        for tensor, version, value in self._tensors:
            if tensor._version != version:
                tensor.detach().copy_(value)


def _copy(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, Tensor) else item.copy() if isinstance(item, np.ndarray) else item


def _set_or_delete(values: dict[Any, Any], key: Any, value: Any) -> None:
    if value is _MISSING:
        del values[key]
    else:
        values[key] = value


def _contents(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, Tensor | np.ndarray | int | float | complex | str | bytes) or value is None:
        yield value
    elif depth == 0 or isinstance(value, nn.Module | FunctionType | ModuleType | type):
        return
    elif isinstance(value, Mapping):
        for key in list(value):
            yield from _contents(key, depth - 1)
            yield from _contents(value[key], depth - 1)
    elif isinstance(value, Set):
        yield from sorted(map(repr, value))
    elif isinstance(value, list | tuple | deque):
        for item in list(value):
            yield from _contents(item, depth - 1)
    elif hasattr(value, "__dict__"):
        yield from _contents(vars(value), depth - 1)


def _agree(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, float | complex | np.ndarray):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
    if isinstance(one, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        one, other = one.detach(), other.detach()
        if not (one.is_floating_point() or one.is_complex()):
            return torch.equal(one, other)
        eps = torch.finfo(one.dtype).eps
        return torch.allclose(one, other, rtol=100 * eps, atol=eps, equal_nan=True)
    return bool(one == other)
