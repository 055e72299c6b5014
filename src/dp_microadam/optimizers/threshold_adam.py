"""ThresholdAdam: a coordinate moves once what has gathered on it exceeds a threshold; half a byte of state per parameter.

    a = g/√v̂ + e               what has gathered on a coordinate, in units of √v̂, its tensor's gradient size
    e ← 0                      where |a| > c,
        a in steps of c/7      elsewhere
    p ← p − lr·(a − e)         all of a where it exceeds the threshold, what rounding leaves over elsewhere

v̂ is one second moment for a whole tensor, as in :class:`~dp_microadam.optimizers.tensor_adam.TensorAdam`. Four bits hold e,
because it is between −c and c: no minimum, no maximum, no bucket. What they cannot hold moves the weight at once, so nothing is
lost: weights are at all times those of TensorAdam for the same gradients plus lr·e. Because e is kept in units of √v̂, that
holds for a v̂ that changes, too.

``docs/methods.md`` derives c = 2.54, with which a tenth of the coordinates exceeds it in a step that sees noise alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from shutil import which
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from dp_microadam.errors import InputError
from dp_microadam.optimizers.exact_state import ExactStateOptimizer, evaluate
from dp_microadam.optimizers.shards import is_sharded, largest_shard_size, local_row, local_shard, sharded_zeros
from dp_microadam.optimizers.tensor_adam import alike, inverse_sizes, wide
from dp_microadam.validation import require_positive

THRESHOLD = 2.54
LEVELS = 7
"""Levels of the residual on each side of zero; with zero they are 15 of the 16 that four bits have."""

_COMPILED_FROM = 1 << 14
_WORTH_COMPILING = 1 << 22
"""Tensors, and models, of so many coordinates are worth a compiled update on the CPU, which takes seconds to make."""

_CHUNK = 1 << 15
"""Bytes of codes that the CPU updates at once without it: what is between two operators stays in its cache."""


class _Piece(NamedTuple):
    """The two halves of a flat tensor and of its gradient, of which the second may lack one coordinate.

    A byte of ``codes`` is low + 16·high: the level of a coordinate of the first half, and of one of the second. ``scale`` is by
    what gradients are multiplied to count levels.
    """

    first: Tensor
    second: Tensor
    given: Tensor
    given_second: Tensor
    codes: Tensor
    scale: float


class ThresholdAdam(ExactStateOptimizer):
    """Moves a coordinate by lr/√v̂ times the sum of its gradients as soon as that sum exceeds ``threshold``·√v̂.

    ``lr`` is what Adam's is: the root mean square of a step's coordinates, on average over steps. ``beta`` is Adam's β₂;
    ``weight_decay`` is decoupled as in AdamW. The state is half a byte per parameter and two numbers per tensor. Of sharded
    parameters (DTensors) v̂ is that of all shards, so that the result does not depend on the world size.

    On the CPU, models of four million parameters and more are updated by a function that torch.compile makes, if there is a
    C++ compiler, and everywhere else by some twenty operators for all tensors together.

    >>> weight = torch.nn.Parameter(torch.zeros(4))
    >>> optimizer = ThresholdAdam([weight], lr=0.5, threshold=1.75)
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

    def _validate(self, options: dict[str, Any]) -> None:
        super()._validate(options)
        require_positive("threshold", options["threshold"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` returns."""
        loss = evaluate(closure)
        held = sum(param.numel() for group in self.param_groups for param in group["params"])
        for group in self.param_groups:
            for params in alike(group["params"]):
                self._update(params, group, held >= _WORTH_COMPILING)
        return loss

    def _update(self, params: Sequence[Tensor], group: dict[str, Any], compiles: bool) -> None:
        level, rate = group["threshold"] / LEVELS, float(group["lr"])
        states = [self.state[param] for param in params]
        scales = inverse_sizes(params, states, group)
        weights = [local_shard(param.detach()) for param in params]
        gradients = [local_shard(param.grad).reshape(-1) for param in params]  # type: ignore[arg-type]
        flat = [weight.reshape(-1) for weight in weights]  # a copy where it is not contiguous
        if group["weight_decay"]:
            torch._foreach_mul_(flat, 1 - rate * group["weight_decay"])
        dtype = wide(params[0])
        compiled = _compiled() if compiles and weights[0].device.type == "cpu" else None
        together: list[_Piece] = []
        for param, state, one, given, scale in zip(params, states, flat, gradients, scales, strict=True):
            if "residual" not in state:
                state["residual"] = _zeros(param)
            size, codes = one.numel(), state["residual"]
            if codes.dim() > 1:  # sharded
                codes = local_row(codes, [-(-size // 2)])
            piece = _Piece(*_halves(one), *_halves(given.to(dtype)), codes, scale / level)
            if compiled and size >= _COMPILED_FROM and size % 2 == 0:
                compiled(*piece[:-1], torch.tensor([piece.scale, rate * level], dtype=dtype))
            elif size:  # else sharded, and this rank has nothing of it
                together.append(piece)
        for pieces in _chunks(together):
            _move_together(pieces, rate * level)
        for weight, one in zip(weights, flat, strict=True):
            if not weight.is_contiguous():
                weight.copy_(one.view(weight.shape))

    def residual(self, param: Tensor) -> Tensor:
        """What has gathered on each coordinate of this process's shard since it moved last, in units of √v̂."""
        own, state = local_shard(param), self.state.get(param, {})
        if "residual" not in state:
            return torch.zeros(own.shape, dtype=wide(param), device=own.device)
        [threshold] = {float(g["threshold"]) for g in self.param_groups for other in g["params"] if other is param}
        levels = torch.cat(_levels(local_row(state["residual"], [-(-own.numel() // 2)])))[: own.numel()]
        return (levels.to(wide(param)) * (threshold / LEVELS)).view(own.shape)

    def _refuse_to_load(self, saved: dict[str, Any]) -> None:
        names = [name for group in saved["param_groups"] for name in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for name, param in zip(names, params, strict=False):
            state = saved["state"].get(name)
            if not state:
                continue
            if set(state) != {"step", "second_moment", "residual"}:
                raise InputError(
                    f"the state of parameter {name} has {', '.join(sorted(state))}; ThresholdAdam's has residual, "
                    "second_moment, step: load what a ThresholdAdam saved"
                )
            residual, expected = state["residual"], _zeros(param)
            if residual.shape != expected.shape or residual.dtype != torch.int8:
                raise InputError(
                    f"the residual of parameter {name} has shape {tuple(residual.shape)} in {residual.dtype}; a parameter of "
                    f"shape {tuple(param.shape)} needs {tuple(expected.shape)} in torch.int8, from as many processes"
                )


def _halves(flat: Tensor) -> tuple[Tensor, Tensor]:
    half = -(-flat.numel() // 2)
    return flat[:half], flat[half:]


def _move_together(pieces: Sequence[_Piece], rate: float) -> None:
    """One step of many tensors, in some twenty launches whatever their number; everything is counted in levels."""
    counts = [piece.codes.numel() for piece in pieces]
    odd = [count - piece.second.numel() for count, piece in zip(counts, pieces, strict=True)]
    given = [piece.given for piece in pieces] + [piece.given_second for piece in pieces]
    given = list(torch._foreach_mul(given, [piece.scale for piece in pieces] * 2))
    none = given[0].new_zeros(1)
    seconds = [
        part for one, missing in zip(given[len(pieces) :], odd, strict=True) for part in ((one, none) if missing else (one,))
    ]
    gathered = torch.cat([*given[: len(pieces)], *seconds])
    gathered += torch.cat(_levels(torch.cat([piece.codes for piece in pieces])))
    kept = torch.sub(gathered, hardshrink(gathered, LEVELS)).round_()  # 0 above the threshold
    low, high = kept.to(torch.int8).chunk(2)
    torch._foreach_copy_([piece.codes for piece in pieces], torch.add(low, high, alpha=16).split(counts))
    first, second = (half.split(counts) for half in gathered.sub_(kept).chunk(2))
    steps = [*first, *(half[:-1] if missing else half for half, missing in zip(second, odd, strict=True))]
    torch._foreach_add_([piece.first for piece in pieces] + [piece.second for piece in pieces], steps, alpha=-rate)


def _move_halves(first: Tensor, second: Tensor, given: Tensor, given_second: Tensor, codes: Tensor, numbers: Tensor) -> None:
    """:func:`_move_together` for the two halves of one tensor, as a function of which torch.compile makes one loop."""
    scale, rate = numbers.unbind()
    levels = []
    for weight, gradient, level in zip((first, second), (given, given_second), _levels(codes.to(torch.int32)), strict=True):
        gathered = gradient * scale + level
        kept = torch.where(gathered.abs() <= LEVELS, gathered.round(), 0.0)
        weight.sub_(rate * (gathered - kept))
        levels.append(kept)
    codes.copy_((levels[0] + 16 * levels[1]).to(torch.int8))


def _levels(codes: Tensor) -> tuple[Tensor, Tensor]:
    """The levels −7 … 7 of the first half of a tensor, and of the second."""
    high = (codes + 8) >> 4
    return torch.sub(codes, high, alpha=16), high


@cache
def _compiled() -> Callable[..., None] | None:
    """None without a C++ compiler."""
    return torch.compile(_move_halves, dynamic=True) if any(map(which, ("c++", "g++", "clang++"))) else None


def _chunks(pieces: Sequence[_Piece]) -> Iterator[Sequence[_Piece]]:
    """All pieces at once; on the CPU parts of tensors, or some tensors, whose numbers stay in the cache."""
    limit = _CHUNK if pieces and pieces[0].codes.device.type == "cpu" else sys.maxsize
    chunk: list[_Piece] = []
    held = 0
    for piece in pieces:
        for begin in range(0, piece.codes.numel(), limit):
            first, second, given, given_second, codes = (one[begin : begin + limit] for one in piece[:5])
            part = _Piece(first, second, given, given_second, codes, piece.scale)
            if held + part.codes.numel() > limit:
                yield chunk
                chunk, held = [], 0
            chunk.append(part)
            held += part.codes.numel()
    if chunk:
        yield chunk


def _zeros(param: Tensor) -> Tensor:
    if is_sharded(param):
        return sharded_zeros(param, -(-largest_shard_size(param) // 2), torch.int8)
    return torch.zeros(-(-param.numel() // 2), dtype=torch.int8, device=param.device)
