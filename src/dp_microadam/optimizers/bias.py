"""Adam's bias correction, for moments rebuilt from a window."""

from __future__ import annotations

from typing import Any


def bias_correction(beta: float, step: int, group: dict[str, Any]) -> float:
    """(1 − β)/(1 − βᵗ); with t held at the window's length if the group asks for the window's own correction.

    The window holds only the terms β⁰ … β^(m−1), which sum to (1 − βᵐ)/(1 − β). The paper divides by 1 − βᵗ all the same.

    >>> group = {"bias_correction": "paper", "window": 10}
    >>> round(bias_correction(0.9, 1, group), 9), round(bias_correction(0.9, 1000, group), 9)
    (1.0, 0.1)
    """
    terms = step if group["bias_correction"] == "paper" else min(step, group["window"])
    return float((1 - beta) / (1 - beta**terms))
