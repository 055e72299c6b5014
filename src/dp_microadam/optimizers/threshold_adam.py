"""ThresholdAdam: a coordinate moves once what has gathered on it exceeds a threshold; half a byte of state per parameter.

    a = g/√v̂ + e            what has gathered on a coordinate, in units of √v̂, its tensor's gradient size
    p ← p − lr·a,  e ← 0    where |a| > c
    e ← a                   elsewhere

v̂ is one second moment for a whole tensor (Zhang et al., "Adam-mini: Use Fewer Learning Rates To Gain More", 2024): under the
noise of private training all coordinates have nearly the same. What does not move is less than c, so that four bits hold it in
steps of c/7 without a minimum, a maximum or a bucket; it is rounded up or down such that the error averages out. Because e is
kept in units of √v̂, a v̂ that changes leaves it as it is: weights and residual together always hold the exact sum of all
lr·g/√v̂. With c = 0 every coordinate moves in every step and there is no residual.

``docs/optimizer.md`` derives c = 2.54, with which a tenth of the coordinates moves in a step that sees noise alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from shutil import which
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from dp_microadam.errors import InputError
from dp_microadam.optimizers.exact_state import ExactStateOptimizer, evaluate
from dp_microadam.optimizers.shards import is_sharded, largest_shard_size, local_row, local_shard, sharded_zeros
from dp_microadam.optimizers.tensor_moment import mean_squares
from dp_microadam.validation import require_in_closed_open, require_non_negative, require_positive

THRESHOLD = 2.54
LEVELS = 7
"""Levels of the residual on each side of zero; with zero they are 15 of the 16 that four bits have."""

_TURN = (math.sqrt(5) - 1) / 2
_COMPILED_FROM = 1 << 16
_WORTH_COMPILING = 1 << 22
"""Tensors, and models, of so many coordinates are worth a compiled update on the CPU, which takes seconds to make."""


class ThresholdAdam(ExactStateOptimizer):
    """Moves a coordinate by lr/√v̂ times the sum of its gradients as soon as that sum exceeds ``threshold``·√v̂.

    ``lr`` is what Adam's is: the root mean square of a step's coordinates, on average over steps. ``threshold=0`` moves all
    coordinates in every step. ``beta`` is Adam's β₂; ``weight_decay`` is decoupled as in AdamW. The state is half a byte per
    parameter, none with ``threshold=0``, and two numbers per tensor. Of sharded parameters (DTensors) v̂ is that of all shards,
    so that the result does not depend on the world size.

    >>> weight = torch.nn.Parameter(torch.zeros(4))
    >>> optimizer = ThresholdAdam([weight], lr=0.5, threshold=1.5)
    >>> for _ in range(2):
    ...     weight.grad = torch.tensor([1.0, -1.0, 1.0, 1.0])
    ...     optimizer.step()  # 1 is below the threshold, 2 above
    >>> [round(value, 1) for value in weight.tolist()]
    [-1.0, 1.0, -1.0, -1.0]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        threshold: float = THRESHOLD,
        beta: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        options = {"lr": lr, "threshold": threshold, "beta": beta, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        options = {**self.defaults, **param_group}
        require_non_negative("lr", float(options["lr"]))
        require_non_negative("threshold", options["threshold"])
        require_in_closed_open("beta", options["beta"], 0.0, 1.0)
        require_positive("eps", options["eps"])
        require_non_negative("weight_decay", options["weight_decay"])
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` returns."""
        loss = evaluate(closure)
        held = sum(local_shard(param).numel() for group in self.param_groups for param in group["params"])
        compiles = held >= _WORTH_COMPILING
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None and param.numel() > 0]
            # One pass for all tensors of a device and precision.
            for kind in dict.fromkeys((param.device, param.dtype) for param in params):
                self._update([param for param in params if (param.device, param.dtype) == kind], group, compiles)
        return loss

    def _update(self, params: Sequence[Tensor], group: dict[str, Any], compiles: bool) -> None:
        threshold, beta, rate = float(group["threshold"]), group["beta"], float(group["lr"])
        states = [self._state_of(param, threshold) for param in params]
        scales: list[float] = []
        for state, now in zip(states, mean_squares([param.grad for param in params]), strict=True):  # type: ignore[misc]
            state["step"] += 1
            # As float32, in which it is kept, so that a step after loading a state is the same.
            second = state["second_moment"].lerp_(torch.tensor(now, dtype=torch.float32), 1 - beta)
            scales.append(1 / (math.sqrt(float(second) / (1 - beta ** int(state["step"]))) + group["eps"]))
        weights = [local_shard(param) for param in params]
        flat = [weight.reshape(-1) for weight in weights]  # a copy where it is not contiguous
        gradients = [local_shard(param.grad).to(_wide(param.dtype)).reshape(-1) for param in params]  # type: ignore[arg-type]
        if group["weight_decay"]:
            torch._foreach_mul_(flat, 1 - rate * group["weight_decay"])
        if threshold == 0:
            torch._foreach_sub_(flat, torch._foreach_mul(gradients, [rate * scale for scale in scales]))
        else:
            codes = [local_row(state["residual"], [-(-one.numel() // 2)]) for state, one in zip(states, flat, strict=True)]
            offsets = [_TURN * int(state["step"]) % 1 for state in states]
            waiting: dict[float, list[tuple[Any, ...]]] = {}  # by offset: one, unless a tensor joined later
            for piece, offset in zip(zip(flat, gradients, codes, scales, strict=True), offsets, strict=True):
                if compiles and len(piece[0]) >= _COMPILED_FROM and _compiles_on(piece[0]):
                    _move_alone(*piece, rate, threshold, offset)
                else:
                    waiting.setdefault(offset, []).append(piece)
            for offset, pieces in waiting.items():
                _move_together(*zip(*pieces, strict=True), rate, threshold, offset)  # type: ignore[arg-type, call-arg]
        for weight, one in zip(weights, flat, strict=True):
            if not weight.is_contiguous():
                weight.copy_(one.view(weight.shape))

    def _state_of(self, param: Tensor, threshold: float) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64)
            state["second_moment"] = torch.zeros(())
            if threshold:
                state["residual"] = _zeros(param)
        return state

    def state_bytes(self) -> int:
        """Size of the optimizer state in this process, in bytes."""
        values = (local_shard(value) for state in self.state.values() for value in state.values())
        return sum(value.numel() * value.element_size() for value in values)

    def residual(self, param: Tensor) -> Tensor:
        """What has gathered on each coordinate of this process's shard since it moved last, in units of √v̂."""
        own, threshold = local_shard(param), self._threshold_of(param)
        state = self.state.get(param, {})
        if "residual" not in state:
            return torch.zeros(own.shape, dtype=_wide(param.dtype), device=own.device)
        codes = local_row(state["residual"], [-(-own.numel() // 2)])
        return (_levels(codes)[: own.numel()].to(_wide(param.dtype)) * (threshold / LEVELS)).view(own.shape)

    def _threshold_of(self, param: Tensor) -> float:
        return next(float(group["threshold"]) for group in self.param_groups if any(p is param for p in group["params"]))

    def _refuse_to_load(self, saved: dict[str, Any]) -> None:
        names = [name for group in saved["param_groups"] for name in group["params"]]
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        thresholds = [group.get("threshold") for group in saved["param_groups"] for _ in group["params"]]
        for name, (param, _), threshold in zip(names, params, thresholds, strict=False):
            state = saved["state"].get(name)
            if state is None:
                continue
            wanted = {"step", "second_moment"} | ({"residual"} if threshold else set())
            if set(state) != wanted:
                raise InputError(
                    f"the state of parameter {name} has {', '.join(sorted(state))}; ThresholdAdam's has "
                    f"{', '.join(sorted(wanted))}: load what a ThresholdAdam saved"
                )
            residual = state.get("residual")
            expected = _zeros(param) if threshold else None
            if expected is not None and (residual.shape != expected.shape or residual.dtype != torch.int8):
                raise InputError(
                    f"the residual of parameter {name} has shape {tuple(residual.shape)} in {residual.dtype}; a parameter of "
                    f"shape {tuple(param.shape)} needs {tuple(expected.shape)} in torch.int8, from as many processes"
                )


def _move_together(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    codes: Sequence[Tensor],
    scales: Sequence[float],
    rate: float,
    threshold: float,
    offset: float,
) -> None:
    """One step of flat tensors, in some twenty launches whatever their number.

    A byte of ``codes`` is low + 16·high: the levels of a coordinate of the first half of a tensor, and of one of the second.
    """
    counts = [len(one) for one in codes]
    given = torch._foreach_mul(list(gradients), list(scales))
    none = given[0].new_zeros(1)  # at the end of tensors of odd size
    seconds = [part for one, count in zip(given, counts, strict=True) for part in _filled(one[count:], count, none)]
    gathered = torch.cat([*(one[:count] for one, count in zip(given, counts, strict=True)), *seconds])
    gathered.add_(_levels(torch.cat(list(codes))), alpha=threshold / LEVELS)
    moves = hardshrink(gathered, threshold)  # 0 up to the threshold
    gathered.sub_(moves)
    levels = torch.add(torch.tensor(offset, dtype=gathered.dtype), gathered, alpha=LEVELS / threshold).floor_().to(torch.int8)
    packed = torch.add(*levels.chunk(2), alpha=16)
    torch._foreach_copy_(list(codes), packed.split(counts))
    first, second = (half.split(counts) for half in moves.chunk(2))
    parts = [one[:count] for one, count in zip(weights, counts, strict=True)]
    parts += [one[count:] for one, count in zip(weights, counts, strict=True)]
    steps = [*first, *(half[: len(one) - len(half)] for one, half in zip(weights, second, strict=True))]
    torch._foreach_add_(parts, steps, alpha=-rate)


def _move_alone(
    weight: Tensor, gradient: Tensor, codes: Tensor, scale: float, rate: float, threshold: float, offset: float
) -> None:
    """The same for one tensor, compiled into one loop over memory."""
    count, even = len(codes), len(weight) - len(codes)
    numbers = gradient.new_tensor([scale, rate, threshold, threshold / LEVELS, LEVELS / threshold, offset])
    _compiled()(weight[:even], weight[count:], gradient[:even], gradient[count:], codes[:even], numbers)
    if even < count:
        one = slice(even, count)
        _move_together([weight[one]], [gradient[one]], [codes[one]], [scale], rate, threshold, offset)


def _move_halves(first: Tensor, second: Tensor, given: Tensor, given_second: Tensor, codes: Tensor, numbers: Tensor) -> None:
    """The lines of :func:`_move_together` for two halves of a tensor, as a function that torch.compile makes one loop of."""
    scale, rate, threshold, width, inverse, offset = numbers.unbind()
    packed = codes.to(torch.int32)
    high = (packed + 8) >> 4
    levels = []
    for weight, gradient, level in ((first, given, packed - 16 * high), (second, given_second, high)):
        gathered = gradient * scale + level * width
        moves = torch.where(gathered.abs() <= threshold, 0.0, gathered)
        weight.sub_(rate * moves)
        levels.append(torch.floor((gathered - moves) * inverse + offset))
    codes.copy_((levels[0] + 16 * levels[1]).to(torch.int8))


@cache
def _compiled() -> Callable[..., None]:
    return torch.compile(_move_halves, dynamic=True)


def _compiles_on(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and _compiler() is not None


@cache
def _compiler() -> str | None:
    return which("c++") or which("g++") or which("clang++")


def _levels(codes: Tensor) -> Tensor:
    """The levels −7 … 7 of the first halves, then those of the second halves."""
    high = (codes + 8) >> 4
    return torch.cat([torch.sub(codes, high, alpha=16), high])


def _filled(half: Tensor, count: int, none: Tensor) -> list[Tensor]:
    return [half] if len(half) == count else [half, none]


def _zeros(param: Tensor) -> Tensor:
    if is_sharded(param):
        return sharded_zeros(param, -(-largest_shard_size(param) // 2), torch.int8)
    return torch.zeros(-(-param.numel() // 2), dtype=torch.int8, device=param.device)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
