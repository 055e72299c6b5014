"""TensorAdam: Adam with one second moment per tensor and no first moment, so that it keeps four bytes per tensor.

Second moments shared by a block of weights are from Zhang et al., "Adam-mini: Use Fewer Learning Rates To Gain More" (2024).
Under the noise of private training all coordinates of a tensor have nearly the same second moment anyway, that of the noise
("Your DP-Adam Is Actually DP-SGD", Tang et al. 2023), and a first moment averages what the weights average themselves.
Unlike Adam's, a step is linear in the gradient: nothing of the signal is lost, and correlated noise cancels over steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dp_microadam.optimizers.exact_state import ExactStateOptimizer, evaluate
from dp_microadam.optimizers.shards import local_shard
from dp_microadam.optimizers.tensor_moment import mean_square
from dp_microadam.validation import require_in_closed_open, require_non_negative, require_positive


class TensorAdam(ExactStateOptimizer):
    """p ← p − lr·g/(√v̂ + eps), where v̂ is the bias-corrected average of g² over the tensor and over past steps.

    ``lr`` is the root mean square of a step's coordinates, as it is at most with Adam; ``beta`` is Adam's β₂; ``weight_decay``
    is decoupled as in AdamW. The state is one float32 per tensor and a step counter. Of sharded parameters (DTensors) the mean
    of g² is taken over all shards, so that the result does not depend on the world size.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, -1.0])
    >>> TensorAdam([weight], lr=0.5).step()   # the root mean square of 3 and −1 is √5
    >>> [round(value, 4) for value in weight.tolist()]
    [-0.6708, 0.2236]
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, beta: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        options = {**self.defaults, **param_group}
        require_non_negative("lr", float(options["lr"]))
        require_in_closed_open("beta", options["beta"], 0.0, 1.0)
        require_positive("eps", options["eps"])
        require_non_negative("weight_decay", options["weight_decay"])
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` returns."""
        loss = evaluate(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.numel() > 0:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64)
            state["second_moment"] = torch.zeros(1, device=param.device)
        state["step"] += 1
        rate, beta = float(group["lr"]), group["beta"]
        gradient = gradient.to(torch.promote_types(param.dtype, torch.float32))
        second = state["second_moment"].lerp_(mean_square(gradient), 1 - beta)
        if group["weight_decay"] != 0:
            param.mul_(1 - rate * group["weight_decay"])
        root = (second / (1 - beta ** int(state["step"]))).sqrt_().add_(group["eps"]).squeeze(0)
        own, given = local_shard(param), local_shard(gradient)
        own.sub_(given * (rate / root))

    def state_bytes(self) -> int:
        """Size of the optimizer state in this process, in bytes."""
        return sum(value.numel() * value.element_size() for state in self.state.values() for value in state.values())
