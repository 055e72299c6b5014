"""What MicroAdam keeps of a parameter, and whether a given state is that.

The kernel sees tensors by their addresses. Every address it gets comes from a state that was compared, in the same step, with
what the parameter and the options of its group ask for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dp_microadam.optimizers.shards import is_divided, largest_part, own_part, own_row, parts_of

MAX_BLOCK_SIZE = 32_768
"""An int16 index reaches this far."""

SCALARS = ("step", "rounding_key")
"""Entries that are one int64, which the loop reads; on whatever device they are."""

_SET_BACK = "which cannot change once training has begun; set it back or make a new optimizer"
_SHAPING = "density, window, scope, block_size, bucket_size, quantize, error_feedback, window_dtype and rounding"

Entries = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks of equal length: ``rows`` blocks of ``length`` coordinates, ``kept`` of each are selected."""

    start: int
    rows: int
    length: int
    kept: int
    window_start: int


@dataclass(frozen=True)
class Layout:
    """How a parameter's coordinates divide into blocks."""

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


class Form(NamedTuple):
    """The options of a group that decide what the states of its parameters look like and mean."""

    density: float
    window: int
    scope: str
    block_size: int
    bucket_size: int
    quantize: bool
    error_feedback: bool
    window_dtype: torch.dtype
    rounding: str

    @classmethod
    def of(cls, group: dict[str, Any]) -> Form:
        return cls(*[group[name] for name in cls._fields])

    def layout(self, numel: int) -> Layout:
        """How ``numel`` coordinates divide into blocks."""
        return layout_of(numel, self.block_size if self.scope == "block" else None, self.density)


