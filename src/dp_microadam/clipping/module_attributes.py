"""Compares plain Python attributes of modules, in which a model may keep examples from one batch to the next.

``model_state.py`` covers what a checkpoint holds. Anything else that a module stores, in a tensor, a list or an object of its
own, is harmless if it does not depend on examples (a cache of positions), or is overwritten by the next batch before it is
used (the last attention map). An attribute that still depends on examples after another batch has passed, such as a queue of
features, lets an example influence the gradients of steps it is not part of.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Set
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

# How deep objects in a module's attribute are searched.
_DEPTH = 4


def copy_with_own_attributes(model: nn.Module) -> nn.Module:
    """A copy of the model with attributes of its own, which shares parameters and buffers with the original."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for leaf in tree_leaves([value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE]):
            if isinstance(leaf, Tensor) and not leaf.is_leaf:  # torch refuses to copy it with its graph
                shared[id(leaf)] = leaf.detach().clone()
    return copy.deepcopy(model, shared)


def plain_attributes(model: nn.Module) -> dict[str, list[Any]]:
    """The tensors, numbers and strings in each plain attribute, by the attribute's name."""
    return {
        f"{name}.{key}" if name else key: list(_contents(value, _DEPTH))
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
