"""TensorAdam: Adam with one second moment per tensor and no first moment, so that it keeps four bytes per tensor.

Second moments shared by a block of weights are from Zhang et al., "Adam-mini: Use Fewer Learning Rates To Gain More" (2024).
Under the noise of private training all coordinates of a tensor have nearly the same second moment anyway, that of the noise
("Your DP-Adam Is Actually DP-SGD", Tang et al. 2023), and a first moment averages what the weights average themselves.
Unlike Adam's, a step is linear in the gradient: nothing of the signal is lost, and correlated noise cancels over steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dp_microadam.optimizers.exact_state import ExactStateOptimizer, evaluate
from dp_microadam.optimizers.shards import is_sharded, local_shard
from dp_microadam.validation import public


@public
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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what ``closure`` returns."""
        loss = evaluate(closure)
        for group in self.param_groups:
            for params in alike(group["params"]):
                scales = inverse_sizes(params, [self.state[param] for param in params], group)
                weights = [local_shard(param) for param in params]
                gradients = [local_shard(param.grad).to(wide(param)) for param in params]  # type: ignore[arg-type]
                rate = float(group["lr"])
                if group["weight_decay"]:
                    torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
                torch._foreach_sub_(weights, torch._foreach_mul(gradients, [rate * scale for scale in scales]))
        return loss


def alike(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """The parameters that have a gradient, by device and dtype: what can be updated together."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in params:
        if param.grad is not None and param.numel() > 0:
            found.setdefault((param.device, param.dtype), []).append(param)
    return list(found.values())


def inverse_sizes(params: Sequence[Tensor], states: Sequence[dict[str, Any]], group: dict[str, Any]) -> list[float]:
    """1/(√v̂ + eps) of each parameter, with the gradient that it has; counts the step in its state."""
    for state in states:
        if not state:
            state["step"], state["second_moment"] = torch.zeros((), dtype=torch.int64), torch.zeros(())
    steps, moments = ([state[name] for state in states] for name in ("step", "second_moment"))
    torch._foreach_add_(steps, 1)
    beta, squares = group["beta"], mean_squares([param.grad for param in params])  # type: ignore[misc]
    # In float32, as it is kept, so that a step after loading a state is the same.
    after = torch.tensor([beta * float(v) + (1 - beta) * now for v, now in zip(moments, squares, strict=True)])
    torch._foreach_copy_(moments, list(after.unbind()))
    return [1 / (math.sqrt(v / (1 - beta ** int(t))) + group["eps"]) for v, t in zip(after.tolist(), steps, strict=True)]


def mean_squares(gradients: Sequence[Tensor]) -> list[float]:
    """The mean of g² of each gradient; of a sharded one (DTensor) over all shards, which all ranks must ask for.

    The host waits for the device once, however many there are. Coordinates are added up in their own order, so that the layout
    in memory does not change how the sum is rounded.
    """
    given = [gradient.contiguous() for gradient in gradients]
    if gradients[0].dtype is not torch.float32 or any(map(is_sharded, gradients)):
        norms = [torch.linalg.vector_norm(gradient, dtype=wide(gradient)) for gradient in given]
        norms = [norm.full_tensor() if is_sharded(norm) else norm for norm in norms]
    else:
        norms = list(torch._foreach_norm(given))
    found: list[float] = torch.stack(norms).tolist()
    return [norm**2 / gradient.numel() for norm, gradient in zip(found, gradients, strict=True)]


def wide(tensor: Tensor) -> torch.dtype:
    """Float32, or the tensor's dtype if it is wider: squares of small gradients underflow in narrower ones."""
    return torch.promote_types(tensor.dtype, torch.float32)
