"""Detects changes of a model's state (parameters, buffers, extra state) while examples pass through it.

Such a change would put information about examples into checkpoints without noise.

Formal guarantees: a pass through the model inside :func:`refuse_state_changes` leaves buffers, parameters and extra
state as they were, or is refused and undone before its result is used. Buffers, and parameters of up to 65,536
numbers, are compared bit by bit. Larger parameters are compared by autograd's version counter and address, and are
refused but not restored. A write through ``.data`` escapes the counter: such writes are found by the independence check
(``independence.py``), which compares all values, if they happen on synthetic examples too. Plain Python attributes are not
part of a ``state_dict``: they are checked on synthetic examples, and tensors in them are put back (``module_attributes.py``).
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from dp_microadam.errors import InputError

# A frozen backbone is not copied for every chunk of a batch.
_LARGE = 65_536

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class StateSnapshot:
    """A snapshot of a model's parameters, buffers and extra state."""

    def __init__(self, model: nn.Module, *, copy_large: bool) -> None:
        self._model = model
        self._extra = _extra_state(model)
        self._slots: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = []
        self._marks: dict[int, tuple[Any, ...]] = {}
        copied: dict[int, Tensor] = {}
        for name, module in model.named_modules():
            for kind, slots in (("parameter", module._parameters), ("buffer", module._buffers)):
                self._slots.append((kind, f"{name}." if name else "", slots, slots.copy()))
                for tensor in slots.values():
                    if tensor is None or id(tensor) in copied or id(tensor) in self._marks:
                        continue
                    if copy_large or kind == "buffer" or tensor.numel() <= _LARGE:
                        copied[id(tensor)] = tensor
                    else:
                        self._marks[id(tensor)] = _mark(tensor)
        self._copies = _Copies(copied.values())

    def altered(self) -> Tensor:
        """Whether anything differs from the snapshot; stays on the device, so that nothing waits before it is read."""
        if any(self._replaced(slots, before) for _, _, slots, before in self._slots) or self._extra_changed() is not None:
            return torch.tensor(True)
        return self._copies.altered()

    def changed(self) -> str | None:
        """The kind and name of the first tensor or extra state that differs from the snapshot, or None."""
        if not bool(self.altered()):
            return None
        for kind, prefix, slots, before in self._slots:
            for key in before.keys() | slots.keys():
                if self._differs(before.get(key), slots.get(key)):
                    return f"{kind} {prefix + key!r}"
        return f"extra state of module {self._extra_changed()!r}"

    def restore(self) -> None:
        """Restore everything of which the snapshot has a copy."""
        for _, _, slots, before in self._slots:
            if any(slots.get(key) is not tensor for key, tensor in before.items()) or slots.keys() != before.keys():
                slots.clear()
                slots.update(before)
        self._copies.restore()
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
            self.refuse_changes()
        except BaseException:
            self.restore()
            raise

    def refuse_changes(self) -> None:
        """Raise :class:`InputError` if anything differs from the snapshot."""
        changed = self.changed()
        if changed is not None:
            raise InputError(
                f"{changed} changes while examples pass through the model, so that checkpoints would reveal what it "
                "saw (or how many examples or chunks there were) without noise; use a layer that keeps no "
                "statistics, or call its eval()"
            )

    def _replaced(self, slots: Mapping[str, Tensor | None], before: Mapping[str, Tensor | None]) -> bool:
        """Whether another value or shape now stands in one of a module's slots; in-place changes of copied tensors aside."""
        if slots.keys() != before.keys():
            return True
        marked = self._marks
        return any(self._differs(old, slots[key]) for key, old in before.items() if slots[key] is not old or id(old) in marked)

    def _differs(self, before: Tensor | None, now: Tensor | None) -> bool:
        if before is None or now is None:
            return before is not now
        if id(before) in self._marks:
            return now is not before or _mark(now) != self._marks[id(before)]
        return not _same(self._copies.of(before), now)

    def _extra_changed(self) -> str | None:
        if not self._extra:
            return None
        now = _extra_state(self._model)
        return next((name for name, (_, value) in now.items() if not _same(self._extra[name][1], value)), None)


