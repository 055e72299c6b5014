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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.optimizers.exact_state import ExactStateOptimizer, evaluate
from dp_microadam.optimizers.quantization import BUCKET, dequantize, quantize
from dp_microadam.optimizers.shards import is_sharded, largest_shard_size, local_row, local_shard, shard_counts, sharded_zeros
from dp_microadam.validation import (
    require_in_closed_open,
    require_in_open_closed,
    require_integer,
    require_non_negative,
    require_one_of,
    require_positive,
)

BLOCK = 32_768
"""Coordinates of a block: as many as int16 can index."""

CORRECTIONS = ("paper", "steady", "window")

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
        error_feedback: ``False`` discards what a step did not select. For ablations.
        bias_correction: ``"paper"`` divides moments by 1 − βᵗ although the window forgets, so that v̂ settles near
            ``window``·(1 − β₂) of its dense value, and steps grow over the first few thousand; ``"steady"`` takes steps of that
            final size from the start; ``"window"`` divides by 1 − β^min(t, window), which needs 6.5 times the learning rate.
        fused: ``None`` uses the compiled kernel for float32 parameters on the CPU if Numba is installed, ``scope`` is
            ``"block"`` and the residual is quantized, and plain torch otherwise; ``False`` always uses plain torch; ``True``
            requires the kernel.

    Sharded parameters (DTensors, as FSDP2 creates them): each rank updates its own shard; no communication is needed. Blocks do
    not cross shards, so the selection depends on the world size.

    A parameter without a gradient is skipped, and its window does not advance. ``density``, ``window``, ``scope``, ``quantize``
    and ``error_feedback`` cannot be changed once training has begun.

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
        bias_correction: str = "paper",
        fused: bool | None = None,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "params", "__class__")}
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _validate({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` returns."""
        loss = evaluate(closure)
        prepared = [(group, list(self._tensors(group))) for group in self.param_groups]  # nothing has changed if one is refused
        for group, tensors in prepared:
            for one in tensors:
                one.state["step"] += 1
                if group["weight_decay"]:
                    one.weight.mul_(1 - float(group["lr"]) * group["weight_decay"])
            here = [one for one in tensors if one.weight.numel() > 0]  # of a sharded one this rank may have nothing
            fast = [one for one in here if one.fused]
            if fast:
                kernel = _kernel()
                assert kernel is not None
                kernel.update(
                    [(*one[:3], _pieces(one.weight.numel(), group)[0].kept, _factors(one.state, group)) for one in fast], group
                )
            rest = [one for one in here if not one.fused]
            for device in dict.fromkeys(one.weight.device for one in rest):
                for batch in _batches([one for one in rest if one.weight.device == device], group):
                    _update(batch, group)
        return loss

    def _tensors(self, group: dict[str, Any]) -> Iterator[_Tensor]:
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
            if gradient.shape != weight.shape:
                raise InputError(
                    f"a gradient has shape {tuple(gradient.shape)}; it must be the parameter's, {tuple(weight.shape)}"
                )
            unsuitable = _unsuitable(weight, group)
            if group["fused"] and unsuitable:
                raise InputError(f"fused is True, but {unsuitable}; use fused=None or fused=False")
            yield _Tensor(weight, gradient, self._local_state(param, group), not unsuitable and group["fused"] is not False)

    def _local_state(self, param: Tensor, group: dict[str, Any]) -> State:
        """The state of the local shard, whose tensors are views of ``self.state[param]``."""
        state = self.state[param]
        wanted = _entries(_stored_size(param), _Form.of(group))
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64)
            for name, (shape, dtype) in wanted.items():
                if is_sharded(param):
                    state[name] = sharded_zeros(param, math.prod(shape), dtype)
                else:
                    state[name] = torch.zeros(shape, dtype=dtype, device=param.device)
        _refuse_mismatch(param, state, wanted)
        if not is_sharded(param):
            return state
        own = _entries(local_shard(param).numel(), _Form.of(group))
        return {"step": state["step"]} | {name: local_row(state[name], shape) for name, (shape, _) in own.items()}

    def _refuse_to_load(self, saved: dict[str, Any]) -> None:
        for group, given in zip(self.param_groups, saved["param_groups"], strict=False):
            if "density" not in given:
                raise InputError("the state to load has no density: it is from another optimizer; load that of a MicroAdam")
            _validate({**self.defaults, **given})
            for param, name in zip(group["params"], given["params"], strict=False):
                state = saved["state"].get(name)
                if state:
                    _refuse_mismatch(param, state, _entries(_stored_size(param), _Form.of(given)), anywhere=True)

    def residual(self, param: Tensor) -> Tensor | None:
        """The residual of error feedback: what the last step did not select and the next one adds to the gradient.

        A flat, decoded copy; None before the first step and without error feedback. For a sharded parameter this and the
        methods below return values of the local shard.
        """
        state = self._state_of(param)
        if "codes" in state:
            return dequantize(state["codes"], state["bounds"])[: local_shard(param).numel()]
        return state["error"].clone() if "error" in state else None

    def window(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """The coordinates and float32 values selected by the last steps, one row per step, newest first."""
        state, group = self._state_of(param), self._group_of(param)
        step = int(state["step"])
        slots = [(step - 1 - age) % group["window"] for age in range(min(step, group["window"]))]
        starts = [
            piece.start + row * piece.length
            for piece in _pieces(local_shard(param).numel(), group)
            for row in range(piece.rows)
            for _ in range(piece.kept)
        ]
        indices: Tensor = state["indices"]
        return indices[slots].long() + torch.tensor(starts, device=indices.device), state["values"][slots].float()

    def second_moment(self, param: Tensor) -> Tensor | None:
        """v̂ of the last step, dense and in float32, which is zero outside of the window; None before the first step."""
        if not self.state.get(param):
            return None
        weights = _factors(self._state_of(param), self._group_of(param))[1]
        found = torch.zeros(local_shard(param).shape, device=local_shard(param).device)
        for weight, coordinates, values in zip(weights, *self.window(param), strict=False):
            found.view(-1).index_add_(0, coordinates, values.square() * weight)
        return found

    def state_bytes(self) -> int:
        """Size of the optimizer state in this process, in bytes."""
        values = (local_shard(value) for state in self.state.values() for value in state.values())
        return sum(value.numel() * value.element_size() for value in values)

    def _state_of(self, param: Tensor) -> State:
        return self._local_state(param, self._group_of(param)) if self.state.get(param) else {}

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(other is param for other in group["params"]))


class _Tensor(NamedTuple):
    """What is updated, with its gradient and its state, which has counted the update; ``fused``: by the kernel."""

    weight: Tensor
    gradient: Tensor
    state: State
    fused: bool


class _Piece(NamedTuple):
    """Consecutive blocks of equal length: ``rows`` of them from coordinate ``start``, whose selection begins at ``first``."""

    start: int
    rows: int
    length: int
    kept: int
    first: int


class _Form(NamedTuple):
    """The options of a group that shape the state."""

    density: float
    window: int
    scope: str
    quantize: bool
    error_feedback: bool

    @classmethod
    def of(cls, group: dict[str, Any]) -> _Form:
        return cls(*(group[name] for name in cls._fields))


def _pieces(size: int, group: dict[str, Any]) -> tuple[_Piece, ...]:
    return _divided(size, group["density"], group["scope"])


@cache
def _divided(size: int, density: float, scope: str) -> tuple[_Piece, ...]:
    """Blocks of 32,768 coordinates, some at a time, and a shorter last one; with ``scope="tensor"`` one block."""
    block = max(1, min(BLOCK, size) if scope == "block" else size)
    found: list[_Piece] = []
    start = first = 0
    while start < size:
        length = min(block, size - start)
        rows = min((size - start) // length, _ROWS_AT_ONCE)
        # The subtraction keeps 0.07 · 100 = 7.000000000000001 from becoming 8.
        kept = max(1, math.ceil(density * length - 1e-9))
        found.append(_Piece(start, rows, length, kept, first))
        start, first = start + rows * length, first + rows * kept
    return tuple(found)


@cache
def _entries(size: int, form: _Form) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the state's tensors for ``size`` coordinates."""
    pieces = _divided(size, form.density, form.scope)
    window = (form.window, sum(piece.rows * piece.kept for piece in pieces))
    small = form.scope == "block" or size <= BLOCK
    entries: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "indices": (window, torch.int16 if small else torch.int32 if size < 2**31 else torch.int64),
        "values": (window, torch.bfloat16 if form.quantize else torch.float32),
    }
    if form.error_feedback and form.quantize:
        buckets = -(-size // BUCKET)
        entries |= {"codes": ((buckets, BUCKET // 2), torch.uint8), "bounds": ((2, buckets), torch.float32)}
    elif form.error_feedback:
        entries["error"] = ((size,), torch.float32)
    return entries


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
                "error_feedback, the world size and the device stay as they were when training began"
            )
    if anywhere and "indices" in wanted and not is_sharded(param):
        low, high = (int(end) for end in torch.aminmax(state["indices"]))
        if low < 0 or high >= max(1, param.numel()):
            raise InputError(
                f"indices in a state are from {low} to {high}, for {param.numel()} coordinates; it is damaged, load another"
            )


def _validate(options: dict[str, Any]) -> None:
    require_non_negative("lr", float(options["lr"]))
    for name, beta in zip(("betas[0]", "betas[1]"), options["betas"], strict=True):
        require_in_closed_open(name, beta, 0.0, 1.0)
    require_positive("eps", options["eps"])
    require_non_negative("weight_decay", options["weight_decay"])
    require_in_open_closed("density", options["density"], 0.0, 1.0)
    require_integer("window", options["window"], 1)
    require_one_of("scope", options["scope"], ("block", "tensor"))
    require_one_of("bias_correction", options["bias_correction"], CORRECTIONS)


def bias_correction(beta: float, step: int, window: int, choice: str) -> float:
    """The factor of the window's sum Σ βᵃ·row, for a choice of ``bias_correction``.

    The window holds only the terms β⁰ … β^(m−1), which sum to (1 − βᵐ)/(1 − β). ``"paper"`` nevertheless divides by 1 − βᵗ,
    so that moments shrink during the first steps, down to 1 − βᵐ times a weighted mean. ``"steady"`` uses that final factor
    from the first step on. ``"window"`` makes the moments the weighted mean itself.

    >>> def factors(choice: str) -> list[float]:
    ...     return [round(bias_correction(0.9, step, 10, choice), 3) for step in (1, 10, 1000)]
    >>> factors("paper"), factors("steady"), factors("window")
    ([1.0, 0.154, 0.1], [0.651, 0.1, 0.1], [1.0, 0.154, 0.154])
    """
    terms = step if choice == "paper" else min(step, window)
    limit = 1 - beta**window if choice == "steady" else 1.0
    return float(limit * (1 - beta) / (1 - beta**terms))


def _factors(state: State, group: dict[str, Any]) -> list[list[float]]:
    """By which values, and their squares, of the window are multiplied, for each age."""
    step, window = int(state["step"]), group["window"]
    found = []
    for beta in group["betas"]:
        factor = bias_correction(beta, step, window, group["bias_correction"])
        found.append([factor * beta**age for age in range(window)])
    return found


def _unsuitable(weight: Tensor, group: dict[str, Any]) -> str | None:
    """Why the kernel does not update this tensor; None if it does."""
    if weight.device.type != "cpu" or weight.dtype is not torch.float32 or not weight.is_contiguous():
        return f"a parameter is {weight.dtype} on {weight.device}; the kernel takes contiguous float32 on the CPU"
    if group["scope"] != "block" or not (group["quantize"] and group["error_feedback"]):
        return "the kernel is for scope='block' with quantize and error_feedback"
    return None if _kernel() else "Numba is not installed (pip install 'dp-microadam[fast]')"


@cache
def _kernel() -> Any:
    try:
        from dp_microadam.optimizers import micro_adam_kernel
    except ImportError:
        return None
    return micro_adam_kernel


class _Part(NamedTuple):
    """A piece of a tensor, and flat views of the tensor's weights and gradients there."""

    tensor: _Tensor
    piece: _Piece
    weight: Tensor
    gradient: Tensor

    @property
    def slot(self) -> int:
        """The row of the window that this step writes."""
        return (int(self.tensor.state["step"]) - 1) % len(self.tensor.state["indices"])

    def window(self, name: str) -> Tensor:
        """The columns of ``name`` that are this piece's."""
        first, count = self.piece.first, self.piece.rows * self.piece.kept
        found: Tensor = self.tensor.state[name][:, first : first + count]
        return found

    def buckets(self, name: str) -> Tensor:
        first, length = self.piece.start // BUCKET, -(-self.piece.rows * self.piece.length // BUCKET)
        found: Tensor = self.tensor.state[name]
        return found[first : first + length] if name == "codes" else found[:, first : first + length]


def _batches(tensors: Sequence[_Tensor], group: dict[str, Any]) -> Iterator[list[_Part]]:
    """Pieces that are updated together: full blocks, the shorter ones, and with ``scope="tensor"`` each alone."""
    full: list[_Part] = []
    short: list[_Part] = []
    copied: list[tuple[Tensor, Tensor]] = []
    for one in tensors:
        weight, gradient = one.weight.reshape(-1), one.gradient.reshape(-1)
        for piece in _pieces(len(weight), group):
            span = slice(piece.start, piece.start + piece.rows * piece.length)
            part = _Part(one, piece, weight[span], gradient[span])
            if group["scope"] == "tensor":
                yield [part]
                continue
            batch = full if piece.length == BLOCK else short
            if sum(other.piece.rows for other in batch) + piece.rows > _ROWS_AT_ONCE:
                yield batch.copy()
                batch.clear()
            batch.append(part)
        if not one.weight.is_contiguous():
            copied.append((one.weight, weight.view(one.weight.shape)))
    yield from (batch for batch in (full, short) if batch)
    for weight, copy in copied:  # a flat view that is a copy goes back when all pieces are done
        weight.copy_(copy)


def _update(parts: Sequence[_Part], group: dict[str, Any]) -> None:
    """Lines 6–14 of Algorithm 1 for many blocks at once, in a number of launches that does not depend on how many."""
    pieces, device = [part.piece for part in parts], parts[0].weight.device
    length = max(piece.length for piece in pieces)
    width = -(-length // BUCKET) * BUCKET  # a row for each block, longer than some
    sizes = torch.tensor([[p.length, p.kept, p.rows] for p in pieces], dtype=torch.int64).to(device, non_blocking=True)
    rows, kept_in_all = sum(piece.rows for piece in pieces), sum(piece.rows * piece.kept for piece in pieces)
    lengths, kept = sizes[:, :2].repeat_interleave(sizes[:, 2], 0, output_size=rows).unbind(1)
    padding = [0 if piece.rows > 1 else width - piece.length for piece in pieces]
    within = torch.arange(width, device=device) < lengths.unsqueeze(1)

    a = _rows([part.gradient for part in parts], padding).float().view(rows, width)  # line 6
    if group["error_feedback"] and group["quantize"]:
        codes = [part.buckets("codes").view(-1) for part in parts]
        missing = [width // 2 * piece.rows - len(one) for piece, one in zip(pieces, codes, strict=True)]
        absent = [count // (BUCKET // 2) for count in missing]
        bounds = torch.stack([_rows([part.buckets("bounds")[end] for part in parts], absent) for end in (0, 1)])
        a += dequantize(_rows(codes, missing).view(-1, BUCKET // 2), bounds).view(rows, width)
    elif group["error_feedback"]:
        span = [slice(piece.start, piece.start + piece.rows * piece.length) for piece in pieces]
        a += _rows([part.tensor.state["error"][one] for part, one in zip(parts, span, strict=True)], padding).view(rows, width)

    most = max(piece.kept for piece in pieces)
    order = torch.where(within, a.abs(), -1).topk(most, dim=1).indices  # line 7, in descending order
    row = torch.arange(rows, device=device).repeat_interleave(kept, output_size=kept_in_all)
    place = torch.arange(kept_in_all, device=device) - (kept.cumsum(0) - kept)[row]
    index = order[row, place]
    starts, flat = row * width, a.view(-1)
    counts = [piece.rows * piece.kept for piece in pieces]
    for name, given in (("indices", index), ("values", flat[starts + index])):  # line 8
        own = [part.window(name)[part.slot] for part in parts]
        torch._foreach_copy_(own, list(given.to(own[0].dtype).split(counts)))
    flat[starts + index] = 0  # line 9
    if group["error_feedback"] and group["quantize"]:  # lines 10 and 11
        new_codes, new_bounds = quantize(a.view(-1, BUCKET), within.view(-1, BUCKET))
        per_row = width // BUCKET
        torch._foreach_copy_(
            [part.buckets("codes") for part in parts], _cut(new_codes, pieces, per_row, [len(one) // 64 for one in codes])
        )
        torch._foreach_copy_(
            [part.buckets("bounds") for part in parts],
            [one.T for one in _cut(new_bounds.T, pieces, per_row, [len(one) // 64 for one in codes])],
        )
    elif group["error_feedback"]:
        own = [part.tensor.state["error"][one] for part, one in zip(parts, span, strict=True)]
        torch._foreach_copy_(own, _cut(flat, pieces, width, [len(one) for one in own]))

    factors = torch.tensor([_by_slot(part.tensor.state, group) for part in parts]).to(device, non_blocking=True)
    columns = torch.tensor(counts).to(device, non_blocking=True)
    weights = factors.repeat_interleave(columns, 0, output_size=kept_in_all).permute(2, 1, 0)  # [window, 2, kept]
    indices = torch.cat([part.window("indices") for part in parts], 1).long() + starts
    values = torch.cat([part.window("values") for part in parts], 1).float()
    first, second = torch.zeros_like(flat), torch.zeros_like(flat)
    weighted = torch.stack([values, values.square()], 1).mul_(weights)
    for slot in range(group["window"]):  # lines 12 and 13
        first.index_add_(0, indices[slot], weighted[slot, 0])
        second.index_add_(0, indices[slot], weighted[slot, 1])
    step = first.mul_(float(group["lr"])).div_(second.sqrt_().add_(group["eps"]))  # line 14
    weight = [part.weight for part in parts]
    torch._foreach_sub_(weight, _cut(step, pieces, width, [len(one) for one in weight]))


def _by_slot(state: State, group: dict[str, Any]) -> list[list[float]]:
    """:func:`_factors` in the order of the window's rows."""
    step, window, factors = int(state["step"]), group["window"], _factors(state, group)
    return [[one[(step - 1 - slot) % window] for slot in range(window)] for one in factors]


def _rows(given: Sequence[Tensor], padding: Sequence[int]) -> Tensor:
    """Flat tensors one after the other, each followed by so many zeros."""
    zeros = given[0].new_zeros(max(padding))
    return torch.cat([part for one, count in zip(given, padding, strict=True) for part in (one, zeros[:count])])


def _cut(whole: Tensor, pieces: Sequence[_Piece], per_row: int, lengths: Sequence[int]) -> list[Tensor]:
    """The beginnings, of these lengths, of what each piece has of ``whole``: ``per_row`` for each of its rows."""
    parts = whole.split([per_row * piece.rows for piece in pieces])
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]
