"""Noisy-MicroAdam: the variant of DP-MicroAdam that the convergence theorem is about (Algorithm 3 of the paper).

It differs from the optimizer used for training: moments are dense and never forget, v̂ never decreases (AMSGrad), there is no
bias correction, ε_s is under the root, and the residual is rounded stochastically, which makes its compression unbiased.
Train with :class:`dp_microadam.MicroAdam`; this class is for checking the theorem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dp_microadam.optimizers.exact_state import ExactStateOptimizer, evaluate
from dp_microadam.optimizers.quantization import bucket_bounds, dequantize, derive_key, quantize, rounding_offsets
from dp_microadam.validation import (
    require_in_closed_open,
    require_in_open_closed,
    require_integer,
    require_non_negative,
    require_positive,
)


class NoisyMicroAdam(ExactStateOptimizer):
    """Algorithm 3, for gradients that already contain their noise: ``p.grad`` is g_t + η_t.

    The paper's line 5 leaves the noise out of the residual. Its proof and the algorithm used for training keep it, and so
    does this class. The compressors T and Q act on each parameter as one vector.

    Arguments:
        lr: the learning rate η.
        betas: β₁ and β₂.
        eps: ε_s, under the root.
        density: the fraction of coordinates that T keeps.
        quantize: ``False`` makes Q the identity (ω = 0).
        seed: the seed of stochastic rounding.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        density: float = 0.01,
        quantize: bool = True,
        seed: int = 0,
    ) -> None:
        require_non_negative("lr", float(lr))
        for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
            require_in_closed_open(name, beta, 0.0, 1.0)
        require_positive("eps", eps)
        require_in_open_closed("density", density, 0.0, 1.0)
        require_integer("seed", seed, 0)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "density": density, "quantize": quantize, "seed": seed}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One iteration of Algorithm 3; returns what ``closure`` returns."""
        loss = evaluate(closure)
        position = -1
        for group in self.param_groups:
            for theta in group["params"]:
                position += 1
                if theta.grad is None or theta.numel() == 0:
                    continue
                state = self.state[theta]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.int64)
                    state["rounding_key"] = torch.tensor(derive_key(group["seed"], position))
                    wide = torch.promote_types(theta.dtype, torch.float32)
                    for name in ("error", "first", "second", "largest_second"):
                        state[name] = torch.zeros(theta.numel(), dtype=wide, device=theta.device)
                _iterate(theta, theta.grad.reshape(-1), state, group)
        return loss


def _iterate(theta: Tensor, noisy_gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    (beta_1, beta_2) = group["betas"]
    state["step"] += 1
    accumulated = noisy_gradient + state["error"]  # line 4
    compressed = torch.zeros_like(accumulated)
    kept = max(1, math.ceil(group["density"] * len(accumulated) - 1e-9))
    selected = accumulated.abs().topk(kept).indices
    compressed[selected] = accumulated[selected]
    residual = accumulated - compressed
    if group["quantize"]:
        residual = randomly_rounded(residual, derive_key(int(state["rounding_key"]), int(state["step"])))
    state["error"].copy_(residual)  # line 5
    state["first"].mul_(beta_1).add_(compressed, alpha=1 - beta_1)  # line 6
    state["second"].mul_(beta_2).addcmul_(compressed, compressed, value=1 - beta_2)  # line 7
    torch.maximum(state["largest_second"], state["second"], out=state["largest_second"])  # line 8
    update = state["first"] / (state["largest_second"] + group["eps"]).sqrt()
    theta.sub_(update.view_as(theta) * float(group["lr"]))  # line 9


def randomly_rounded(values: Tensor, key: int) -> Tensor:
    """The paper's unbiased compressor Q: 4 bits between the vector's minimum and maximum, with stochastic rounding."""
    row = values.float().unsqueeze(0)
    lower, upper = bucket_bounds(row)
    offsets = rounding_offsets(key, 0, len(values), values.device).unsqueeze(0)
    return dequantize(quantize(row, lower, upper, offsets), lower, upper).squeeze(0).to(values.dtype)
