"""What a model may keep of the examples that pass through it: nothing.

Changes of parameters, buffers and extra state would put information about examples into checkpoints without noise, and plain
attributes of modules, such as a queue of features or the last attention map, into the hands of whoever gets the model.

Formal guarantees:

- a pass inside :meth:`StateSnapshot.unchanged` leaves buffers, parameters and extra state as they were, or is refused before
  its result is used. Buffers and extra state are compared by value and restored. Parameters are compared by autograd's
  version counter and address: they are refused, but not restored. A write through ``.data`` escapes the counter: such writes
  are found by the independence check (``independence.py``), which compares all values at its end, if they happen on
  synthetic examples too;
- after :func:`put_back_attributes` plain attributes of modules are those of before, and so are the entries of lists, deques
  and dicts of up to 1,024 entries and the values of tensors that attributes hold themselves. What changes inside of other
  objects is not put back; the independence check refuses it if it depends on synthetic examples.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dp_microadam.errors import InputError

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

# A vocabulary is not copied for every chunk of a batch.
_LARGEST_CONTAINER = 1024


class StateSnapshot:
    """A snapshot of a model's parameters, buffers and extra state."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._extra: dict[str, tuple[Any, bytes]] = {}
        # Prefix of the names, the module's own dict, a copy of it, and what its values are compared with.
        self._parameters: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._buffers: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                value = copy.deepcopy(module.get_extra_state())
                self._extra[name] = value, _pickled(value)
            for found, now, kept in ((self._parameters, module._parameters, _mark), (self._buffers, module._buffers, _copy)):
                if now:
                    found.append((prefix, now, now.copy(), {key: kept(value) for key, value in now.items()}))

    def altered(self) -> Tensor:
        """Whether anything differs from the snapshot; stays on the device, so that nothing waits before it is read."""
        flags = []
        for _, flag in self._changes():
            if isinstance(flag, Tensor):
                flags.append(flag)
            elif flag:
                return torch.tensor(True)
        if not flags:
            return torch.tensor(False)
        return torch.stack([flag.to(flags[0].device, non_blocking=True) for flag in flags]).any()

    def refuse_changes(self) -> None:
        """Raise :class:`InputError` if anything differs from the snapshot."""
        for what, flag in self._changes():
            if flag:
                raise _refusal(what)

    def restore(self) -> None:
        """Restore everything of which the snapshot has a copy."""
        for _, now, before, _ in (*self._parameters, *self._buffers):
            if now.keys() != before.keys() or any(now[key] is not value for key, value in before.items()):
                now.clear()
                now.update(before)
        for _, now, _, copies in self._buffers:
            for key, value in copies.items():
                if value is not None and bool(_differs(now[key], value)):
                    now[key].data = value.clone() if now[key].shape != value.shape else now[key].data.copy_(value)
        for name, (value, pickled) in self._extra.items():
            module = self._model.get_submodule(name)
            settable = type(module).set_extra_state is not nn.Module.set_extra_state
            if settable and _pickled(module.get_extra_state()) != pickled:
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

    def _changes(self) -> Iterator[tuple[str, bool | Tensor]]:
        """The kind and name of everything that is compared, and whether it differs."""
        for prefix, now, before, marks in self._parameters:
            for key in before.keys() | now.keys():
                same = now.get(key) is before.get(key) and _mark(now[key]) == marks[key]
                yield f"parameter {prefix + key!r}", not same
        for name, (_, pickled) in self._extra.items():
            extra = self._model.get_submodule(name).get_extra_state()
            yield f"extra state of module {name!r}", _pickled(extra) != pickled
        for prefix, now, before, copies in self._buffers:
            for key in before.keys() | now.keys():
                yield f"buffer {prefix + key!r}", _differs(copies.get(key), now.get(key))


@contextmanager
def values_unchanged(model: nn.Module) -> Iterator[None]:
    """Raise :class:`InputError` if a parameter has other values at the end, however they were written; restores them."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    changed = []
    try:
        yield
    finally:
        now = dict(model.named_parameters())
        changed = [name for name, value in before.items() if name in now and bool(_differs(value, now[name].detach()))]
        for name in changed:
            now[name].data.copy_(before[name])
    if changed:
        raise _refusal(f"parameter {changed[0]!r}")


def _refusal(what: str) -> InputError:
    return InputError(
        f"{what} changes while examples pass through the model, so that checkpoints would reveal what it "
        "saw (or how many examples or chunks there were) without noise; use a layer that keeps no "
        "statistics, or call its eval()"
    )


def _mark(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.shape, tensor.dtype


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """The values as integers, in which NaN equals itself and −0 is not 0."""
    tensor = tensor.detach().dequantize() if tensor.is_quantized else tensor.detach().to_dense()
    return tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().view(_INTEGERS[tensor.element_size()])


def _differs(one: Tensor | None, other: Tensor | None) -> bool | Tensor:
    """Whether two tensors differ in kind or in any bit; a flag on their device where values have to be compared."""
    if one is None or other is None:
        return one is not other
    if any(getattr(one, kind) != getattr(other, kind) for kind in ("shape", "dtype", "device", "layout")):
        return True
    return False if one.is_meta else (_bits(one) != _bits(other)).any()


@contextmanager
def put_back_attributes(model: nn.Module) -> Iterator[None]:
    """Put plain attributes of modules back on exit, also after an error."""
    before = [(vars(module), _Attributes(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for now, attributes in before:
            attributes.put_back(now)


class _Attributes:
    """The plain attributes of one module, with shallow copies of containers and copies of tensors."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._values = {key: value for key, value in attributes.items() if key not in _OF_EVERY_MODULE}
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        for value in self._values.values():
            if isinstance(value, Tensor) and not value.is_inference():
                self._tensors.append((value, value._version, value.detach().clone()))
            elif isinstance(value, list | dict | deque) and len(value) <= _LARGEST_CONTAINER:
                self._containers.append((value, value.copy()))

    def put_back(self, now: dict[str, Any]) -> None:
        for key in [key for key in now if key not in _OF_EVERY_MODULE and key not in self._values]:
            del now[key]
        now.update(self._values)
        for container, entries in self._containers:
            container.clear()
            (container.update if isinstance(container, dict) else container.extend)(entries)
        for tensor, version, value in self._tensors:
            if tensor._version != version:
                tensor.detach().copy_(value)


def copy_of(model: nn.Module, *, share_state: bool = False) -> nn.Module:
    """A copy of the model with attributes of its own; with ``share_state`` it has the original's parameters and buffers."""
    kept: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if share_state}
    for module in model.modules():
        for leaf in tree_leaves([value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE]):
            if isinstance(leaf, Tensor) and not leaf.is_leaf:  # torch refuses to copy it with its graph
                kept[id(leaf)] = leaf.detach().clone()
    return copy.deepcopy(model, kept)


def pickled_attributes(model: nn.Module) -> dict[str, bytes]:
    """The contents of every plain attribute that can be pickled, by its name; without modules and parameters."""
    found = {}
    for name, module in model.named_modules():
        for key in vars(module).keys() - _OF_EVERY_MODULE:
            with suppress(Exception):
                found[f"{name}.{key}".lstrip(".")] = _pickled(vars(module)[key])
    return found


def _pickled(value: Any) -> bytes:
    """Bytes that are equal for equal values."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Writes the values of tensors without their address, and nothing but the kind of what is compared elsewhere."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            return str(value.dtype), tuple(value.shape), _bits(value).cpu().numpy().tobytes()
        elsewhere = isinstance(value, nn.Module | nn.Parameter | FunctionType | ModuleType | type)
        return type(value).__name__ if elsewhere else None
