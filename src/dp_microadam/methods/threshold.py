"""DP-Threshold: ThresholdAdam with the learning rate that follows from the plan. The default method of recipes."""

from __future__ import annotations

from typing import Any

from torch import nn

from dp_microadam.methods.step_optimizers import make_optimizer, trainable
from dp_microadam.plan.learning_rate import DISTANCE
from dp_microadam.training.method import Method
from dp_microadam.training.rate_units import WALK


def dp_threshold(model: nn.Module, *, lr: float = DISTANCE, **options: Any) -> Method:
    """Gradients gather until their sum exceeds a threshold; then the coordinate moves by η/√v̂ times the sum.

    η is such that the noise of the run walks a distance of lr·d^¼, as ``plan/learning_rate.py`` derives it. ``threshold``,
    ``beta``, ``eps`` and ``weight_decay`` are those of :class:`~dp_microadam.optimizers.threshold_adam.ThresholdAdam`.
    """
    return Method(make_optimizer("threshold-adam", trainable(model), lr, options), lr_unit=WALK)
