"""Learning rates that follow from the plan: how far the noise of a run may carry the weights.

Noise of standard deviation τ = σC/B per coordinate and step adds a random walk to the weights. After T steps of SGD with
learning rate η it has length η·τ·√(T·d) for d parameters, whatever the data are. For convex losses the step size with the best
bound is D/(G·√T) (Zinkevich, 2003), where D is the distance from the start to the solution and G² the mean squared norm of
the gradients. Under privacy G² ≈ d·τ², because noise dominates, so that the best step size is the one whose noise walks as far
as the solution is away: η·τ·√(T·d) = D. With correlated noise τ·√T is replaced by what is left of the noise in the running sum.

σ, C, B, T and d are public. D is not known, but it varies little: D = 1.5·d^¼ is within a factor of 1.5 of the best of
six for networks of 26,010 and 203,530 parameters at ε = 1 and 8.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dp_microadam.validation import require_integer

if TYPE_CHECKING:
    from dp_microadam.plan.plan import PrivacyPlan

DISTANCE = 1.5
"""The distance D that the noise of a run walks, relative to d^¼."""

WIDE, WIDE_GROWTH = 250_000, 1 / 6
"""Networks that begin anew with more weights than this walk farther than d^¼ says, by this power of how many more they have."""


def distance_from_scratch(parameters: int) -> float:
    """The distance, relative to d^¼, of networks of d ``parameters`` none of which are pretrained.

    Fully connected ones of 1,068,810 and 4,770,314 parameters do better with two to two and a half than with 1.5
    (``docs/choosing.md``).

    >>> [round(distance_from_scratch(size), 2) for size in (26_010, 1_068_810, 4_770_314)]
    [1.5, 1.91, 2.45]
    """
    return DISTANCE * max(1.0, require_integer("parameters", parameters, 1) / WIDE) ** WIDE_GROWTH


ADAPTER_DISTANCE = 0.75
"""The same for adapters (LoRA): a longer walk carries pretrained weights away from what they know (``docs/choosing.md``)."""


def walk_scale(parameters: int) -> float:
    """The standard deviation of each coordinate of a walk of length d^¼, for d parameters: d^¼/√d.

    >>> walk_scale(10_000)
    0.1
    """
    return float(require_integer("parameters", parameters, 1) ** -0.25)


def relative_noise(plan: PrivacyPlan, parameters: int) -> float:
    """How long the noise in the sum of all mean gradients is, about τ·√(T·d), relative to T·C, the longest that the sum can be.

    ``docs/choosing.md`` has accuracies beside this number.

    >>> from dp_microadam.plan.plan import PrivacyPlan
    >>> round(relative_noise(PrivacyPlan(60, 8, 1.1296, 200, 1e-3), 26_010), 2)
    1.61
    """
    return plan.noise_walk() * math.sqrt(require_integer("parameters", parameters, 1)) / plan.steps


def too_much_noise(plan: PrivacyPlan, parameters: int, unit: str) -> str | None:
    """A sentence for plans whose noise is longer than all gradients of its ``unit``s together can be; else None."""
    relative = relative_noise(plan, parameters)
    if relative <= 1:
        return None
    return (
        f"the noise of this plan is {relative:.1f} times as long as the sum of all its gradients can be; from scratch, "
        f"{parameters:,} parameters hardly learn then: more {unit}s, a larger ε or fewer trained parameters help"
    )
