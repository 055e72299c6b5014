"""MicroAdam: Adam on the largest coordinates, with error feedback, in less than one byte of state per parameter.

Algorithm 1, lines 6–15, and Algorithm 2 of Hudişteanu, Kalinin and Cyffers, "DP-MicroAdam: Private and Frugal Algorithm for
Training and Fine-tuning" (2025), after Modoranu et al., "MicroAdam" (2024). On privatized gradients it is DP-MicroAdam: the
optimizer is post-processing. ``micro_adam_reference.py`` is the same algorithm, written to be read beside the paper.

State of a parameter with n coordinates, in blocks of at most 32,768 coordinates, of which each step selects the k largest:

======== ======================= ===================================================================
step     one int64               updates of this parameter so far; gives the slot of the window and ages
indices  window × kept, int16    coordinates selected in each of the last ``window`` steps, within their block
values   window × kept, bfloat16 their values
codes    n/2 bytes               what was not selected (the residual) in 4 bits, in buckets of 128
bounds   2 × n/128, float32      smallest and largest residual of each bucket
======== ======================= ===================================================================

With ``quantize=False`` values and residual are float32: the algorithm without rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.optimizers.exact_state import ExactStateOptimizer, evaluate
from dp_microadam.optimizers.quantization import BUCKET, dequantize, quantize
from dp_microadam.optimizers.shards import is_sharded, largest_shard_size, local_row, local_shard, shard_counts, sharded_zeros
from dp_microadam.validation import require_in_open_closed, require_integer, require_one_of

BLOCK = 32_768
"""Coordinates of a block: as many as int16 can index."""

_ROWS_AT_ONCE = 1024
"""Blocks that the plain path updates at once, which bounds its scratch memory."""

State = dict[str, Any]


class MicroAdam(ExactStateOptimizer):
    """Adam whose moments are those of the last ``window`` steps' largest coordinates, with error feedback.

    Each step adds the residual to the gradient, selects the ``density`` largest coordinates of every block, and keeps the rest
    as the new residual. Adam's two moments are computed from the selected values of the last ``window`` steps. ``lr``,
    ``betas`` and ``eps`` are Adam's; ``weight_decay`` is decoupled as in AdamW. The defaults are the paper's.

    Arguments:
        density: the fraction of each block that a step selects.
        window: the number of past steps from which moments are computed.
        scope: ``"block"`` selects within blocks of 32,768 coordinates; ``"tensor"`` over whole tensors, as in the paper's
            experiments. Indices of larger tensors then take four bytes.
        quantize: keep the residual in 4 bits and selected values in bfloat16; ``False`` keeps both in float32, as in the
            paper's experiments.
        bias_correction: ``"paper"`` divides moments by 1 − βᵗ although the window forgets, so that v̂ settles near
            ``window``·(1 − β₂) of its dense value, and steps grow over the first few thousand; ``"window"`` divides by
            1 − β^min(t, window), which needs 6.5 times the learning rate.
        fused: use the compiled kernel where it can run: float32 parameters on the CPU, Numba installed, ``scope="block"`` and
            ``quantize=True``. Plain torch computes everything else.

    Sharded parameters (DTensors, as FSDP2 creates them): each rank updates its own shard; no communication is needed. Blocks do
    not cross shards, so the selection depends on the world size.

    A parameter without a gradient is skipped, and its window does not advance. ``density``, ``window``, ``scope`` and
    ``quantize`` cannot be changed once training has begun.

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
        bias_correction: str = "paper",
        fused: bool = True,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "params", "__class__")}
        super().__init__(params, options)

    def _validate(self, options: dict[str, Any]) -> None:
        super()._validate(options)
        require_in_open_closed("density", options["density"], 0.0, 1.0)
        require_integer("window", options["window"], 1)
        require_one_of("scope", options["scope"], ("block", "tensor"))
        require_one_of("bias_correction", options["bias_correction"], ("paper", "window"))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` returns."""
        loss = evaluate(closure)
        prepared = [(group, list(self._tensors(group))) for group in self.param_groups]  # nothing has changed if one is refused
        for group, tensors in prepared:
            for weight, gradient, state in tensors:
                state["step"] += 1
                if group["weight_decay"]:
                    weight.mul_(1 - float(group["lr"]) * group["weight_decay"])
                kernel = _kernel_for(weight, group)
                if kernel is not None:
                    kernel.update(weight, gradient, state, group, _factors(state, group), _layout_of(group, BLOCK).per_block)
                elif weight.numel():  # of a sharded one this rank may have nothing
                    _update(weight, gradient, state, group)
        return loss

    def _tensors(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor, State]]:
        """Local weights, gradients and states of the parameters of a group that have a gradient."""
        for param in group["params"]:
            if param.grad is None or param.numel() == 0:
                continue
            weight, gradient = local_shard(param), local_shard(param.grad)
            if gradient.layout is not torch.strided or not weight.is_floating_point():
                raise InputError(
                    f"a parameter of {weight.dtype} has a gradient with layout {gradient.layout}; MicroAdam takes real "
                    "parameters with dense gradients"
                )
            yield weight, gradient, self._local_state(param, group)

    def _local_state(self, param: Tensor, group: dict[str, Any]) -> State:
        """The state of the local shard, whose tensors are views of ``self.state[param]``."""
        state = self.state[param]
        entries = _layout_of(group, _stored_size(param)).entries
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64)
            for name, (shape, dtype) in entries.items():
                if is_sharded(param):
                    state[name] = sharded_zeros(param, math.prod(shape), dtype)
                else:
                    state[name] = torch.zeros(shape, dtype=dtype, device=param.device)
        _refuse_mismatch(param, state, entries)
        if not is_sharded(param):
            return state
        own = _layout_of(group, local_shard(param).numel()).entries
        return {"step": state["step"]} | {name: local_row(state[name], shape) for name, (shape, _) in own.items()}

    def _refuse_to_load(self, saved: dict[str, Any]) -> None:
        for group, given in zip(self.param_groups, saved["param_groups"], strict=False):
            if "density" not in given:
                raise InputError("the state to load has no density: it is from another optimizer; load that of a MicroAdam")
            self._validate({**self.defaults, **given})
            for param, name in zip(group["params"], given["params"], strict=False):
                state = saved["state"].get(name)
                if state:
                    _refuse_mismatch(param, state, _layout_of(given, _stored_size(param)).entries, anywhere=True)

    def residual(self, param: Tensor) -> Tensor | None:
        """The residual of error feedback: what the last step did not select and the next one adds to the gradient.

        A flat, decoded copy; None before the first step. For a sharded parameter this and the methods below return values of
        the local shard.
        """
        state = self._state_of(param)
        if "codes" in state:
            return dequantize(state["codes"], state["bounds"])[: local_shard(param).numel()]
        return state["error"].clone() if "error" in state else None

    def window(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """The coordinates and float32 values selected by the last steps, one row per step, newest first."""
        state, group = self._state_of(param), self._group_of(param)
        step, layout = int(state["step"]), _layout_of(group, local_shard(param).numel())
        slots = [(step - 1 - age) % group["window"] for age in range(min(step, group["window"]))]
        indices: Tensor = state["indices"]
        starts = torch.arange(indices.shape[1], device=indices.device) // layout.per_block * layout.block
        return indices[slots].long() + starts, state["values"][slots].float()

    def second_moment(self, param: Tensor) -> Tensor | None:
        """v̂ of the last step, dense and in float32, which is zero outside of the window; None before the first step."""
        if not self.state.get(param):
            return None
        state, group, own = self._state_of(param), self._group_of(param), local_shard(param)
        rows = [_moments(state, group, rows)[1] for rows in _layout_of(group, own.numel()).rows]
        return torch.cat([*rows, own.new_zeros(0, dtype=torch.float32)]).view(own.shape)

    def _state_of(self, param: Tensor) -> State:
        return self._local_state(param, self._group_of(param)) if self.state.get(param) else {}

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(other is param for other in group["params"]))


class _Rows(NamedTuple):
    """Consecutive blocks of equal length, of which each selects ``kept`` coordinates, and where weights and state have them."""

    span: slice
    blocks: int
    length: int
    kept: int
    columns: slice

    @property
    def buckets(self) -> slice:
        return slice(self.span.start // BUCKET, -(-self.span.stop // BUCKET))


class _Layout(NamedTuple):
    """How ``size`` coordinates are divided into blocks; ``entries`` are shape and dtype of the state's tensors."""

    block: int
    per_block: int
    rows: tuple[_Rows, ...]
    entries: dict[str, tuple[tuple[int, ...], torch.dtype]]


def _layout_of(group: dict[str, Any], size: int) -> _Layout:
    return _layout(size, group["density"], group["window"], group["scope"], group["quantize"])


@cache
def _layout(size: int, density: float, window: int, scope: str, quantize: bool) -> _Layout:
    def kept_of(length: int) -> int:
        # The subtraction keeps 0.07 · 100 = 7.000000000000001 from becoming 8.
        return max(1, math.ceil(density * length - 1e-9))

    block = BLOCK if scope == "block" else max(1, size)
    at_once = block * _ROWS_AT_ONCE
    full = size // block * block
    parts = [(start, min(start + at_once, full), block) for start in range(0, full, at_once)]
    parts += [(full, size, size - full)] if full < size else []
    rows = []
    for start, stop, length in parts:  # full blocks, some at a time, and a shorter last one
        blocks, kept, first = (stop - start) // length, kept_of(length), start // block * kept_of(block)
        rows.append(_Rows(slice(start, stop), blocks, length, kept, slice(first, first + blocks * kept)))
    shape = window, rows[-1].columns.stop if rows else 0
    small, buckets = min(size, block) <= BLOCK, -(-size // BUCKET)
    entries: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "indices": (shape, torch.int16 if small else torch.int32 if size < 2**31 else torch.int64),
        "values": (shape, torch.bfloat16 if quantize else torch.float32),
    }
    if quantize:
        entries |= {"codes": ((buckets, BUCKET // 2), torch.uint8), "bounds": ((2, buckets), torch.float32)}
    else:
        entries["error"] = ((size,), torch.float32)
    return _Layout(block, kept_of(block), tuple(rows), entries)


def _stored_size(param: Tensor) -> int:
    """Coordinates that a state is made for: of all shards the largest, so that all ranks have the same."""
    return largest_shard_size(param) if is_sharded(param) else param.numel()


def _refuse_mismatch(
    param: Tensor, state: State, wanted: dict[str, tuple[tuple[int, ...], torch.dtype]], anywhere: bool = False
) -> None:
    """Raise unless a state is what ``param`` and the options of its group need; one to be loaded may be on any device."""
    if state.keys() != {"step", *wanted}:
        raise InputError(
            f"the state of a parameter of shape {tuple(param.shape)} has {', '.join(sorted(state))}; its options need "
            f"{', '.join(['step', *wanted])}: set back what was changed, or load the state of such a MicroAdam"
        )
    for name, (shape, dtype) in wanted.items():
        value = state[name]
        shape = (*shard_counts(param), math.prod(shape)) if is_sharded(param) else shape
        if value.shape != shape or value.dtype is not dtype or not (anywhere or value.device == param.device):
            raise InputError(
                f"{name} in the state of a parameter of shape {tuple(param.shape)} is {tuple(value.shape)}, {value.dtype}, on "
                f"{value.device}; its options need {shape}, {dtype}, on {param.device}: density, window, scope, quantize, "
                "the world size and the device stay as they were when training began"
            )
    if anywhere and "indices" in wanted and not is_sharded(param):
        low, high = (int(end) for end in torch.aminmax(state["indices"]))
        if low < 0 or high >= max(1, param.numel()):
            raise InputError(
                f"indices in a state are from {low} to {high}, for {param.numel()} coordinates; it is damaged, load another"
            )


def _factors(state: State, group: dict[str, Any]) -> list[list[float]]:
    """By which values, and their squares, in each row of the window are multiplied: βᵃᵍᵉ·(1 − β)/(1 − βᵗ).

    The window holds only the terms β⁰ … β^(m−1), which sum to (1 − βᵐ)/(1 − β), so that moments shrink during the first steps,
    down to 1 − βᵐ times a weighted mean. With ``bias_correction="window"`` t ends at m: moments are the weighted mean itself.
    """
    step, window = int(state["step"]), group["window"]
    terms = step if group["bias_correction"] == "paper" else min(step, window)
    ages = [(step - 1 - slot) % window for slot in range(window)]
    return [[beta**age * (1 - beta) / (1 - beta**terms) for age in ages] for beta in group["betas"]]


def _kernel_for(weight: Tensor, group: dict[str, Any]) -> Any:
    """The module of the compiled kernel if it can update this tensor."""
    fits = weight.device.type == "cpu" and weight.dtype is torch.float32 and weight.is_contiguous()
    return _kernel() if fits and group["fused"] and group["scope"] == "block" and group["quantize"] else None


@cache
def _kernel() -> Any:
    try:
        from dp_microadam.optimizers import micro_adam_kernel
    except ImportError:
        return None
    return micro_adam_kernel


def _update(weight: Tensor, gradient: Tensor, state: State, group: dict[str, Any]) -> None:
    """Lines 6–14 of Algorithm 1 in plain torch."""
    flat = weight.reshape(-1)  # a copy where it is not contiguous
    gradient = gradient.reshape(-1)
    slot = (int(state["step"]) - 1) % group["window"]
    for rows in _layout_of(group, len(flat)).rows:
        a = gradient[rows.span].to(torch.float32, copy=True)
        if group["quantize"]:  # line 6
            codes, bounds = state["codes"][rows.buckets], state["bounds"][:, rows.buckets]
            a += dequantize(codes, bounds)[: len(a)]
        else:
            a += state["error"][rows.span]
        blocks = a.view(rows.blocks, rows.length)
        selected = blocks.abs().topk(rows.kept, dim=1).indices  # line 7
        state["indices"][slot, rows.columns] = selected.view(-1).to(state["indices"].dtype)  # line 8
        state["values"][slot, rows.columns] = blocks.gather(1, selected).view(-1).to(state["values"].dtype)
        blocks.scatter_(1, selected, 0.0)  # line 9
        if group["quantize"]:  # lines 10 and 11
            new_codes, new_bounds = quantize(a)
            codes.copy_(new_codes)
            bounds.copy_(new_bounds)
        else:
            state["error"][rows.span] = a
        first, second = _moments(state, group, rows)
        flat[rows.span] -= first.mul_(float(group["lr"])).div_(second.sqrt_().add_(group["eps"]))  # line 14
    if not weight.is_contiguous():
        weight.copy_(flat.view(weight.shape))


def _moments(state: State, group: dict[str, Any], rows: _Rows) -> tuple[Tensor, Tensor]:
    """Lines 12 and 13: m̂ and v̂ of the coordinates of some blocks, dense."""
    within = state["indices"][:, rows.columns].long()
    indices = within + torch.arange(within.shape[1], device=within.device) // rows.kept * rows.length
    values = state["values"][:, rows.columns].float()
    first, second = values.new_zeros(2, rows.blocks * rows.length).unbind()
    for slot, (factor, of_square) in enumerate(zip(*_factors(state, group), strict=True)):
        first.index_add_(0, indices[slot], values[slot], alpha=factor)
        second.index_add_(0, indices[slot], values[slot].square(), alpha=of_square)
    return first, second
