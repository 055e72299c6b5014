"""MicroAdam: Adam's update from one percent of the coordinates a step, with under one byte of state per parameter.

Algorithm 1, lines 6–17, and Algorithm 2 of Hudişteanu, Kalinin and Cyffers, "DP-MicroAdam: Private and Frugal Algorithm for
Training and Fine-tuning" (2025), after Modoranu et al., "MicroAdam" (2024). Fed with privatized gradients it is DP-MicroAdam:
all of it is post-processing. ``micro_adam_reference.py`` is the same written to be read against the paper.

State of a parameter of n coordinates, in blocks of at most 32,768 of which the k largest are kept each step:

========== =========================== ==========================================================
step       one int64                   steps this parameter has taken; ring slot and ages follow from it
indices    window × kept, int16        which coordinates each of the last ``window`` steps kept, within their block
values     window × kept, bfloat16     what they were
codes      n/2 bytes                   the 4-bit error, two codes to a byte
bounds     2 × buckets, float32        smallest and largest error of each bucket
========== =========================== ==========================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.optimizers import micro_adam_fused as fused_kernels
from dp_microadam.optimizers.bias import CORRECTIONS, bias_correction
from dp_microadam.optimizers.exact_state import ExactStateOptimizer, evaluate
from dp_microadam.optimizers.quantization import (
    bucket_bounds,
    dequantize,
    derive_key,
    pack,
    quantize,
    rounding_offsets,
    unpack,
)
from dp_microadam.optimizers.selection import largest_magnitudes
from dp_microadam.optimizers.shards import is_divided, largest_part, own_part, own_row, zero_rows
from dp_microadam.validation import (
    require_in_closed_open,
    require_in_open_closed,
    require_integer,
    require_non_negative,
    require_one_of,
)

MAX_BLOCK_SIZE = 32_768
"""An int16 index reaches this far."""

_GRADIENT_LIMIT = 1e30
"""Beyond this a gradient counts as non-finite: sums of a few such values would leave float32."""

_MIN_EPS = 1e-30
"""Smaller values vanish in float32, and coordinates that never moved would divide 0 by 0."""

_CHUNK = {"cpu": 1 << 17}
_CHUNK_ON_ACCELERATORS = 1 << 22
"""Coordinates the plain torch path handles at once; bounds its scratch memory to a few times this many floats."""


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


class MicroAdam(ExactStateOptimizer):
    """Adam over the largest coordinates of gradient plus error, its moments rebuilt from a window of sparse gradients.

    Arguments that follow Adam's: ``lr``, ``betas``, ``eps``, and ``weight_decay``, which is decoupled as in AdamW.

    Arguments:
        density: the part of each block that a step keeps.
        window: how many past steps the moments are rebuilt from.
        scope: ``"block"`` selects within blocks of ``block_size`` coordinates, ``"tensor"`` over whole tensors, as the
            paper's experiments did; indices then take four bytes instead of two.
        quantize: keep the error in 4 bits; ``False`` keeps it in float32, as the paper's experiments did.
        error_feedback: ``False`` forgets what a step did not select. For ablations.
        block_size: at most 32,768, and a multiple of ``bucket_size``.
        bucket_size: an even number; as many coordinates share a minimum and a maximum in the 4-bit error.
        window_dtype: ``torch.bfloat16``, or ``torch.float32`` for exact comparisons.
        bias_correction: ``"paper"`` divides by 1 − βᵗ although the window forgets, so v̂ settles near ``window``·(1 − β₂) of its
            dense value and steps grow over the first few thousand; ``"steady"`` takes steps of that final size from the
            start; ``"window"`` divides by 1 − β^min(t, window), which wants 6.5 times the learning rate.
        rounding: of the 4-bit error, ``"nearest"`` (Algorithm 2) or ``"stochastic"`` (the paper's appendix).
        seed: of stochastic rounding; drawn from torch's generator if not given. Random numbers are a function of seed,
            parameter, step and coordinate, so they survive saving and agree between processes.
        fused: ``None`` runs the Numba kernel where it can (CPU, ``scope="block"``, Numba installed) and plain torch elsewhere;
            ``False`` always plain torch; ``True`` insists on the kernel.

    Of a parameter that is divided over processes (a DTensor, as FSDP2 makes them) each process steps its own part, without a
    word to the others; blocks follow the parts, so what is selected depends on the number of processes.

    A parameter without a gradient is left alone, and its window does not move. A gradient that is not finite is refused before
    anything has changed.

    >>> weights = torch.nn.Parameter(torch.zeros(1000))
    >>> optimizer = MicroAdam([weights], lr=0.01, density=0.1)
    >>> for _ in range(300):
    ...     weights.grad = weights.detach() - 1.0
    ...     optimizer.step()
    >>> bool((weights - 1.0).abs().mean() < 0.1)
    True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        density: float = 0.01,
        window: int = 10,
        scope: str = "block",
        quantize: bool = True,
        error_feedback: bool = True,
        block_size: int = MAX_BLOCK_SIZE,
        bucket_size: int = 128,
        window_dtype: torch.dtype = torch.bfloat16,
        bias_correction: str = "paper",
        rounding: str = "nearest",
        seed: int | None = None,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "density": density,
            "window": window,
            "scope": scope,
            "quantize": quantize,
            "error_feedback": error_feedback,
            "block_size": block_size,
            "bucket_size": bucket_size,
            "window_dtype": window_dtype,
            "bias_correction": bias_correction,
            "rounding": rounding,
            "seed": int(torch.randint(2**62, ())) if seed is None else seed,
            "fused": fused,
        }
        _validate(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _validate({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.is_complex():
                self.param_groups.pop()
                raise InputError(f"a parameter has dtype {param.dtype}; MicroAdam takes real parameters")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns what ``closure`` returns."""
        loss = evaluate(closure)
        self._refuse_unusable_gradients()
        position = 0
        for group in self.param_groups:
            pending = fused_kernels.Batch(group)
            for param in group["params"]:
                if param.grad is not None and param.numel() > 0:
                    self._update(param, group, position, pending)
                position += 1
            pending.run()
        return loss

    def _update(self, param: Tensor, group: dict[str, Any], position: int, pending: fused_kernels.Batch) -> None:
        common = self.state[param] or self._initialize(param, group, position)
        common["step"] += 1
        own, given = own_part(param), own_part(param.grad)  # type: ignore[arg-type]
        if own.numel() == 0:  # divided, and nothing of it is here
            return
        layout, state = self._layout(own, group), self._own_state(param)
        if group["weight_decay"] != 0:
            own.mul_(1 - float(group["lr"]) * group["weight_decay"])
        direct = own.dtype == torch.float32 and own.is_contiguous()
        target = own.view(-1) if direct else torch.zeros(own.numel(), device=own.device)
        gradient = given.reshape(-1).float()
        if _fused(own, group):
            pending.add(target, gradient, state, layout)
            if not direct or gradient.data_ptr() != given.data_ptr():
                # Copies are used up at once: scratch memory must not grow with the model.
                pending.run()
        else:
            plain_update(target, gradient, state, layout, group)
        if not direct:
            # Computed in float32, added in the wider of the two types, whatever the parameter's own.
            own.add_(target.view_as(own))

    def _layout(self, param: Tensor, group: dict[str, Any]) -> Layout:
        block_size = group["block_size"] if group["scope"] == "block" else None
        return layout_of(param.numel(), block_size, group["density"])

    def _initialize(self, param: Tensor, group: dict[str, Any], position: int) -> dict[str, Any]:
        state = self.state[param]
        state["step"] = torch.zeros((), dtype=torch.int64)
        if is_divided(param):
            # The type of indices follows the largest part, so that it is the same everywhere.
            for name, (shape, dtype) in self._entries(largest_part(param), group).items():
                state[name] = zero_rows(param, math.prod(shape), dtype)
        else:
            for name, (shape, dtype) in self._entries(param.numel(), group).items():
                state[name] = torch.zeros(shape, dtype=dtype, device=param.device)
        if "codes" in state and group["rounding"] == "stochastic":
            state["rounding_key"] = torch.tensor(derive_key(group["seed"], position))
        return state

    def _entries(self, size: int, group: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of what is kept of ``size`` coordinates."""
        layout = layout_of(size, group["block_size"] if group["scope"] == "block" else None, group["density"])
        window = (group["window"], layout.kept)
        entries: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "indices": (window, layout.index_dtype),
            "values": (window, group["window_dtype"]),
        }
        if group["error_feedback"] and group["quantize"]:
            entries["codes"] = (((size + 1) // 2,), torch.uint8)
            entries["bounds"] = ((2, -(-size // group["bucket_size"])), torch.float32)
        elif group["error_feedback"]:
            entries["error"] = ((size,), torch.float32)
        return entries

    def _own_state(self, param: Tensor) -> dict[str, Any]:
        """What this process keeps of ``param``: the state itself or, if that is divided, views of its own part."""
        state = self.state[param]
        if not is_divided(param):
            return state
        entries = self._entries(own_part(param).numel(), self._group_of(param))
        return {name: own_row(value, entries[name][0]) if name in entries else value for name, value in state.items()}

    def error(self, param: Tensor) -> Tensor | None:
        """What the last step left unselected and will add to the next gradient: decoded, flat, a copy; None if none is kept.

        This and the methods below see the own part of a parameter that is divided over processes.
        """
        state = self.state.get(param)
        if not state or not ("error" in state or "codes" in state):
            return None
        own = own_part(param)
        found = torch.zeros(own.numel(), device=own.device)
        _add_error(found, 0, self._own_state(param), self._group_of(param)["bucket_size"])
        return found

    def window(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates and float32 values that the last steps selected, a row per step, newest first."""
        state, group, own = self._own_state(param), self._group_of(param), own_part(param)
        step = int(state["step"])
        slots = [(step - 1 - age) % group["window"] for age in range(min(step, group["window"]))]
        coordinates = state["indices"][slots].long()
        for segment in self._layout(own, group).segments:
            if segment.start + segment.rows > 1:  # else a single block, which begins at 0
                starts = torch.arange(segment.rows, device=own.device).mul_(segment.length).add_(segment.start)
                kept = slice(segment.window_start, segment.window_start + segment.rows * segment.kept)
                coordinates[:, kept].view(len(slots), segment.rows, segment.kept).add_(starts.unsqueeze(1))
        return coordinates, state["values"][slots].float()

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(other is param for other in group["params"]))

    def state_bytes(self) -> int:
        """Bytes that the optimizer's state takes in this process, over all parameters."""
        return sum(
            own_part(value).numel() * value.element_size()
            for state in self.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )

    def second_moment(self, param: Tensor) -> Tensor | None:
        """v̂ as the last step used it, dense and in float32: zero where the window holds nothing; None before the first step."""
        if not self.state.get(param):
            return None
        state, group, own = self._own_state(param), self._group_of(param), own_part(param)
        found = torch.empty(own.numel(), device=own.device)
        for segment in self._layout(own, group).segments:
            kept = slice(segment.window_start, segment.window_start + segment.rows * segment.kept)
            indices = state["indices"][:, kept].view(-1, segment.rows, segment.kept)
            values = state["values"][:, kept].view(-1, segment.rows, segment.kept)
            _, second = _moments_from_window(indices, values, segment.length, int(state["step"]), group)
            found[segment.start : segment.start + second.numel()] = second.view(-1)
        return found.view_as(own)

    def _refuse_unusable_gradients(self) -> None:
        given = [
            (group, number, param)
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
            if param.grad is not None and param.numel() > 0
        ]
        for group, number, param in given:
            if param.grad.layout is not torch.strided:
                raise InputError(f"{_name(param, group, number)} has a sparse gradient; MicroAdam takes dense ones")
            if is_divided(param) and getattr(param.grad, "placements", None) != param.placements:
                raise InputError(f"{_name(param, group, number)} and its gradient must be divided over processes alike")
            state = self.state.get(param)
            if state and not self._fits(param, state, group):
                raise InputError(
                    f"{_name(param, group, number)} has a window of shape {tuple(state['indices'].shape)}, which does not fit "
                    "its group's density, window, scope and block_size, or the number of processes it is divided over; these "
                    "cannot change once training has begun, make a new optimizer"
                )
        here = [entry for entry in given if own_part(entry[2]).numel() > 0]
        if not here or bool((_largest([own_part(param.grad) for _, _, param in here]) <= _GRADIENT_LIMIT).all()):
            return
        for group, number, param in here:
            largest = float(_largest([own_part(param.grad)]))
            if not largest <= _GRADIENT_LIMIT:
                raise InputError(
                    f"{_name(param, group, number)} has a gradient of magnitude {largest:g}; it must be finite and at most "
                    f"{_GRADIENT_LIMIT:g}; nothing was changed"
                )

    def _fits(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> bool:
        kept = state["indices"]
        if not is_divided(param):
            return tuple(kept.shape) == (group["window"], self._layout(param, group).kept)
        row = math.prod(self._entries(largest_part(param), group)["indices"][0])
        parts = [
            count if hasattr(placement, "dim") else 1
            for count, placement in zip(param.device_mesh.shape, param.placements, strict=True)  # type: ignore[attr-defined]
        ]
        return is_divided(kept) and tuple(kept.shape) == (*parts, row)


def plain_update(target: Tensor, gradient: Tensor, state: dict[str, Any], layout: Layout, group: dict[str, Any]) -> None:
    """Lines 6–14 of Algorithm 1 in plain torch, on any device: subtract one step from ``target``, a flat float32 tensor.

    Twin of the fused kernel and its fallback. Works through chunks of blocks so that scratch memory stays bounded; with
    ``scope="tensor"`` only the accumulator is as large as the tensor.
    """
    window, bucket_size = group["window"], group["bucket_size"]
    step = int(state["step"])
    slot = (step - 1) % window
    for segment in layout.segments:
        for first, rows in _chunks(segment, target.device):
            start = segment.start + first * segment.length
            span = slice(start, start + rows * segment.length)
            kept = slice(segment.window_start + first * segment.kept, segment.window_start + (first + rows) * segment.kept)
            accumulator = gradient[span].clone()
            _add_error(accumulator, start, state, bucket_size)  # line 6
            blocks = accumulator.view(rows, segment.length)
            selected = largest_magnitudes(blocks, segment.kept)  # line 7
            state["indices"][slot, kept] = selected.view(-1).to(layout.index_dtype)  # line 8
            state["values"][slot, kept] = blocks.gather(1, selected).view(-1).to(group["window_dtype"])
            blocks.scatter_(1, selected, 0.0)  # line 9
            _store_error(accumulator, start, state, group)  # lines 10–11
            del accumulator, blocks, selected
            indices = state["indices"][:, kept].view(window, rows, segment.kept)
            values = state["values"][:, kept].view(window, rows, segment.kept)
            target[span].sub_(_step_from_window(indices, values, segment.length, step, group).view(-1))  # lines 12–14


def _chunks(segment: Segment, device: torch.device) -> Iterator[tuple[int, int]]:
    at_once = max(1, _CHUNK.get(device.type, _CHUNK_ON_ACCELERATORS) // segment.length)
    for first in range(0, segment.rows, at_once):
        yield first, min(at_once, segment.rows - first)


def _step_from_window(indices: Tensor, values: Tensor, length: int, step: int, group: dict[str, Any]) -> Tensor:
    """η·m̂/(ε_s + √v̂) of a chunk of blocks, dense."""
    first, second = _moments_from_window(indices, values, length, step, group)
    return first.div_(second.sqrt_().add_(group["eps"])).mul_(float(group["lr"]))


def _moments_from_window(
    indices: Tensor, values: Tensor, length: int, step: int, group: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """m̂ and v̂ of a chunk of blocks, dense."""
    (beta_1, beta_2), window = group["betas"], group["window"]
    slot = (step - 1) % window
    first = torch.zeros(indices.shape[1], length, device=indices.device)
    second = torch.zeros_like(first)
    for row in range(min(step, window)):
        age = (slot - row) % window
        where, what = indices[row].long(), values[row].float()
        # Indices are distinct within a row: gather and scatter add without the races of an atomic addition.
        first.scatter_(1, where, first.gather(1, where) + what * beta_1**age)
        second.scatter_(1, where, second.gather(1, where) + what.square() * beta_2**age)
    return first.mul_(bias_correction(beta_1, step, group)), second.mul_(bias_correction(beta_2, step, group))


def _add_error(accumulator: Tensor, start: int, state: dict[str, Any], bucket_size: int) -> None:
    if "error" in state:
        accumulator.add_(state["error"][start : start + len(accumulator)])
    if "codes" not in state:
        return
    for span, buckets, part in _bucket_rows(accumulator, bucket_size):
        first = (start + span.start) // bucket_size
        packed = state["codes"][(start + span.start) // 2 : (start + span.stop + 1) // 2].view(buckets, -1)
        bounds = state["bounds"][:, first : first + buckets]
        part.add_(dequantize(unpack(packed, part.shape[1]), bounds[0], bounds[1]))


def _store_error(accumulator: Tensor, start: int, state: dict[str, Any], group: dict[str, Any]) -> None:
    if "error" in state:
        state["error"][start : start + len(accumulator)] = accumulator
    if "codes" not in state:
        return
    key = derive_key(int(state["rounding_key"]), int(state["step"])) if "rounding_key" in state else None
    bucket_size = group["bucket_size"]
    for span, buckets, part in _bucket_rows(accumulator, bucket_size):
        first = (start + span.start) // bucket_size
        lower, upper = bucket_bounds(part)
        offsets = None
        if key is not None:
            offsets = rounding_offsets(key, start + span.start, part.numel(), part.device).view_as(part)
        codes = quantize(part, lower, upper, offsets)
        state["codes"][(start + span.start) // 2 : (start + span.stop + 1) // 2] = pack(codes).view(-1)
        state["bounds"][0, first : first + buckets] = lower
        state["bounds"][1, first : first + buckets] = upper


def _bucket_rows(flat: Tensor, bucket_size: int) -> Iterator[tuple[slice, int, Tensor]]:
    """``flat`` as matrices with a bucket per row: the full buckets, a bounded number at a time, then the shorter last one."""
    full = len(flat) // bucket_size * bucket_size
    at_once = _CHUNK.get(flat.device.type, _CHUNK_ON_ACCELERATORS) // bucket_size * bucket_size or bucket_size
    for begin in range(0, full, at_once):
        span = slice(begin, min(begin + at_once, full))
        rows = (span.stop - span.start) // bucket_size
        yield span, rows, flat[span].view(rows, bucket_size)
    if full < len(flat):
        yield slice(full, len(flat)), 1, flat[full:].view(1, -1)


def _largest(gradients: list[Tensor]) -> Tensor:
    """Largest magnitude of each gradient; NaN if it holds one."""
    # aminmax is the one reduction of torch's that reads a tensor once, at the speed of memory.
    ends = [end for gradient in gradients for end in torch.aminmax(gradient.detach())]
    return torch.stack([end.to(ends[0].device, torch.float32) for end in ends]).view(-1, 2).abs().amax(dim=1)


def _fused(param: Tensor, group: dict[str, Any]) -> bool:
    if group["fused"] is False:
        return False
    obstacle = fused_kernels.obstacle(param, group)
    if obstacle and group["fused"]:
        raise InputError(f"fused is True, but {obstacle}; use fused=None or fused=False")
    return obstacle is None


def _name(param: Tensor, group: dict[str, Any], number: int) -> str:
    position = next(i for i, other in enumerate(group["params"]) if other is param)
    return f"parameter {position} of group {number} (shape {tuple(param.shape)})"


def _validate(options: dict[str, Any]) -> None:
    require_non_negative("lr", float(options["lr"]))
    for name, beta in zip(("betas[0]", "betas[1]"), options["betas"], strict=True):
        require_in_closed_open(name, beta, 0.0, 1.0)
    if not _MIN_EPS <= options["eps"] < math.inf:
        raise InputError(f"eps is {options['eps']}; it must be a finite number of at least {_MIN_EPS:g}")
    require_non_negative("weight_decay", options["weight_decay"])
    require_in_open_closed("density", options["density"], 0.0, 1.0)
    require_integer("window", options["window"], 1)
    require_one_of("scope", options["scope"], ("block", "tensor"))
    require_integer("bucket_size", options["bucket_size"], 2)
    if options["bucket_size"] % 2:
        raise InputError(f"bucket_size is {options['bucket_size']}; it must be even, as two codes share a byte")
    require_integer("block_size", options["block_size"], 2, MAX_BLOCK_SIZE)
    if options["block_size"] % options["bucket_size"]:
        raise InputError(
            f"block_size is {options['block_size']}; it must be a multiple of bucket_size, {options['bucket_size']}"
        )
    if options["window_dtype"] not in (torch.bfloat16, torch.float32):
        raise InputError(f"window_dtype is {options['window_dtype']}; it must be torch.bfloat16 or torch.float32")
    require_one_of("bias_correction", options["bias_correction"], CORRECTIONS)
    require_one_of("rounding", options["rounding"], ("nearest", "stochastic"))
    require_integer("seed", options["seed"], 0)
