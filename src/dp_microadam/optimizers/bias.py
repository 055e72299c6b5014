"""By what MicroAdam multiplies the two sums over its window: Adam's bias corrections, or one second moment for a tensor."""

from __future__ import annotations

import math
from typing import Any

CORRECTIONS = ("paper", "steady", "window")
SECOND_MOMENTS = ("tensor", "coordinate")


def bias_correction(beta: float, step: int, group: dict[str, Any]) -> float:
    """The factor of the window's sum Σ βᵃ·row, for the group's choice of ``bias_correction``.

    The window holds only the terms β⁰ … β^(m−1), which sum to (1 − βᵐ)/(1 − β). ``"paper"`` nevertheless divides by 1 − βᵗ,
    so that moments shrink during the first steps, down to 1 − βᵐ times a weighted mean. ``"steady"`` uses that final factor
    from the first step on. ``"window"`` makes the moments the weighted mean itself.

    >>> def factors(choice: str, beta: float = 0.9) -> list[float]:
    ...     group = {"bias_correction": choice, "window": 10}
    ...     return [round(bias_correction(beta, step, group), 3) for step in (1, 10, 1000)]
    >>> factors("paper"), factors("steady"), factors("window")
    ([1.0, 0.154, 0.1], [0.651, 0.1, 0.1], [1.0, 0.154, 0.154])
    """
    choice, window = group["bias_correction"], group["window"]
    terms = step if choice == "paper" else min(step, window)
    limit = 1 - beta**window if choice == "steady" else 1.0
    return float(limit * (1 - beta) / (1 - beta**terms))


def scales(step: int, group: dict[str, Any], second_moment: float | None) -> list[float]:
    """The factors of Σ β₁ᵃ·row and Σ β₂ᵃ·row² that make a step lr·(first sum)/(√(second sum) + eps).

    ``second_moment`` is the average of g² over the tensor and over past steps, not yet bias-corrected, for groups with
    ``second_moment="tensor"``. The second sum then counts for nothing, and the first is divided by √v̂ + eps instead, and by the
    weights β₁ᵃ of the window: over its time in the window, a value moves its coordinate by lr/(√v̂ + eps) times itself.

    >>> group = {"second_moment": "tensor", "window": 1, "betas": (0.9, 0.75), "eps": 1e-8}
    >>> first, second = scales(1, group, 0.25)   # v̂ = 0.25/(1 − 0.75) = 1
    >>> round(first / group["eps"], 6), second
    (1.0, 0.0)
    """
    if second_moment is None:
        return [bias_correction(beta, step, group) for beta in group["betas"]]
    beta_1, beta_2 = group["betas"]
    root = math.sqrt(second_moment / (1 - beta_2**step))
    return [group["eps"] / (root + group["eps"]) / sum(beta_1**age for age in range(group["window"])), 0.0]