class _Copies:
    """Copies of tensors, small ones joined to one vector per device and type, so that comparing all takes a few operations."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype, int | None], list[Tensor]] = {}
        self._alone: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:
            if _can_be_joined(tensor):
                by_itself = id(tensor) if tensor.numel() > _LARGE else None
                groups.setdefault((tensor.device, tensor.dtype, by_itself), []).append(tensor)
            else:
                self._alone.append((tensor, tensor.detach().clone()))
        self._joined = [_Joined(members) for members in groups.values()]
        self.device = self._joined[0].values.device if self._joined else torch.device("cpu")

    def altered(self) -> Tensor:
        flags = [joined.altered().to(self.device, non_blocking=True) for joined in self._joined]
        flags += [torch.tensor(not _same(copied, tensor), device=self.device) for tensor, copied in self._alone]
        return torch.stack(flags).any() if flags else torch.tensor(False)

    def of(self, wanted: Tensor) -> Tensor:
        return next(copied for tensor, copied in self._pairs() if tensor is wanted)

    def restore(self) -> None:
        for tensor, copied in self._pairs():
            if tensor.shape != copied.shape or tensor.dtype != copied.dtype or tensor.device != copied.device:
                tensor.data = copied.clone()
            elif not _same(tensor, copied):
                with torch.no_grad():
                    tensor.copy_(copied)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for joined in self._joined:
            yield from joined.pairs()
        yield from self._alone


class _Joined:
    """Tensors of one device and type, with their copies in one vector."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.shapes = [tensor.shape for tensor in tensors]
        self.values = _join(tensors).clone() if len(tensors) == 1 else _join(tensors)

    def altered(self) -> Tensor:
        for tensor, shape in zip(self.tensors, self.shapes, strict=True):
            if tensor.shape != shape or tensor.dtype != self.values.dtype or tensor.device != self.values.device:
                return torch.tensor(True)  # exchanged through .data
        return (_bits(_join(self.tensors)) != _bits(self.values)).any()

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        copies = self.values.split([shape.numel() for shape in self.shapes])
        for tensor, shape, copied in zip(self.tensors, self.shapes, copies, strict=True):
            yield tensor, copied.view(shape)


def _can_be_joined(tensor: Tensor) -> bool:
    """Whether this is an ordinary dense tensor: not sparse, quantized, sharded or without storage."""
    ordinary = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    return ordinary and not (tensor.is_quantized or tensor.is_meta or tensor.is_conj() or tensor.is_neg())


def _join(tensors: list[Tensor]) -> Tensor:
    """All values in one vector; of a single tensor a view, since copying a large one takes longer than comparing it."""
    vectors = [tensor.detach().resolve_conj().resolve_neg().reshape(-1) for tensor in tensors]
    return vectors[0].contiguous() if len(vectors) == 1 else torch.cat(vectors)


def _bits(values: Tensor) -> Tensor:
    """The values as integers, in which NaN equals itself."""
    return values.view(_INTEGERS[values.element_size()])


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
    if any(getattr(one, kind) != getattr(other, kind) for kind in ("shape", "dtype", "device", "layout")):
        return False
    if one.layout is not torch.strided:
        return all(map(_same_leaf, _dense_parts(one), _dense_parts(other)))
    if _can_be_joined(one) and _can_be_joined(other):
        return torch.equal(_bits(_join([one])), _bits(_join([other])))
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _dense_parts(sparse: Tensor) -> list[Tensor]:
    if sparse.layout is torch.sparse_coo:
        sparse = sparse.detach().coalesce()
        return [sparse.indices(), sparse.values()]
    by_row = sparse.layout in (torch.sparse_csr, torch.sparse_bsr)
    places = [sparse.crow_indices(), sparse.col_indices()] if by_row else [sparse.ccol_indices(), sparse.row_indices()]
    return [*places, sparse.values()]
