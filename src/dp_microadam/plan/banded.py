"""The banded matrix C of correlated noise: its coefficients, its inverse, and the noise that remains in sums over steps.

The banded matrix mechanism (Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization: A unified approach to
private training") adds S·σ·C⁻¹z to the sums of T steps, where the rows of z are independent standard normal vectors and C is a
lower triangular Toeplitz matrix with b bands: C[t, s] = c[t − s], and 0 where t − s ≥ b. What one step adds is partly taken
back by the following ones, so that the noise of a single step grows and that of the running sum, which is what moves the
weights, falls. ``bands=1`` is independent noise.

Theorem (Choquette-Choo et al. 2023, theorem 4): let every example belong to one of b groups, let step t sample only from
group t mod b, each example with probability p, and let ‖c‖ ≤ 1. Then the outputs of T steps are at most as revealing as an
adaptive composition of ⌈T/b⌉ Gaussian mechanisms of noise multiplier σ on Poisson samples of rate p.

The reason: C is invertible and public, so publishing G + SσC⁻¹z is the same as publishing C·G + Sσz, the sums mixed by C plus
independent noise. An example that takes part in step t moves rows t … t + b − 1 of C·G, by a vector of norm at most S·‖c‖ ≤ S.
Its next chance is step t + b, whose rows begin where these end. So its participations fall into disjoint blocks of b rows, at
most ⌈T/b⌉ of them, and each block sees the example through one Poisson draw and noise of multiplier σ. If two participations
could be closer than b steps, their rows would overlap, and the sensitivity would be larger: b bands need b groups.

Assumptions: groups depend on an example's number alone, never on its contents; the noise z is unpredictable and drawn anew for
each step; sums have sensitivity S. Neighbouring relation: one example is added or removed, and every other example keeps its
number, and with it its group. Shorter columns are covered too: if the sequence of noise vectors begins anew at some step, C
becomes block diagonal, its columns are cut off at the end of a block, and their norms only fall. If examples are numbered anew
there, as they may be when a run is resumed, each block of n steps has at most ⌈n/b⌉ participations of an example, and the sum
of these over the blocks takes the place of ⌈T/b⌉.

The coefficients are those of the banded square root (Kalinin and Lampert 2024, "Banded square root matrix
factorization for differentially private model training"): the matrix A of prefix sums has the square root with coefficients
1, 1/2, 3/8, 5/16, …, which is cut off after b. They are positive and decreasing, so that all zeros of Σ c_k x^k lie outside
the unit circle (Eneström and Kakeya) and the noise of a step stays bounded. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dp_microadam.errors import InputError
from dp_microadam.validation import require_integer

Floats = NDArray[np.float64]

# Rounding may leave the norm of normalised coefficients this much above 1; they are scaled down by it.
_ROUNDING = 1e-15

# Inverse coefficients that are computed: those that follow are below 1e-20 of the first for the banded square root.
_COMPUTED = 1 << 16
_COMPUTED_BANDS = 32


def square_root_coefficients(bands: int) -> Floats:
    """The first ``bands`` coefficients of the square root of the prefix sums: c_k = c_(k−1)·(2k − 1)/(2k), c_0 = 1.

    >>> square_root_coefficients(4).tolist()
    [1.0, 0.5, 0.375, 0.3125]
    """
    k = np.arange(1, require_integer("bands", bands, 1), dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])


def normalised(coefficients: Sequence[float] | Floats) -> Floats:
    """The coefficients, scaled so that every column of C has norm at most 1.

    Formal guarantees: the norm of the result, computed exactly, is at most 1; it is at least 1 − 1e-14.
    """
    c = np.asarray(coefficients, dtype=np.float64)
    return c / (math.sqrt(math.fsum(c * c)) * (1 + _ROUNDING)) if len(c) > 1 else np.ones(1)


@lru_cache(maxsize=64)
def banded_square_root(bands: int) -> Floats:
    """The coefficients of C: the square root of the prefix sums, cut off after ``bands`` and normalised.

    >>> banded_square_root(1).tolist()
    [1.0]
    """
    return _frozen(normalised(square_root_coefficients(bands)))


def inverse_coefficients(coefficients: Sequence[float] | Floats, count: int) -> Floats:
    """The first ``count`` coefficients w of C⁻¹, which is lower triangular and Toeplitz too: step t adds Σ w_k z_(t−k).

    >>> inverse_coefficients([1.0, 0.5], 4).tolist()
    [1.0, -0.5, 0.25, -0.125]
    """
    c = np.asarray(coefficients, dtype=np.float64)
    if len(c) == 0 or not c[0] > 0:
        raise InputError("coefficients are not those of an invertible matrix; the first must be above 0")
    w = np.zeros(count)
    w[:1] = 1 / c[0]
    backwards = np.ascontiguousarray(c[:0:-1])
    for k in range(1, count):
        terms = min(k, len(backwards))
        w[k] = -(backwards[len(backwards) - terms :] @ w[k - terms : k]) / c[0]
    return w


@dataclass(frozen=True)
class NoiseRatios:
    """The size of correlated noise relative to independent noise of the same multiplier, over the steps of a run.

    ``single_step`` is the root mean square over steps of the noise in one step's sum; at least 1. ``running_sum`` is the root
    mean square over steps of the noise in the sum of all steps so far, ``last_sum`` that of the sum over all steps, where the
    noise is largest.
    """

    single_step: float
    running_sum: float
    last_sum: float


def noise_ratios(coefficients: Sequence[float] | Floats, steps: int) -> NoiseRatios:
    """The ratios for the first ``steps`` steps, in closed form.

    With S_k = w_0 + … + w_k the sum over steps 0 … t has noise of variance S_0² + … + S_t²; independent noise has t + 1.

    >>> noise_ratios([1.0], 100)
    NoiseRatios(single_step=1.0, running_sum=1.0, last_sum=1.0)
    """
    c = np.asarray(coefficients, dtype=np.float64)
    require_integer("steps", steps, 1)
    return _noise_ratios(tuple(c.tolist()), steps)


@lru_cache(maxsize=256)
def _noise_ratios(c: tuple[float, ...], steps: int) -> NoiseRatios:
    if len(c) == 1:
        return NoiseRatios(1 / c[0], 1 / c[0], 1 / c[0])
    known = min(steps, max(_COMPUTED, _COMPUTED_BANDS * len(c)))
    w = inverse_coefficients(c, known)
    sums = np.cumsum(w)
    rest = steps - known
    single, total = np.cumsum(w * w), np.cumsum(sums * sums)
    # From there on w is zero and the sums stay at their limit, 1 over the sum of c.
    limit = 1 / math.fsum(c)
    singles = math.fsum(single) + rest * single[-1]
    totals = math.fsum(total) + rest * total[-1] + limit**2 * rest * (rest + 1) / 2
    last = total[-1] + limit**2 * rest
    return NoiseRatios(
        math.sqrt(singles / steps), math.sqrt(totals / (steps * (steps + 1) / 2)), math.sqrt(float(last) / steps)
    )


def _frozen(values: Floats) -> Floats:
    values.flags.writeable = False
    return values
