"""DP-MicroAdam: MicroAdam on privatized gradients, with the learning rate that follows from the plan."""

from __future__ import annotations

from typing import Any

from torch import nn

from dp_microadam.methods.step_optimizers import make_optimizer, trainable
from dp_microadam.plan.learning_rate import DISTANCE
from dp_microadam.training.method import Method
from dp_microadam.training.rate_units import ABSOLUTE, WALK


def dp_microadam(model: nn.Module, *, lr: float | None = None, **options: Any) -> Method:
    """Gradients add up until a coordinate is among the largest of its block; then it moves by η/√v̂ times their sum.

    Without ``lr`` the noise of the run walks a distance of 1.5·d^¼, as ``plan/learning_rate.py`` derives it. A given ``lr`` is
    MicroAdam's own, about what Adam's is. ``options`` are those of :class:`~dp_microadam.MicroAdam`; with ``density=0.01,
    window=10, second_moment="coordinate", bias_correction="paper", lr=1e-3`` it is the paper's optimizer.
    """
    optimizer = make_optimizer("microadam", trainable(model), DISTANCE if lr is None else lr, options)
    return Method(optimizer, lr_unit=WALK if lr is None else ABSOLUTE)
