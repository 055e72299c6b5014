"""Plans whose ε is for a group: somebody with up to k examples, or k users together. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dp_microadam.accounting.costs import LARGEST_NOISE_MULTIPLIER, group_epsilon
from dp_microadam.errors import InputError
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.validation import require_integer, require_positive

_GRID = 10_000
"""Noise multipliers are multiples of one over this."""
_CLOSE_ENOUGH = 1e-3
"""How much larger than the least one a solved noise multiplier may be, relatively."""


def solve_for_group(
    group_size: int,
    *,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    **plan: Any,
) -> PrivacyPlan:
    """Like :meth:`PrivacyPlan.solve`, where ``epsilon`` limits what ``group_size`` examples or users spend together.

    The solved number of steps is the largest that fits. The solved noise multiplier fits, and is at most a thousandth larger
    than the least that does. ``bands="auto"`` is one band here: what is known of groups is much weaker for several.

    Formal guarantees: if ``epsilon`` is given, :func:`~dp_microadam.accounting.costs.group_epsilon` of the finished plan is
    at most that. The plan's own ``epsilon`` is for one example or user, and smaller.

    >>> sizes = {"dataset_size": 45_000, "batch_size": 4096, "delta": 1e-5}
    >>> plan = solve_for_group(4, epsilon=8.0, steps=100, **sizes)
    >>> PrivacyPlan.solve(epsilon=8.0, steps=100, **sizes).noise_multiplier < plan.noise_multiplier
    True
    >>> 7.98 < group_epsilon([plan.spent_after(100)], plan.delta, 4) <= 8.0
    True

    Raises:
        InputError: for a value out of range, or if no plan exists.
    """
    require_integer("group_size", group_size, 1)
    if group_size > 1 and plan.get("bands", "auto") == "auto":
        plan["bands"] = 1
    if group_size > 1 and plan["bands"] == "least":
        raise InputError(f"bands is 'least', which compares plans for one unit, but group_size is {group_size}; give a number")
    one = PrivacyPlan.solve(epsilon=epsilon, noise_multiplier=noise_multiplier, steps=steps, epochs=epochs, **plan)
    if group_size == 1 or epsilon is None:
        return one

    def fits(noise_multiplier: float, steps: int) -> bool:
        try:
            spent = replace(one, noise_multiplier=noise_multiplier, steps=steps).spent_after(steps)
            return group_epsilon([spent], one.delta, group_size) <= epsilon
        except InputError:  # too little noise for the accountant, or too large a group for this much
            return False

    limit = require_positive("epsilon", epsilon)
    if noise_multiplier is None:
        most = LARGEST_NOISE_MULTIPLIER * _GRID
        found = _least(lambda ticks: fits(ticks / _GRID, one.steps), round(one.noise_multiplier * _GRID), most)
        if found is None:
            raise InputError(
                f"no noise_multiplier up to {LARGEST_NOISE_MULTIPLIER} keeps a group of {group_size} within epsilon {limit} "
                f"for {one.steps} steps; allow a larger epsilon or delta, fewer steps, or a smaller group"
            )
        return replace(one, noise_multiplier=found / _GRID)
    rounds = _most(lambda count: fits(noise_multiplier, count * one.bands), one.steps // one.bands)
    if not rounds:
        raise InputError(
            f"noise_multiplier {noise_multiplier} spends more than epsilon {limit} for a group of {group_size} in its first "
            "steps; it must be larger, or the batch or the group smaller"
        )
    return replace(one, steps=rounds * one.bands)


def _least(fits: Callable[[int], bool], start: int, most: int) -> int | None:
    """A number that fits and is at most a thousandth larger than the least; None if there is none up to ``most``."""
    low, high = 0, start
    while not fits(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > max(1, _CLOSE_ENOUGH * low):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _most(fits: Callable[[int], bool], above: int) -> int:
    """The largest number that fits; 0 if none does. ``above`` is a first guess from above, which may be too small."""
    low, high = 0, above + 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
