"""Detects changes of a model's state (parameters, buffers, extra state) while examples pass through it.

Such a change would put information about examples into checkpoints without noise.

Formal guarantees: a pass through the model inside :func:`refuse_state_changes` leaves buffers, parameters and extra
state as they were, or is refused and undone before its result is used. Buffers, and parameters of up to 65,536
numbers, are compared by value. Larger parameters are compared by autograd's version counter and address, and are
refused but not restored. A write through ``.data`` escapes the counter: such writes are found by the independence check
(``independence.py``), which compares all values, if they happen on synthetic examples too. Plain Python attributes are not
part of a ``state_dict``: they are checked on synthetic examples, and tensors in them are put back (``module_attributes.py``).
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dp_microadam.errors import InputError

# A frozen backbone is not copied for every chunk of a batch.
_LARGE = 65_536


class StateSnapshot:
    """A snapshot of a model's parameters, buffers and extra state."""

    def __init__(self, model: nn.Module, *, copy_large: bool) -> None:
        self._slots: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = []
        self._marks: dict[int, tuple[Any, ...]] = {}
        self._copies: dict[int, Tensor] = {}
        self._extra = _extra_state(model)
        for name, module in model.named_modules():
            for kind, slots in (("parameter", module._parameters), ("buffer", module._buffers)):
                self._slots.append((kind, f"{name}." if name else "", slots, dict(slots)))
                for tensor in slots.values():
                    if tensor is not None and id(tensor) not in self._marks:
                        self._marks[id(tensor)] = _mark(tensor)
                        if copy_large or kind == "buffer" or tensor.numel() <= _LARGE:
                            self._copies[id(tensor)] = tensor.detach().clone()
        self._model = model

    def changed(self) -> str | None:
        """The kind and name of the first tensor or extra state that differs from the snapshot, or None."""
        for kind, prefix, slots, before in self._slots:
            for key in before.keys() | slots.keys():
                if self._differs(before.get(key), slots.get(key)):
                    return f"{kind} {prefix + key!r}"
        for name, (_, value) in _extra_state(self._model).items():
            if name not in self._extra or not _same(self._extra[name][1], value):
                return f"extra state of module {name!r}"
        return None

    def restore(self) -> None:
        """Restore everything of which the snapshot has a copy."""
        for _, _, slots, before in self._slots:
            if any(slots.get(key) is not tensor for key, tensor in before.items()) or slots.keys() != before.keys():
                slots.clear()
                slots.update(before)
            with torch.no_grad():
                for tensor in before.values():
                    if id(tensor) in self._copies and not _same(tensor, self._copies[id(tensor)]):
                        tensor.copy_(self._copies[id(tensor)])
        now = _extra_state(self._model)
        for name, (module, value) in self._extra.items():
            settable = type(module).set_extra_state is not nn.Module.set_extra_state
            if settable and not (name in now and _same(now[name][1], value)):
                module.set_extra_state(copy.deepcopy(value))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise :class:`InputError` if the state changes inside; restores it then, and on other errors too."""
        try:
            yield
            changed = self.changed()
            if changed is not None:
                raise InputError(
                    f"{changed} changes while examples pass through the model, so that checkpoints would reveal what it "
                    "saw (or how many examples or chunks there were) without noise; use a layer that keeps no "
                    "statistics, or call its eval()"
                )
        except BaseException:
            self.restore()
            raise

    def _differs(self, before: Tensor | None, now: Tensor | None) -> bool:
        if before is None or now is None:
            return before is not now
        if id(before) in self._copies:
            return not _same(self._copies[id(before)], now)
        return now is not before or _mark(now) != self._marks[id(before)]


def refuse_state_changes(model: nn.Module) -> AbstractContextManager[None]:
    """Context manager that raises :class:`InputError` if the model's state changes inside, and restores the state then."""
    return StateSnapshot(model, copy_large=False).unchanged()


def _mark(tensor: Tensor) -> tuple[Any, ...]:
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.shape, tensor.dtype


def _extra_state(model: nn.Module) -> dict[str, tuple[nn.Module, Any]]:
    return {
        name: (module, copy.deepcopy(module.get_extra_state()))
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _same(one: Any, other: Any) -> bool:
    """Equal in structure and in every value, NaN included."""
    leaves, structure = tree_flatten(one)
    other_leaves, other_structure = tree_flatten(other)
    return structure == other_structure and all(map(_same_leaf, leaves, other_leaves))


def _same_leaf(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and pickle.dumps(one) == pickle.dumps(other)
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
