"""DP-AdamBC: Adam with the noise variance subtracted from its second moment (Tang, Shpilevskiy and Lécuyer, 2023)."""

from __future__ import annotations

from typing import Any

from torch import nn

from dp_microadam.methods.registry import make_optimizer, trainable
from dp_microadam.training.method import Method
from dp_microadam.training.rates import RunNoise


def dp_adambc(model: nn.Module, *, lr: float = 1e-3, **options: Any) -> Method:
    """DP-AdamBC: p ← p − lr·m̂/√max(v̂ − (σC/B)², floor).

    ``floor``, ``betas`` and ``weight_decay`` are those of :class:`~dp_microadam.optimizers.adam_bc.AdamBC`. The trainer passes
    the noise standard deviation σC/B of the run to the optimizer, so it is never typed a second time. Without privacy there
    is no noise to correct for; the method is then Adam with a floor for v̂.
    """
    return NoiseCorrection(make_optimizer("adambc", trainable(model), lr, options))


class NoiseCorrection(Method):
    """Sets AdamBC's ``noise_variance`` to the variance of the noise in its gradients, (σC/B)²."""

    def prepare(self, noise: RunNoise, steps: int) -> None:
        super().prepare(noise, steps)
        for group in self.optimizer.param_groups:
            group["noise_variance"] = noise.deviation**2
