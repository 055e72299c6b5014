"""Watches what a device is asked to do: refuses mixed devices as a GPU would, counts synchronisations by line."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torchgen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ACROSS_DEVICES = {"copy_", "_to_copy", "_copy_from", "_pin_memory", "record_stream"}
"""Operators whose purpose is to go from one device to another."""

INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Operators that take indices on the CPU for tensors on a GPU."""

WAITS = {
    *("_local_scalar_dense", "is_nonzero", "equal", "allclose", "nonzero", "argwhere", "masked_select", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "_linalg_check_errors"),
}
"""Operators after which the host waits for the device, since their result, or its shape, is a number of the host."""

_PACKAGE = "/dp_microadam/"
_watching: list[Watch] = []


class MixedDevices(RuntimeError):
    """A real GPU would refuse this operator: its tensors are on different devices."""


class Watch(TorchDispatchMode):
    """Counts what happens on GPUs within the block, by operator and line of the project that called it.

    Attributes:
        synchronisations: how often the host waited for the device, by (what, file:line function).
        refusals: what was refused, so that it is known even where the exception was caught.

    Raises:
        MixedDevices: inside the block, where a real GPU refuses tensors of different devices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.synchronisations: Counter[tuple[str, str]] = Counter()
        self.refusals: list[str] = []

    def __enter__(self) -> Watch:
        _watching.append(self)
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        _watching.remove(self)
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        name = func._schema.name.split("::")[1]
        if len({tensor.device for tensor in given}) > 1:
            self._refuse_mixed(func, name, args, given)
        out = func(*args, **kwargs)
        on_gpu = any(tensor.is_cuda for tensor in given)
        waits = _copy_that_waits(name, args, kwargs, out) or (_waits(func, name, args, kwargs) if on_gpu else None)
        if waits:
            self.synchronisations[waits, project_line()] += 1
        return out

    def _refuse_mixed(self, func: Any, name: str, args: Sequence[Any], given: Sequence[Tensor]) -> None:
        if name in ACROSS_DEVICES or (name in INDEXING and _may_be_indexed(args)):
            return
        if name.startswith("_foreach_"):
            rows = zip(*(leaf for leaf in args if isinstance(leaf, (list, tuple)) and _tensors(leaf)), strict=False)
            if all(len({tensor.device for tensor in _tensors(row)}) <= 1 for row in rows):
                return
        written = [args[i] for i, a in enumerate(func._schema.arguments) if a.is_write and i < len(args)]
        on_gpus = {tensor.device for tensor in given if tensor.is_cuda}
        numbers = all(tensor.dim() == 0 for tensor in given if not tensor.is_cuda)
        if numbers and len(on_gpus) == 1 and _takes_numbers(func) and all(tensor.is_cuda for tensor in _tensors(written)):
            return
        found = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in given)
        self.refusals.append(f"{func} at {project_line()} gets tensors of different devices: {found}")
        raise MixedDevices(self.refusals[-1])


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _may_be_indexed(args: Sequence[Any]) -> bool:
    """Whether indices are on the CPU or where the indexed tensor is, and values are there or one number."""
    self, indices = args[0], _tensors(args[1])
    values = _tensors(args[2:3])
    return all(t.device in (self.device, torch.device("cpu")) for t in indices) and all(
        t.device == self.device or (t.dim() == 0 and not t.is_cuda) for t in values
    )


@cache
def _without_device_check() -> frozenset[str]:
    """Operators that leave the check of devices to TensorIterator, which lets numbers on the CPU pass; torch declares them."""
    declared = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text()
    entries = re.split(r"^- func: ", declared, flags=re.MULTILINE)
    return frozenset(entry.split("(")[0] for entry in entries if re.search(r"^  device_check: NoCheck", entry, re.MULTILINE))


def _takes_numbers(func: Any) -> bool:
    name = func._schema.name.split("::")[1]
    full = f"{name}.{func._schema.overload_name}" if func._schema.overload_name else name
    return full in _without_device_check()


def _copy_that_waits(name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> str | None:
    """The kind of a copy between host and device that the host waits for, or None."""
    if name == "lift_fresh" and args[0].is_cuda:
        return "copy of a Python number to the device"  # torch.tensor(…, device="cuda"): its own copy is not dispatched
    if name not in ("copy_", "_to_copy"):
        return None
    source, target = (args[1], args[0]) if name == "copy_" else (args[0], out)
    if source.is_cuda == target.is_cuda or not source.numel():
        return None
    asked = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
    if asked and (target if source.is_cuda else source).is_pinned():
        return None
    way = "to the host" if source.is_cuda else "to the device"
    return f"copy {way}" + (" from pageable memory, though non_blocking" if asked else "")


def _waits(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """The reason why the host waits for this operator on a GPU, or None."""
    if name in WAITS:
        return name
    if name == "repeat_interleave" and func._schema.overload_name in ("Tensor", "self_Tensor"):
        return None if kwargs.get("output_size") is not None else name
    if name in INDEXING and args[0].is_cuda:
        indices = _tensors(args[1])
        if any(not index.is_cuda for index in indices):
            return f"{name} with indices on the CPU"
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            one_number = name.startswith(("index_put", "_index_put")) and args[2].numel() == 1 and len(indices) == 1
            return None if one_number else f"{name} by mask"  # with one number it becomes masked_fill
    return None


def project_line() -> str:
    """The innermost line of the project on the stack, as "clipping/engine.py:265 accumulate"."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        if _PACKAGE in file:
            return f"{file.rsplit(_PACKAGE, 1)[1]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside the project"


def note_synchronisation(what: str) -> None:
    """Count a synchronisation that no operator stands for."""
    for watch in _watching:
        watch.synchronisations[what, project_line()] += 1
