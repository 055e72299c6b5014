"""AdamBC: Adam with a second moment that is corrected for gradient noise of known variance.

Tang, Shpilevskiy and Lécuyer, "DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply Bias Correction)" (2023). Noise of
variance φ adds φ to every coordinate of v̂; where φ dominates, Adam's steps are no longer adaptive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dp_microadam.optimizers.exact_state import ExactStateOptimizer, evaluate
from dp_microadam.validation import public, require_non_negative, require_positive

DEFAULT_FLOOR = 5e-8


@public
class AdamBC(ExactStateOptimizer):
    """Adam that subtracts the noise variance from v̂: p ← p − lr·m̂/√max(v̂ − noise_variance, floor).

    m̂ and v̂ are Adam's bias-corrected moments. ``lr`` and ``betas`` are Adam's; ``weight_decay`` is decoupled as in AdamW.

    Arguments:
        noise_variance: φ, the variance of the noise in each coordinate of the gradient; with 0 nothing is corrected.
        floor: the smallest value used for v̂ − φ, which is an estimate and often negative. It bounds a step to
            lr·|m̂|/√floor and replaces Adam's ``eps``. The smaller it is, the larger are the steps of coordinates in which
            the signal is hidden by noise. The experiments of DP-MicroAdam's authors used 5e-8; AdamBC's own authors tune
            it from 1e-9 to 7e-9.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = AdamBC([weight], lr=0.1, noise_variance=9.0, floor=1.0)
    >>> weight.grad = torch.tensor([5.0])
    >>> optimizer.step()
    >>> round(weight.item(), 6)   # v̂ = 25, so the step is 0.1·5/√(25 − 9)
    -0.125
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = DEFAULT_FLOOR,
        weight_decay: float = 0.0,
        *,
        noise_variance: float = 0.0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "floor": floor, "weight_decay": weight_decay, "noise_variance": noise_variance}
        super().__init__(params, options)

    def _validate(self, options: dict[str, Any]) -> None:
        super()._validate(options)
        require_positive("floor", options["floor"])
        require_non_negative("noise_variance", options["noise_variance"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` returns."""
        loss = evaluate(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.numel() > 0:
                    state = self.state[param] or self._initialize(param)
                    state["step"] += 1
                    if group["weight_decay"] != 0:
                        param.mul_(1 - float(group["lr"]) * group["weight_decay"])
                    param.sub_(_corrected_step(param.grad, state, group))
        return loss

    def _initialize(self, param: Tensor) -> dict[str, Any]:
        # Float32 or wider, whatever the parameter's dtype: squares of small gradients underflow in narrower ones.
        dtype = torch.promote_types(param.dtype, torch.float32)
        state = self.state[param]
        state["step"] = torch.zeros((), dtype=torch.int64)
        state["first_moment"] = torch.zeros_like(param, dtype=dtype)
        state["second_moment"] = torch.zeros_like(param, dtype=dtype)
        return state


def _corrected_step(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Update the moments with the gradient and return lr·m̂/√max(v̂ − φ, floor)."""
    (beta_1, beta_2), step = group["betas"], int(state["step"])
    first, second = state["first_moment"], state["second_moment"]
    gradient = gradient.to(first.dtype)
    first.lerp_(gradient, 1 - beta_1)
    second.mul_(beta_2).addcmul_(gradient, gradient, value=1 - beta_2)
    signal = (second / (1 - beta_2**step)).sub_(group["noise_variance"]).clamp_(min=group["floor"])
    return first.mul(float(group["lr"]) / (1 - beta_1**step)).div_(signal.sqrt_())
