"""Solving for the noise multiplier or the number of steps of a plan. This module does not import torch."""

from __future__ import annotations

from dp_microadam.accounting.costs import (
    LARGEST_NOISE_MULTIPLIER,
    SubsampledGaussian,
    epsilon,
    least_noise_multiplier,
    most_steps,
)
from dp_microadam.accounting.truncated import Cap
from dp_microadam.errors import InputError


def solve_noise(
    sample_rate: float, steps: int, limit: float, delta: float, accountant: str, bands: int = 1, cap: Cap | None = None
) -> float:
    """The least noise multiplier that keeps ``steps`` steps, ⌈steps/bands⌉ of them of one group, within ε = ``limit``."""
    try:
        return least_noise_multiplier(sample_rate, -(-steps // bands), limit, delta, accountant, cap)
    except LookupError:
        raise InputError(
            f"no noise_multiplier up to {LARGEST_NOISE_MULTIPLIER} keeps {steps} steps within epsilon {limit} at delta "
            f"{delta:g}; allow a larger epsilon or delta, or fewer steps"
        ) from None


def solve_steps(
    sample_rate: float, noise_multiplier: float, limit: float, delta: float, accountant: str, cap: Cap | None
) -> int:
    """The largest number of steps of one group within ε = ``limit``."""
    try:
        steps = most_steps(sample_rate, noise_multiplier, limit, delta, accountant, cap)
    except LookupError:
        raise InputError(
            f"epsilon {limit} never runs out with noise_multiplier {noise_multiplier} and sample rate "
            f"{sample_rate:.3g}; give the number of steps"
        ) from None
    if steps == 0:
        one = epsilon([SubsampledGaussian(sample_rate, noise_multiplier, 1, cap=cap)], delta, accountant)
        raise InputError(
            f"noise_multiplier {noise_multiplier} spends epsilon {one:.3g} in its first step, more than {limit} at "
            f"delta {delta:g}; it must be larger, or the batch smaller"
        )
    return steps
