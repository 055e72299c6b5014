"""DP-AdamBC: Adam whose second moment is freed of the noise's part (Tang, Shpilevskiy and Lécuyer, 2023)."""

from __future__ import annotations

from typing import Any

from torch import nn

from dp_microadam.methods.step_optimizers import make_optimizer, trainable
from dp_microadam.training.method import Method


def dp_adambc(model: nn.Module, *, lr: float = 1e-3, **options: Any) -> Method:
    """p ← p − lr·m̂/√max(v̂ − (σC/B)², floor); ``floor``, ``betas`` and ``weight_decay`` are those of
    :class:`~dp_microadam.optimizers.adam_bc.AdamBC`.

    The trainer tells the optimizer what noise it adds, so σ, C and B are those of the run and stand nowhere else. Without
    privacy there is no noise to correct for, and what is left is Adam with a floor under v̂.
    """
    return NoiseCorrection(make_optimizer("adambc", trainable(model), lr, options))


class NoiseCorrection(Method):
    """Tells AdamBC the variance of the noise in its gradients, (σC/B)²."""

    def calibrate(self, noise_deviation: float) -> None:
        for group in self.optimizer.param_groups:
            group["noise_variance"] = noise_deviation**2
