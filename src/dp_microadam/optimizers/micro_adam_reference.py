"""Reference implementation of DP-MicroAdam's update, written to be compared with the paper: Algorithms 1 (lines 6–15) and 2.

Hudişteanu, Kalinin and Cyffers, "DP-MicroAdam: Private and Frugal Algorithm for Training and Fine-tuning", 2025.

Everything is dense: the window 𝒢 is a matrix of m rows, residual codes take four bytes each, and blocks and buckets are visited
one at a time. :class:`dp_microadam.MicroAdam` computes the same from packed state; tests check that the two agree.

Where the paper's notation is inaccurate, this follows its meaning: T_k(|a|) picks positions by magnitude and keeps the signed
values, and the newest row of the window has age 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dp_microadam.optimizers.exact_state import evaluate

BLOCK, BUCKET, LEVELS = 32_768, 128, 15


class MicroAdamReference(torch.optim.Optimizer):
    """A slow, readable implementation of :class:`dp_microadam.MicroAdam`: same options, dense state, no input checks."""

    def __init__(
        self,
        params: Iterable[Tensor],
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
    ) -> None:
        options = dict(locals())
        super().__init__(params, {k: v for k, v in options.items() if k not in ("self", "params", "__class__")})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        for group in self.param_groups:
            for theta in group["params"]:
                if theta.grad is not None and theta.numel() > 0:
                    state = self.state[theta] or self._initial_state(theta, group)
                    self._update(theta, theta.grad.float().reshape(-1), state, group)
        return loss

    def _initial_state(self, theta: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        # Lines 2–3: the moments are not stored, they are rebuilt from the window.
        d, buckets = theta.numel(), math.ceil(theta.numel() / BUCKET)
        self.state[theta] = {
            "t": 0,
            "codes": torch.zeros(d),
            "lower": torch.zeros(buckets),
            "upper": torch.zeros(buckets),
            "dense_error": torch.zeros(d),
            "window": torch.zeros(group["window"], d),
        }
        return self.state[theta]

    def _update(self, theta: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m, (beta_1, beta_2) = group["window"], group["betas"]
        state["t"] += 1
        t = state["t"]
        i = (t - 1) % m

        a = g + self._error(state, group)  # line 6
        block = len(a) if group["scope"] == "tensor" else BLOCK
        row = torch.zeros_like(a)
        for start in range(0, len(a), block):
            part = a[start : start + block]
            k = max(1, math.ceil(group["density"] * len(part) - 1e-9))
            selected = part.abs().topk(k).indices  # line 7
            row[start + selected] = part[selected]  # line 8
            part[selected] = 0  # line 9
        state["window"][i] = row.bfloat16().float() if group["quantize"] else row
        self._store_error(a, state, group)  # lines 10–11

        ages = [(i - slot) % m for slot in range(min(t, m))]
        corrected = t if group["bias_correction"] == "paper" else min(t, m)
        m_hat = adam_stats(beta_1, state["window"], ages, corrected)  # line 12
        v_hat = adam_stats(beta_2, state["window"].square(), ages, corrected)  # line 13
        if group["bias_correction"] == "steady":  # where the paper's correction arrives
            m_hat, v_hat = m_hat * (1 - beta_1**m), v_hat * (1 - beta_2**m)
        if group["weight_decay"] != 0:
            theta.mul_(1 - group["lr"] * group["weight_decay"])
        theta.sub_((group["lr"] * m_hat / (group["eps"] + v_hat.sqrt())).view_as(theta))  # line 14

    def _error(self, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if not group["quantize"]:
            return state["dense_error"]
        error = torch.empty_like(state["codes"])
        for b, start in enumerate(range(0, len(error), BUCKET)):
            bucket = slice(start, start + BUCKET)
            error[bucket] = q_inverse(state["codes"][bucket], state["lower"][b], state["upper"][b])
        return error

    def _store_error(self, a: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["dense_error"] = a.clone()
        for b, start in enumerate(range(0, len(a), BUCKET)):
            bucket = slice(start, start + BUCKET)
            state["lower"][b], state["upper"][b] = a[bucket].min(), a[bucket].max()
            state["codes"][bucket] = q(a[bucket], state["lower"][b], state["upper"][b])


def adam_stats(beta: float, window: Tensor, ages: list[int], t: int) -> Tensor:
    """ADAMStats of Algorithm 2: (1 − β)·Σ βᵃᵍᵉ·row / (1 − βᵗ)."""
    z = torch.zeros_like(window[0])
    for row, age in zip(window, ages, strict=False):
        z = z + row * beta**age
    return z * ((1 - beta) / (1 - beta**t))


def q(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Q of Algorithm 2."""
    u = (upper - lower) / LEVELS
    if u == 0:
        return torch.zeros_like(x)
    return ((x - lower) / u + 0.5).floor().clamp(0, LEVELS)


def q_inverse(codes: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Q⁻¹ of Algorithm 2."""
    u = (upper - lower) / LEVELS
    return codes * u + lower
