"""Methods that are nothing but an optimizer on privatized gradients: DP-MicroAdam, DP-SGD, DP-Adam and DP-AdamW."""

from __future__ import annotations

from typing import Any

from torch import nn

from dp_microadam.methods.step_optimizers import make_optimizer, trainable
from dp_microadam.training.method import Method


def dp_microadam(model: nn.Module, *, lr: float = 1e-3, **options: Any) -> Method:
    """MicroAdam on privatized gradients; ``options`` are :class:`~dp_microadam.optimizers.micro_adam.MicroAdam`'s.

    Its ablations are options: ``quantize=False`` (dense error), ``error_feedback=False``, ``scope="tensor"``,
    ``bias_correction="steady"`` or ``"window"``, ``rounding="stochastic"``, and any ``density``.
    """
    return Method(make_optimizer("microadam", trainable(model), lr, options))


def dp_sgd(model: nn.Module, *, lr: float = 4.0, **options: Any) -> Method:
    """p ← p − lr·g̃ (Abadi et al., 2016), by torch's SGD; ``momentum``, ``dampening``, ``nesterov``, ``weight_decay``."""
    return Method(make_optimizer("sgd", trainable(model), lr, options))


def dp_adam(model: nn.Module, *, lr: float = 1e-3, **options: Any) -> Method:
    """torch's Adam on privatized gradients; ``betas``, ``eps``, ``weight_decay``, ``amsgrad``."""
    return Method(make_optimizer("adam", trainable(model), lr, options))


def dp_adamw(model: nn.Module, *, lr: float = 1e-3, **options: Any) -> Method:
    """torch's AdamW on privatized gradients; ``betas``, ``eps``, ``weight_decay``, ``amsgrad``."""
    return Method(make_optimizer("adamw", trainable(model), lr, options))
