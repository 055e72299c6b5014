"""Units of learning rates: a plain factor of the step, or the distance that the noise of the run walks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dp_microadam.errors import InputError
from dp_microadam.optimizers.tensor_adam import TensorAdam
from dp_microadam.optimizers.threshold_adam import ThresholdAdam
from dp_microadam.plan.learning_rate import walk_scale

ABSOLUTE = "absolute"
WALK = "walk"
LR_UNITS = (ABSOLUTE, WALK)
"""What a learning rate is: the optimizer's own, or relative to the noise of the run, as ``plan/learning_rate.py`` says."""

DIVIDE_BY_GRADIENT_SIZE = (
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    TensorAdam,
    ThresholdAdam,
)
"""Optimizers whose steps do not depend on the size of the gradients, AdamW among them: under noise, a step of rate η is η times
independent noise of deviation 1."""


@dataclass(frozen=True)
class RunNoise:
    """The noise of a run in each coordinate of a mean. Public.

    ``single_step`` is its standard deviation in one step, 0 without privacy. ``horizon`` is the number of steps over which
    independent noise of that deviation adds up to what the whole run leaves in the sum of its means: all ``steps`` with one
    band, fewer with correlated noise.
    """

    single_step: float
    horizon: float
    steps: float | None = None


def walk_factor(optimizer: torch.optim.Optimizer, noise: RunNoise, parameters: int) -> float:
    """By which a learning rate of unit ``"walk"`` is multiplied for this optimizer.

    With rate r the noise alone moves the weights by r·d^¼ in the whole run, d being ``parameters``.

    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(10_000))], lr=2.0)
    >>> walk_factor(sgd, RunNoise(single_step=0.01, horizon=100), 10_000)   # 0.1/(0.01·√100)
    1.0

    Raises:
        InputError: for optimizers that are neither SGD nor of Adam's kind, and for SGD in a run without noise.
    """
    steps = walk_scale(parameters) / math.sqrt(noise.horizon)
    if isinstance(optimizer, DIVIDE_BY_GRADIENT_SIZE):
        return steps
    if not isinstance(optimizer, torch.optim.SGD):
        raise InputError(
            f"lr_unit is 'walk', but the optimizer is {type(optimizer).__name__}; it is defined for SGD, Adam, AdamW, "
            "TensorAdam and ThresholdAdam, so use one of these or lr_unit 'absolute'"
        )
    if not noise.single_step:
        raise InputError(
            "lr_unit is 'walk', which measures SGD's learning rate by the noise, but this run adds none; use lr_unit 'absolute'"
        )
    # Momentum repeats every gradient β, β², … times; dampening, if given, takes its place.
    momentum, dampening = optimizer.defaults["momentum"], optimizer.defaults["dampening"]
    return steps / noise.single_step * (1 - momentum) / (1 - dampening if momentum else 1)
