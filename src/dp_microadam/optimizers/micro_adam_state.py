"""The format of MicroAdam's state, and checks that a given state has it.

The kernel accesses tensors by address. Every address it gets comes from a state that was checked, in the same step, against
the parameter and the options of its group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dp_microadam.optimizers.shards import is_sharded, largest_shard_size, local_row, local_shard, shard_counts

MAX_BLOCK_SIZE = 32_768
"""The range of an int16 index."""

SCALARS = ("step", "rounding_key")
"""Entries that are a single int64, read by ``step``; they may be on any device."""

_SET_BACK = "which cannot change once training has begun; set it back or create a new optimizer"
_SHAPING = "density, window, second_moment, scope, block_size, bucket_size, quantize, error_feedback, window_dtype and rounding"

Entries = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks of equal length: ``rows`` blocks of ``length`` coordinates, ``kept`` of which a step selects."""

    start: int
    rows: int
    length: int
    kept: int
    window_start: int


@dataclass(frozen=True)
class Layout:
    """The division of a parameter's coordinates into blocks."""

    segments: tuple[Segment, ...]
    kept: int
    index_dtype: torch.dtype


@cache
def layout_of(numel: int, block_size: int | None, density: float) -> Layout:
    """Blocks of ``block_size`` coordinates and a shorter last one; ``None`` makes the whole tensor one block.

    >>> layout_of(100_000, 32_768, 0.01).kept == 3 * 328 + 17
    True
    """
    block = min(block_size or numel, numel)
    segments = []
    window_start = 0
    for start, rows, length in ((0, numel // block, block), (numel - numel % block, 1, numel % block)):
        if rows and length:
            # The subtraction keeps 0.07 · 100 = 7.000000000000001 from becoming 8.
            kept = max(1, math.ceil(density * length - 1e-9))
            segments.append(Segment(start, rows, length, kept, window_start))
            window_start += rows * kept
    longest = max(segment.length for segment in segments)
    index_dtype = torch.int16 if longest <= MAX_BLOCK_SIZE else torch.int32 if longest <= 2**31 else torch.int64
    return Layout(tuple(segments), window_start, index_dtype)


class StateFormat(NamedTuple):
    """The options of a group that determine the format of its parameters' states."""

    density: float
    window: int
    scope: str
    block_size: int
    bucket_size: int
    quantize: bool
    error_feedback: bool
    window_dtype: torch.dtype
    rounding: str
    second_moment: str

    @classmethod
    def of(cls, group: dict[str, Any]) -> StateFormat:
        return cls(*[group[name] for name in cls._fields])

    def layout(self, numel: int) -> Layout:
        """The division of ``numel`` coordinates into blocks."""
        return layout_of(numel, self.block_size if self.scope == "block" else None, self.density)


@cache
def entries_of(size: int, form: StateFormat) -> Entries:
    """Shape and dtype of each entry of the state of ``size`` coordinates."""
    layout = form.layout(size)
    window = (form.window, layout.kept)
    entries: Entries = {
        "step": ((), torch.int64),
        "indices": (window, layout.index_dtype),
        "values": (window, form.window_dtype),
    }
    if form.second_moment == "tensor":
        entries["second_moment"] = ((1,), torch.float32)
    if form.error_feedback and form.quantize:
        entries["codes"] = (((size + 1) // 2,), torch.uint8)
        entries["bounds"] = ((2, -(-size // form.bucket_size)), torch.float32)
        if form.rounding == "stochastic":
            entries["rounding_key"] = ((), torch.int64)
    elif form.error_feedback:
        entries["error"] = ((size,), torch.float32)
    return entries


def entries_for(param: Tensor, form: StateFormat) -> Entries:
    """Shape and dtype of each entry of the state of ``param``; if it is sharded, one row per shard, sized for the largest."""
    if not is_sharded(param):
        return entries_of(param.numel(), form)
    # The dtype of indices follows the largest shard, so that it is the same on all ranks.
    return {
        name: (shape if name in SCALARS else (*shard_counts(param), math.prod(shape)), dtype)
        for name, (shape, dtype) in entries_of(largest_shard_size(param), form).items()
    }


def local_state(param: Tensor, state: dict[str, Any], form: StateFormat) -> dict[str, Any]:
    """The local part of a state: the state itself or, if ``param`` is sharded, views of this rank's rows."""
    if not is_sharded(param):
        return state
    size = local_shard(param).numel()
    if size == 0:
        return {"step": state["step"]}
    entries = entries_of(size, form)
    return {name: value if name in SCALARS else local_row(value, entries[name][0]) for name, value in state.items()}


def fits(param: Tensor, state: dict[str, Any], entries: Entries) -> bool:
    """Whether every entry is present with the expected dtype, shape, device and memory layout. Runs in every step."""
    if len(state) != len(entries):
        return False
    device = param.device
    try:
        for name, (shape, dtype) in entries.items():
            value = state[name]
            if value.shape != shape or value.dtype is not dtype or not value.is_contiguous():
                return False
            if value.device != device and (name not in SCALARS or value.device.type == "meta"):
                return False
            if not value.data_ptr() and not is_sharded(value):
                return False
    except (KeyError, AttributeError):  # not there, or not a tensor
        return False
    return not is_sharded(param) or _sharded_alike(state, entries)


def state_mismatch(param: Tensor, state: dict[str, Any], form: StateFormat) -> str | None:
    """How ``state`` differs from what ``param`` and its group need, to complete a sentence about the parameter; else None."""
    entries = entries_for(param, form)
    return None if fits(param, state, entries) else _mismatch_in_words(param, state, entries)


def _sharded_alike(state: dict[str, Any], entries: Entries) -> bool:
    return all(
        is_sharded(state[name]) and local_shard(state[name]).numel() == shape[-1]
        for name, (shape, _) in entries.items()
        if name not in SCALARS
    )


def saved_state_mismatch(param: Tensor, state: Any, form: StateFormat) -> str | None:
    """How a saved state, including its contents, would not match ``param`` after loading; None if it would.

    Devices are not compared, since loading moves the state to the right one.
    """
    if param.numel() == 0:
        return "has no coordinates, but it has a state"
    entries = entries_for(param, form)
    if not isinstance(state, dict) or state.keys() != entries.keys():
        return _mismatch_in_words(param, state if isinstance(state, dict) else {}, entries)
    for name, (shape, dtype) in entries.items():
        value = state[name]
        if not isinstance(value, Tensor) or value.shape != shape or value.dtype is not dtype:
            return _entry_in_words(name, value, *entries[name], None, _remedy(param))
    if is_sharded(param) and not _sharded_alike(state, entries):
        return _mismatch_in_words(param, state, entries)
    own = local_shard(param)
    return contents_mismatch(own, local_state(param, state, form), form)


def contents_mismatch(own: Tensor, state: dict[str, Any], form: StateFormat) -> str | None:
    """Invalid values in a state of the right format, to complete a sentence that begins with the parameter; else None.

    ``own`` is the local shard of the parameter, ``state`` the local state.
    """
    tensors = [value for value in state.values() if value.device.type != "meta"]
    if len(tensors) < len(state):
        return "has a state on the meta device, which holds no values"
    if not 0 <= int(state["step"]) < 2**62:
        return f"has step {int(state['step'])} in its state; it must be at least 0"
    if own.numel() == 0:
        return None
    if "second_moment" in state and not 0 <= float(state["second_moment"]) < math.inf:
        return f"has second_moment {float(state['second_moment'])} in its state; it must be finite and at least 0"
    for segment in form.layout(own.numel()).segments:
        found = state["indices"][:, segment.window_start : segment.window_start + segment.rows * segment.kept]
        low, high = (int(end) for end in torch.aminmax(found))
        if low < 0 or high >= segment.length:
            wrong = low if low < 0 else high
            return f"has an index {wrong} in its state, in a block of {segment.length} coordinates; the state is damaged"
        for row in found[: int(state["step"])]:  # one at a time, because sorting takes eight bytes per index
            ordered = row.view(segment.rows, segment.kept).sort(dim=1).values
            if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
                return "has a duplicate index in a block of one step in its state; the state is damaged"
    for name in ("values", "bounds", "error"):
        # A sum of magnitudes could overflow; minimum and maximum show every NaN and infinity.
        if name in state and not all(math.isfinite(float(end)) for end in torch.aminmax(state[name])):
            return f"has {name} in its state that are not finite; the state is damaged"
    if "bounds" in state and bool((state["bounds"][0] > state["bounds"][1]).any()):
        return "has bounds in its state whose lower end is above the upper one; the state is damaged"
    return None


def changed_option(before: StateFormat, now: StateFormat) -> str:
    """Which option of a group changed after its states were created, to complete a sentence that begins with the parameter."""
    name, old, new = next(found for found in zip(StateFormat._fields, before, now, strict=True) if found[1] != found[2])
    return f"has a state that was created with {name} = {old!r}; its group now has {new!r}, {_SET_BACK}"


def _mismatch_in_words(param: Tensor, state: dict[str, Any], entries: Entries) -> str:
    missing, foreign = [sorted(names) for names in (entries.keys() - state.keys(), state.keys() - entries.keys())]
    if missing or foreign:
        found = [f"no {name}" for name in missing] + [f"an unexpected {name}" for name in foreign]
        return (
            f"has {' and '.join(map(str, found))} in its state; its group needs {', '.join(entries)}: these follow from "
            f"{_SHAPING}, which cannot change once training has begun; set them back, or load the state of a MicroAdam "
            "with the same options"
        )
    for name, (shape, dtype) in entries.items():
        words = _entry_in_words(name, state[name], shape, dtype, None if name in SCALARS else param.device, _remedy(param))
        if words:
            return words
    if is_sharded(param) and not _sharded_alike(state, entries):
        return f"has a state that is not sharded like the parameter; {_remedy(param)}"
    return "has a state whose memory was freed; load it again"


def _entry_in_words(
    name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None, remedy: str
) -> str | None:
    if not isinstance(value, Tensor):
        return f"has a {type(value).__name__} as {name} in its state; it must be a tensor of {dtype} and shape {shape}"
    if value.shape != shape or value.dtype is not dtype:
        return (
            f"has {name} of shape {tuple(value.shape)} and {value.dtype} in its state, but the parameter and its group need "
            f"shape {shape} and {dtype}; {remedy}"
        )
    if value.device.type == "meta" or (device is not None and value.device != device):
        return (
            f"is on {device or 'a device'}, but {name} in its state is on {value.device}; after moving a model, load the "
            "optimizer's own state_dict(), which moves the state to the device of its parameters"
        )
    if not value.is_contiguous():
        return f"has {name} in its state that is not contiguous in memory; use .contiguous()"
    return None


def _remedy(param: Tensor) -> str:
    also = ", or the world size" if is_sharded(param) else ""
    return (
        f"these follow from its size, {_SHAPING}{also}, which cannot change once training has begun; set them back or create a "
        "new optimizer"
    )
