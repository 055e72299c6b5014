"""Checks of the accounting: the ledger has as many steps as the optimizer took, and the stated ε covers them.

With everybody in every step, T steps of noise multiplier σ are one Gaussian mechanism with μ = √T/σ, whose ε at δ solves
Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) = δ (Balle and Wang 2018). The steps are counted by the optimizer's hook, not
read from the run.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr

from dp_microadam.workbench.audit.check import Check
from dp_microadam.workbench.audit.published import Stated

# The library's ε errs upwards; a closed form is only as exact as its root.
_ROUNDING = 1e-6


def accounting_checks(stated: Stated, noise_multiplier: float, delta: float) -> list[Check]:
    """For a run with sample rate 1: does the ledger contain every step, and does the stated ε cover the steps taken?"""
    size = f"{stated.updates:,} steps"
    exact = gaussian_epsilon(stated.updates, noise_multiplier, delta)
    return [
        Check(
            "accounting",
            "steps",
            "is every step that reached the optimizer in the ledger?",
            "recorded steps minus those taken",
            stated.steps_recorded - stated.updates,
            0,
            np.inf,
            0.0,
            size,
        ),
        Check(
            "accounting",
            "stated ε",
            "is the stated ε at least what the steps taken cost?",
            "stated ε over the closed form's",
            stated.epsilon / exact,
            1 - _ROUNDING,
            np.inf,
            0.0,
            size,
        ),
    ]


def gaussian_epsilon(steps: int, noise_multiplier: float, delta: float) -> float:
    """ε of so many Gaussian mechanisms of this noise multiplier, exactly.

    >>> round(gaussian_epsilon(1, 1.0, 1e-5), 4)
    4.3772
    """
    mu = math.sqrt(steps) / noise_multiplier

    def excess(epsilon: float) -> float:
        first, second = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        return float(np.exp(first) - np.exp(second)) - delta

    return float(brentq(excess, 0.0, mu**2 / 2 + 40 * mu, xtol=1e-12))
