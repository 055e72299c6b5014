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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
            ``window``·(1 − β₂) of its dense value, and steps grow over the first few thousand; ``"steady"`` takes steps of that
            final size from the start; ``"window"`` divides by 1 − β^min(t, window), which needs 6.5 times the learning rate.
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
        require_one_of("bias_correction", options["bias_correction"], ("paper", "steady", "window"))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` returns."""
        loss = evaluate(closure)
        prepared = [(group, list(self._tensors(group))) for group in self.param_groups]  # nothing has changed if one is refused
        for group, tensors in prepared:
            if tensors and group["weight_decay"]:
                torch._foreach_mul_([one[0] for one in tensors], 1 - float(group["lr"]) * group["weight_decay"])
            rest = []
            for weight, gradient, state in tensors:
                state["step"] += 1
                kernel = _kernel_for(weight, group)
                if kernel is None:
                    rest.append((weight, gradient, state))
                else:
                    kernel.update(weight, gradient, state, group, _factors(state, group), _layout_of(group, BLOCK).per_block)
            _update_together(rest, group)
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
        found = own.new_zeros(own.numel(), dtype=torch.float32)
        for rows in _layout_of(group, len(found)).rows:
            batch = _Batch([_Part(found[rows.span], found, state, rows)], group)
            batch.write([found[rows.span]], batch.moments()[1])
        return found.view(own.shape)

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
    ``"steady"`` multiplies that by 1 − βᵐ from the first step on.
    """
    step, window, choice = int(state["step"]), group["window"], group["bias_correction"]
    terms = step if choice == "paper" else min(step, window)
    ages = [(step - 1 - slot) % window for slot in range(window)]
    factors = []
    for beta in group["betas"]:
        limit = 1 - beta**window if choice == "steady" else 1.0
        factors.append([beta**age * (1 - beta) * limit / (1 - beta**terms) for age in ages])
    return factors


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


class _Part(NamedTuple):
    """Blocks of a tensor: flat views of its weights and gradient there, and the state of all of it."""

    weight: Tensor
    gradient: Tensor
    state: State
    rows: _Rows


def _update_together(tensors: Iterable[tuple[Tensor, Tensor, State]], group: dict[str, Any]) -> None:
    """Plain torch: blocks of similar length at once, so that the number of launches does not grow with that of tensors."""
    batches: dict[Any, list[_Part]] = defaultdict(list)
    counts: dict[Any, int] = Counter()
    copies = []
    for weight, gradient, state in tensors:
        flat, flat_gradient = weight.reshape(-1), gradient.reshape(-1)  # copies where they are not contiguous
        if not weight.is_contiguous():
            copies.append((weight, flat))
        for rows in _layout_of(group, len(flat)).rows:
            width = 1 << max(9, (rows.length - 1).bit_length() | 1)  # 512, 2,048, 8,192, 32,768, and so on for whole tensors
            kind = weight.device, weight.dtype, gradient.dtype, width
            counts[kind] += rows.blocks
            if kind in batches and counts[kind] * max(BLOCK, width) > BLOCK * _ROWS_AT_ONCE:
                _Batch(batches.pop(kind), group).update()
                counts[kind] = rows.blocks
            batches[kind].append(_Part(flat[rows.span], flat_gradient[rows.span], state, rows))
    for batch in batches.values():
        _Batch(batch, group).update()
    for weight, flat in copies:
        weight.copy_(flat.view(weight.shape))


class _Batch:
    """Blocks that are updated at once: rows of one matrix, in which shorter ones are padded."""

    def __init__(self, parts: Sequence[_Part], group: dict[str, Any]) -> None:
        self.parts, self.group = parts, group
        self.length = -(-max(part.rows.length for part in parts) // BUCKET) * BUCKET
        self.most = max(part.rows.kept for part in parts)
        self.selected = sum(part.rows.blocks * part.rows.kept for part in parts)
        table: list[list[float]] = []  # what differs between blocks, in one tensor, since a device waits for each
        for part in parts:
            first, second = _factors(part.state, group)
            table += [[part.rows.length, part.rows.kept, *first, *second]] * part.rows.blocks
        uploaded = torch.tensor(table, dtype=torch.float64).to(parts[0].weight.device, non_blocking=True)
        self.lengths, self.kept = uploaded[:, :2].long().unbind(1)
        self.factors = uploaded[:, 2:].float().T

    def update(self) -> None:
        """Lines 6–14 of Algorithm 1."""
        parts, group, buckets = self.parts, self.group, self.length // BUCKET
        absent = torch.arange(self.length, device=self.kept.device) >= self.lengths.unsqueeze(1)
        a = self.read([part.gradient for part in parts], self.length).float().view(absent.shape)
        if group["quantize"]:  # line 6
            codes = [part.state["codes"][part.rows.buckets] for part in parts]
            bounds = [[part.state["bounds"][end, part.rows.buckets] for part in parts] for end in (0, 1)]
            ends = torch.stack([self.read(end, buckets) for end in bounds])
            a += dequantize(self.read(codes, buckets), ends).view_as(a)
        else:
            errors = [part.state["error"][part.rows.span] for part in parts]
            a += self.read(errors, self.length).view_as(a)
        order = a.abs().masked_fill_(absent, -1.0).topk(self.most, dim=1).indices  # line 7, the largest first
        values = a.gather(1, order)
        for name, given in (("indices", order), ("values", values)):  # line 8
            slots = [part.state[name][(int(part.state["step"]) - 1) % group["window"], part.rows.columns] for part in parts]
            self.write(slots, given.to(slots[0].dtype).view(-1))
        chosen = torch.arange(self.most, device=a.device) < self.kept.unsqueeze(1)
        a.scatter_(1, order, values.masked_fill_(chosen, 0.0))  # line 9
        if group["quantize"]:  # lines 10 and 11
            last = a.gather(1, self.lengths.unsqueeze(1) - 1)  # fills the last bucket, whose bounds stay as they are
            new_codes, new_bounds = quantize(torch.where(absent, last, a, out=a).view(-1, BUCKET))
            self.write(codes, new_codes)
            self.write(bounds[0], new_bounds[0])
            self.write(bounds[1], new_bounds[1])
        else:
            self.write(errors, a.view(-1))
        first, second = self.moments()
        step = first.mul_(float(group["lr"])).div_(second.sqrt_().add_(group["eps"]))  # line 14
        weights = [part.weight for part in parts]
        self.write(weights, (self.read(weights, self.length) - step).to(weights[0].dtype))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Lines 12 and 13: m̂ and v̂, dense."""
        window, rows = self.group["window"], torch.arange(len(self.kept), device=self.kept.device)
        starts = (rows * self.length).repeat_interleave(self.kept, output_size=self.selected)
        factors = self.factors.repeat_interleave(self.kept, 1, output_size=self.selected)
        indices = torch.cat([part.state["indices"][:, part.rows.columns] for part in self.parts], 1).long() + starts
        values = torch.cat([part.state["values"][:, part.rows.columns] for part in self.parts], 1).float()
        terms = torch.cat([values, values.square()]).mul_(factors)
        first, second = terms.new_zeros(2, len(rows) * self.length).unbind()
        for slot in range(window):
            first.index_add_(0, indices[slot], terms[slot])
            second.index_add_(0, indices[slot], terms[window + slot])
        return first, second

    def read(self, views: list[Tensor], per_block: int) -> Tensor:
        """What the parts have, ``per_block`` entries for each block, with zeros behind shorter ones."""
        zeros, pieces = views[0].new_zeros(per_block, *views[0].shape[1:]), []
        for part, view in zip(self.parts, views, strict=True):
            pieces += [view, zeros[: part.rows.blocks * per_block - len(view)]]
        return torch.cat(pieces)

    def write(self, views: list[Tensor], given: Tensor) -> None:
        """The reverse; what is behind shorter blocks does not matter."""
        per_block = len(given) // len(self.kept)
        pieces = given.split([part.rows.blocks * per_block for part in self.parts])
        torch._foreach_copy_(views, [piece[: len(view)] for piece, view in zip(pieces, views, strict=True)])
