"""Detects changes of a model's state (parameters, buffers, extra state) while examples pass through it.

Such a change would put information about examples into checkpoints without noise.

Formal guarantees: a pass through the model inside :meth:`StateSnapshot.unchanged` leaves buffers, parameters and extra
state as they were, or is refused before its result is used. Buffers and extra state are compared by value and restored.
Parameters are compared by autograd's version counter and address: they are refused, but not restored. A write through
``.data`` escapes the counter: such writes are found by the independence check (``independence.py``), which compares all
values at its end, if they happen on synthetic examples too. Plain Python attributes are not part of a ``state_dict``: they
are checked on synthetic examples, and tensors in them are put back (``attributes.py``).
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dp_microadam.errors import InputError


class StateSnapshot:
    """A snapshot of a model's parameters, buffers and extra state."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._extra = _extra_state(model)
        self._parameters: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._buffers: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            if module._parameters:
                marks = {key: _mark(value) for key, value in module._parameters.items()}
                self._parameters.append((prefix, module._parameters, module._parameters.copy(), marks))
            if module._buffers:
                copies = {key: _copy(value) for key, value in module._buffers.items()}
                self._buffers.append((prefix, module._buffers, module._buffers.copy(), copies))

    def altered(self) -> Tensor:
        """Whether anything differs from the snapshot; stays on the device, so that nothing waits before it is read."""
        if self._changed_parameter() is not None or self._extra_changed() is not None:
            return torch.tensor(True)
        flags = []
        for _, now, before, copies in self._buffers:
            for key in now.keys() | before.keys():
                old, new = copies.get(key), now.get(key)
                if not _comparable(old, new):
                    if not _same(old, new):
                        return torch.tensor(True)
                elif new is not None and old is not None:
                    flags.append((_bits(new) != _bits(old)).any())
        if not flags:
            return torch.tensor(False)
        return torch.stack([flag.to(flags[0].device, non_blocking=True) for flag in flags]).any()

    def refuse_changes(self) -> None:
        """Raise :class:`InputError` if anything differs from the snapshot."""
        changed = self._changed()
        if changed is not None:
            raise InputError(
                f"{changed} changes while examples pass through the model, so that checkpoints would reveal what it "
                "saw (or how many examples or chunks there were) without noise; use a layer that keeps no "
                "statistics, or call its eval()"
            )

    def restore(self) -> None:
        """Restore everything of which the snapshot has a copy."""
        for _, now, before, _ in (*self._parameters, *self._buffers):
            if now.keys() != before.keys() or any(now[key] is not value for key, value in before.items()):
                now.clear()
                now.update(before)
        for _, now, _, copies in self._buffers:
            for key, value in copies.items():
                if value is not None and not _same(now[key], value):
                    if _comparable(now[key], value):
                        with torch.no_grad():
                            now[key].copy_(value)
                    else:
                        now[key].data = value.clone()
        extra = _extra_state(self._model)
        for name, (module, value) in self._extra.items():
            settable = type(module).set_extra_state is not nn.Module.set_extra_state
            if settable and not (name in extra and _same(extra[name][1], value)):
                module.set_extra_state(copy.deepcopy(value))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise :class:`InputError` if the state changes inside; restores it then, and on other errors too."""
        try:
            yield
            self.refuse_changes()
        except BaseException:
            self.restore()
            raise

    def _changed(self) -> str | None:
        """The kind and name of the first tensor or extra state that differs from the snapshot, or None."""
        name = self._changed_parameter()
        if name is not None:
            return f"parameter {name!r}"
        for prefix, now, before, copies in self._buffers:
            for key in before.keys() | now.keys():
                if not _same(copies.get(key), now.get(key)):
                    return f"buffer {prefix + key!r}"
        extra = self._extra_changed()
        return f"extra state of module {extra!r}" if extra is not None else None

    def _changed_parameter(self) -> str | None:
        for prefix, now, before, marks in self._parameters:
            for key in before.keys() | now.keys():
                if now.get(key) is not before.get(key) or _mark(now[key]) != marks[key]:
                    return prefix + key
        return None

    def _extra_changed(self) -> str | None:
        if not self._extra:
            return None
        now = _extra_state(self._model)
        return next((name for name, (_, value) in now.items() if not _same(self._extra[name][1], value)), None)


@contextmanager
def values_unchanged(model: nn.Module) -> Iterator[None]:
    """Raise :class:`InputError` if a parameter has other values at the end, however they were written; restores them."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def altered() -> list[str]:
        now = dict(model.named_parameters())
        found = [name for name, value in before.items() if name in now and not _same(value, now[name])]
        for name in found:
            now[name].data.copy_(before[name])
        return found

    try:
        yield
    finally:
        changed = altered()
    if changed:
        raise InputError(
            f"parameter {changed[0]!r} changes while examples pass through the model, so that checkpoints would reveal what it "
            "saw without noise; freeze what a pass computes in another place than a parameter"
        )


def _mark(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.shape, tensor.dtype


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _extra_state(model: nn.Module) -> dict[str, tuple[nn.Module, Any]]:
    return {
        name: (module, copy.deepcopy(module.get_extra_state()))
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


_INTEGERS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """The values as integers, in which NaN equals itself and −0 is not 0."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(_INTEGERS[tensor.element_size()])


def _comparable(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both are ordinary dense tensors of one kind: not sparse, quantized, sharded or without storage."""
    if one is None or other is None:
        return one is other
    if any(type(x) not in (Tensor, nn.Parameter, nn.Buffer) or x.is_quantized or x.is_meta for x in (one, other)):
        return False
    if any(getattr(one, kind) != getattr(other, kind) for kind in ("shape", "dtype", "device", "layout")):
        return False
    return one.layout is torch.strided


def _same(one: Any, other: Any) -> bool:
    """Equal in structure and in every value, NaN included."""
    leaves, structure = tree_flatten(one)
    other_leaves, other_structure = tree_flatten(other)
    return structure == other_structure and all(map(_same_leaf, leaves, other_leaves))


def _same_leaf(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and pickle.dumps(one) == pickle.dumps(other)
    if _comparable(one, other):
        return torch.equal(_bits(one), _bits(other))
    if any(getattr(one, kind) != getattr(other, kind) for kind in ("shape", "dtype", "device", "layout")):
        return False
    if one.layout is not torch.strided:
        one, other = one.detach().to_dense(), other.detach().to_dense()
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
