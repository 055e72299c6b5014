"""Diagnostics of MicroAdam in a run: compression error, selected coordinates and step sizes.

Formal guarantees: every figure is computed from privatized gradients and from the optimizer's state, which is a function of
them. By post-processing they cost no privacy; in a run that is not private they are not private either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.optimizers.micro_adam import MicroAdam
from dp_microadam.validation import require_integer


class MicroAdamDiagnostics:
    """Measures every ``every``-th step of a :class:`MicroAdam` through its step hooks, per parameter group.

    - ``contraction``: ‖a − T_k(a)‖/‖a‖ of the accumulator a; the theorem's q, as it is in this step;
    - ``quantization_error``: ‖Q(x) − x‖/‖x‖ of the residual x = a − T_k(a); the theorem's ω;
    - ``joint_contraction``: (1 + ω)q of the two, and ``condition_holds``: whether it is below 1, as the theorem requires for
      every step and every possible a;
    - ``share_updated``: fraction of the coordinates selected at least once since step ``watched_since``;
    - ``overlap``: fraction of this step's selection that the previous step selected too;
    - ``effective_step_size``: median of η/(ε_s + √v̂) over the coordinates just selected.

    During a measured step a float32 copy of the accumulator is kept, and one byte per parameter records what was ever
    selected. Parameters and optimizer state are not changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, every: int) -> None:
        if not isinstance(optimizer, MicroAdam):
            raise InputError(f"the optimizer is {type(optimizer).__name__}; diagnostics are those of MicroAdam")
        self.every = require_integer("every", every, 1)
        self._optimizer = optimizer
        self._steps = 0
        self._watched_since: int | None = None
        self._accumulators: dict[Tensor, Tensor] = {}
        self._previous: dict[Tensor, Tensor] = {}
        self._selected_before: dict[Tensor, Tensor] = {}
        self._found: list[dict[str, Any]] | None = None
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]

    def take(self) -> list[dict[str, Any]] | None:
        """The figures of the last step, one entry per parameter group, if it was measured; they are returned only once."""
        found, self._found = self._found, None
        return found

    def close(self) -> None:
        """Remove the step hooks."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _before_step(self) -> None:
        self._steps += 1
        if self._watched_since is None:
            taken = [int(state["step"]) for state in self._optimizer.state.values() if state]
            self._watched_since = max(taken, default=0)
        if self._steps % self.every:
            return
        for group in self._optimizer.param_groups:
            for param in _updated(group):
                residual = self._optimizer.residual(param)
                if self._optimizer.state.get(param):
                    self._previous[param] = self._optimizer.window(param)[0][0]
                gradient = param.grad.reshape(-1).float()  # type: ignore[union-attr]
                self._accumulators[param] = gradient.clone() if residual is None else residual.add_(gradient)

    @torch.no_grad()
    def _after_step(self) -> None:
        measured = bool(self._accumulators)
        found = []
        for number, group in enumerate(self._optimizer.param_groups):
            for param in _updated(group):
                # The window holds this many selections, so reading it this often misses none.
                if measured or int(self._optimizer.state[param]["step"]) % group["window"] == 0:
                    self._remember_selections(param)
            if measured:
                found.append({"group": number, **self._measure(group)})
        self._accumulators.clear()
        self._previous.clear()
        if measured:
            self._found = found

    def _remember_selections(self, param: Tensor) -> None:
        if param not in self._selected_before:
            self._selected_before[param] = torch.zeros(param.numel(), dtype=torch.bool, device=param.device)
        coordinates, _ = self._optimizer.window(param)
        self._selected_before[param].index_fill_(0, coordinates.view(-1), True)

    def _measure(self, group: dict[str, Any]) -> dict[str, Any]:
        whole = left = lost = 0.0
        repeated = selected = covered = coordinates = 0
        step_sizes = []
        for param in _updated(group):
            accumulator = self._accumulators[param]
            window, _ = self._optimizer.window(param)
            whole += _square(accumulator)
            accumulator[window[0]] = 0.0
            left += _square(accumulator)
            residual = self._optimizer.residual(param)
            lost += 0.0 if residual is None else _square(residual.sub_(accumulator))
            if param in self._previous:
                repeated += int(torch.isin(window[0], self._previous[param], assume_unique=True).sum())
            selected += window.shape[1]
            covered += int(self._selected_before[param].sum())
            coordinates += param.numel()
            second = self._optimizer.second_moment(param)
            assert second is not None, "a step has just been taken"
            step_sizes.append(float(group["lr"]) / (second.reshape(-1)[window[0]].sqrt_() + group["eps"]))
        contraction, quantization = _ratio(left, whole), _ratio(lost, left)
        joint = (1 + quantization) * contraction
        return {
            "contraction": contraction,
            "quantization_error": quantization,
            "joint_contraction": joint,
            "condition_holds": joint < 1,
            "share_updated": covered / max(1, coordinates),
            "watched_since": self._watched_since,
            "overlap": repeated / max(1, selected),
            "effective_step_size": float(torch.cat(step_sizes).median()) if step_sizes else math.nan,
        }


def _updated(group: dict[str, Any]) -> Iterator[Tensor]:
    return (param for param in group["params"] if param.grad is not None and param.numel() > 0)


def _square(values: Tensor) -> float:
    return float(torch.dot(values, values))


def _ratio(part: float, whole: float) -> float:
    return math.sqrt(part / whole) if whole > 0 else 0.0
