"""Adam's bias correction for moments that are computed from a window of past gradients."""

from __future__ import annotations

from typing import Any

CORRECTIONS = ("paper", "steady", "window")


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