@cache
def entries_of(size: int, form: Form) -> Entries:
    """Shape and type of what is kept of ``size`` coordinates."""
    layout = form.layout(size)
    window = (form.window, layout.kept)
    entries: Entries = {
        "step": ((), torch.int64),
        "indices": (window, layout.index_dtype),
        "values": (window, form.window_dtype),
    }
    if form.error_feedback and form.quantize:
        entries["codes"] = (((size + 1) // 2,), torch.uint8)
        entries["bounds"] = ((2, -(-size // form.bucket_size)), torch.float32)
        if form.rounding == "stochastic":
            entries["rounding_key"] = ((), torch.int64)
    elif form.error_feedback:
        entries["error"] = ((size,), torch.float32)
    return entries


def entries_for(param: Tensor, form: Form) -> Entries:
    """Shape and type of what is kept of ``param``; of a divided one a row for each part, as long as the largest needs."""
    if not is_divided(param):
        return entries_of(param.numel(), form)
    # The type of indices follows the largest part, so that it is the same everywhere.
    return {
        name: (shape if name in SCALARS else (*parts_of(param), math.prod(shape)), dtype)
        for name, (shape, dtype) in entries_of(largest_part(param), form).items()
    }


def own_state(param: Tensor, state: dict[str, Any], form: Form) -> dict[str, Any]:
    """What this process keeps of ``param``: the state itself or, if that is divided, views of its own part."""
    if not is_divided(param):
        return state
    size = own_part(param).numel()
    if size == 0:
        return {"step": state["step"]}
    entries = entries_of(size, form)
    return {name: value if name in SCALARS else own_row(value, entries[name][0]) for name, value in state.items()}


def fits(param: Tensor, state: dict[str, Any], entries: Entries) -> bool:
    """Whether presence, type, shape, device and order in memory of every entry are as asked. Runs in every step."""
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
            if not value.data_ptr() and not is_divided(value):
                return False
    except (KeyError, AttributeError):  # not there, or not a tensor
        return False
    return not is_divided(param) or _divided_alike(state, entries)


def misfit(param: Tensor, state: dict[str, Any], form: Form) -> str | None:
    """What of ``state`` is not as ``param`` and its group ask for, as the rest of a sentence that begins with the parameter."""
    entries = entries_for(param, form)
    return None if fits(param, state, entries) else _misfit_in_words(param, state, entries)


def _divided_alike(state: dict[str, Any], entries: Entries) -> bool:
    return all(
        is_divided(state[name]) and own_part(state[name]).numel() == shape[-1]
        for name, (shape, _) in entries.items()
        if name not in SCALARS
    )


def misfit_of_saved(param: Tensor, state: Any, form: Form) -> str | None:
    """What of a saved state would not fit ``param`` after loading, which moves it to the right device; contents included."""
    if param.numel() == 0:
        return "has no coordinates, but a state"
    entries = entries_for(param, form)
    if not isinstance(state, dict) or state.keys() != entries.keys():
        return _misfit_in_words(param, state if isinstance(state, dict) else {}, entries)
    for name, (shape, dtype) in entries.items():
        value = state[name]
        if not isinstance(value, Tensor) or value.shape != shape or value.dtype is not dtype:
            return _entry_in_words(name, value, *entries[name], None, _remedy(param))
    if is_divided(param) and not _divided_alike(state, entries):
        return _misfit_in_words(param, state, entries)
    own = own_part(param)
    return misfit_of_contents(own, own_state(param, state, form), form)


def misfit_of_contents(own: Tensor, state: dict[str, Any], form: Form) -> str | None:
    """Numbers in a state of the right shape that no step leaves behind, and that would lead the next one astray.

    ``own`` is what this process has of the parameter, ``state`` what it keeps of that.
    """
    tensors = [value for value in state.values() if value.device.type != "meta"]
    if len(tensors) < len(state):
        return "has a state on the meta device, which holds no numbers"
    if not 0 <= int(state["step"]) < 2**62:
        return f"has taken {int(state['step'])} steps by its state; that must be a number of at least 0"
    if own.numel() == 0:
        return None
    for segment in form.layout(own.numel()).segments:
        found = state["indices"][:, segment.window_start : segment.window_start + segment.rows * segment.kept]
        low, high = (int(end) for end in torch.aminmax(found))
        if low < 0 or high >= segment.length:
            wrong = low if low < 0 else high
            return f"has an index {wrong} in its state, in a block of {segment.length} coordinates; the state is damaged"
        for row in found[: int(state["step"])]:  # one at a time: sorting takes eight bytes for each
            ordered = row.view(segment.rows, segment.kept).sort(dim=1).values
            if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
                return "has an index twice in a block of one step in its state; the state is damaged"
    for name in ("values", "bounds", "error"):
        # A sum of magnitudes would overflow; the two ends show every NaN and infinity.
        if name in state and not all(math.isfinite(float(end)) for end in torch.aminmax(state[name])):
            return f"has {name} in its state that are not finite; the state is damaged"
    if "bounds" in state and bool((state["bounds"][0] > state["bounds"][1]).any()):
        return "has bounds in its state whose lower end is above the upper one; the state is damaged"
    return None


def change_of(before: Form, now: Form) -> str:
    """Which option of a group changed after its states were made; the rest of a sentence that begins with the parameter."""
    name, old, new = next(found for found in zip(Form._fields, before, now, strict=True) if found[1] != found[2])
    return f"has a state that was made with {name} = {old!r}; its group now says {new!r}, {_SET_BACK}"


def _misfit_in_words(param: Tensor, state: dict[str, Any], entries: Entries) -> str:
    missing, foreign = [sorted(names) for names in (entries.keys() - state.keys(), state.keys() - entries.keys())]
    if missing or foreign:
        found = [f"no {name}" for name in missing] + [f"{name}, which is not asked for," for name in foreign]
        return (
            f"has {' and '.join(map(str, found))} in its state; its group asks for {', '.join(entries)}: these follow from "
            f"{_SHAPING}, which cannot change once training has begun; set them back, or load the state of a MicroAdam "
            "with the same options"
        )
    for name, (shape, dtype) in entries.items():
        words = _entry_in_words(name, state[name], shape, dtype, None if name in SCALARS else param.device, _remedy(param))
        if words:
            return words
    if is_divided(param) and not _divided_alike(state, entries):
        return f"has a state that is not divided over processes as it is; {_remedy(param)}"
    return "has a state whose memory was freed; load it again"


def _entry_in_words(
    name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None, remedy: str
) -> str | None:
    if not isinstance(value, Tensor):
        return f"has a {type(value).__name__} as {name} in its state; it must be a tensor of {dtype} and shape {shape}"
    if value.shape != shape or value.dtype is not dtype:
        return (
            f"has {name} of shape {tuple(value.shape)} and {value.dtype} in its state, but itself and its group ask for shape "
            f"{shape} and {dtype}; {remedy}"
        )
    if value.device.type == "meta" or (device is not None and value.device != device):
        return (
            f"is on {device or 'a device'}, but {name} in its state is on {value.device}; after a model has moved, load the "
            "optimizer's own state_dict(), which moves the state to where its parameters are"
        )
    if not value.is_contiguous():
        return f"has {name} in its state that are not contiguous in memory; use .contiguous()"
    return None


def _remedy(param: Tensor) -> str:
    also = ", or the number of processes it is divided over" if is_divided(param) else ""
    return (
        f"these follow from its size, {_SHAPING}{also}, which cannot change once training has begun; set them back or make a "
        "new optimizer"
    )
