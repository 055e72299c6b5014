"""Adam's bias correction, for moments rebuilt from a window."""

from __future__ import annotations

from typing import Any

CORRECTIONS = ("paper", "steady", "window")


def bias_correction(beta: float, step: int, group: dict[str, Any]) -> float:
    """What the window's sum Σ βᵃ·row is multiplied with, by the group's choice.

    The window holds only the terms β⁰ … β^(m−1), which sum to (1 − βᵐ)/(1 − β). The paper divides by 1 − βᵗ all the same, so
    that its moments shrink until they arrive at 1 − βᵐ of a mean; ``"steady"`` has them there from the first step on, and
    ``"window"`` makes them the mean itself.

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
