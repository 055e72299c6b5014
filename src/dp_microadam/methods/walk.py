"""DP-Walk: TensorAdam with the learning rate that follows from the plan, so that none has to be chosen."""

from __future__ import annotations

from typing import Any

from torch import nn

from dp_microadam.methods.step_optimizers import make_optimizer, trainable
from dp_microadam.plan.learning_rate import DISTANCE
from dp_microadam.training.method import Method
from dp_microadam.training.rate_units import WALK


def dp_walk(model: nn.Module, *, lr: float = DISTANCE, **options: Any) -> Method:
    """p ← p − η·g̃/√v̂ with one v̂ per tensor; η is such that the noise of the run walks a distance of lr·d^¼.

    ``beta``, ``eps`` and ``weight_decay`` are those of :class:`~dp_microadam.optimizers.tensor_adam.TensorAdam`. How the rate
    follows from the plan is derived in ``plan/learning_rate.py``.
    """
    return Method(make_optimizer("tensor-adam", trainable(model), lr, options), lr_unit=WALK)
