"""Bands of correlated noise: the matrix C, the noise that remains in sums over steps, and how many bands are worth their cost.

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
the unit circle (Eneström and Kakeya) and the noise of a step stays bounded.

More bands take back more of the noise, but a run needs more of it, since an example is sampled b times as often in the steps of
its group. The product of both, relative to one band, says what correlated noise gains at the same ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_microadam.accounting.costs import DEFAULT_ACCOUNTANT, least_noise_multiplier
from dp_microadam.accounting.one_step import cap_of
from dp_microadam.errors import InputError
from dp_microadam.validation import require_integer, require_positive

Floats = NDArray[np.float64]

DEFAULT_NOISE_MEMORY_GIB = 2.0
"""Memory that the noise of the last steps may take, unless a run allows more."""

MOST_AUTOMATIC_BANDS = 16
"""Bands that ``"auto"`` takes at most: they keep 60 bytes for each parameter, and more of them gain little on top."""

# Runs with fewer steps for each band are over before bands have taken back much.
_STEPS_FOR_EACH_BAND = 10

# Automatic bands are taken if they leave at most this much of one band's noise in the running sum, since they cost memory and
# make single steps noisier; as few as leave at most this many times the least.
_WORTH_IT = 0.8
_NEARLY_THE_LEAST = 1.1

# Rounding may leave the norm of normalised coefficients this much above 1; they are scaled down by it.
_ROUNDING = 1e-15

# Inverse coefficients that are computed: those that follow are below 1e-20 of the first for the banded square root.
_COMPUTED = 1 << 16
_COMPUTED_BANDS = 32

_GIB = 1 << 30


def square_root_coefficients(bands: int) -> Floats:
    """The first ``bands`` coefficients of the square root of the prefix sums: c_k = c_(k−1)·(2k − 1)/(2k), c_0 = 1.

    >>> square_root_coefficients(4).tolist()
    [1.0, 0.5, 0.375, 0.3125]
    """
    k = np.arange(1, require_integer("bands", bands, 1), dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])


@lru_cache(maxsize=64)
def banded_square_root(bands: int) -> Floats:
    """The coefficients of C: the square root of the prefix sums, cut off after ``bands`` and normalised.

    Formal guarantees: their norm, computed exactly, is at most 1; it is at least 1 − 1e-14.

    >>> banded_square_root(1).tolist()
    [1.0]
    """
    c = square_root_coefficients(bands)
    if bands > 1:
        c = c / (math.sqrt(math.fsum(c * c)) * (1 + _ROUNDING))
    c.flags.writeable = False
    return c


def inverse_coefficients(c: Floats, count: int) -> Floats:
    """The first ``count`` coefficients w of C⁻¹, which is lower triangular and Toeplitz too: step t adds Σ w_k z_(t−k).

    >>> inverse_coefficients(np.array([1.0, 0.5]), 4).tolist()
    [1.0, -0.5, 0.25, -0.125]
    """
    w = np.zeros(count)
    w[:1] = 1 / c[0]
    backwards = np.ascontiguousarray(c[:0:-1])
    for k in range(1, count):
        terms = min(k, len(backwards))
        w[k] = -(backwards[len(backwards) - terms :] @ w[k - terms : k]) / c[0]
    return w


@dataclass(frozen=True)
class NoiseRatios:
    """Correlated noise relative to independent noise of the same multiplier: root mean squares over the steps of a run.

    ``single_step`` is that of the noise in one step's sum, ``running_sum`` of that in the sum of all steps so far.
    """

    single_step: float
    running_sum: float


@lru_cache(maxsize=256)
def noise_ratios(bands: int, steps: int) -> NoiseRatios:
    """The ratios for the first ``steps`` steps, in closed form.

    With S_k = w_0 + … + w_k the sum over steps 0 … t has noise of variance S_0² + … + S_t²; independent noise has t + 1.

    >>> noise_ratios(1, 100)
    NoiseRatios(single_step=1.0, running_sum=1.0)
    """
    require_integer("steps", steps, 1)
    if bands == 1:
        return NoiseRatios(1.0, 1.0)
    c = banded_square_root(bands)
    known = min(steps, max(_COMPUTED, _COMPUTED_BANDS * bands))
    w = inverse_coefficients(c, known)
    sums = np.cumsum(w)
    rest = steps - known
    single, total = np.cumsum(w * w), np.cumsum(sums * sums)
    # From there on w is zero and the sums stay at their limit, 1 over the sum of c.
    limit = 1 / math.fsum(c)
    singles = math.fsum(single) + rest * single[-1]
    totals = math.fsum(total) + rest * total[-1] + limit**2 * rest * (rest + 1) / 2
    return NoiseRatios(math.sqrt(singles / steps), math.sqrt(totals / (steps * (steps + 1) / 2)))


def noise_memory(bands: int, parameters: int, *, wide: bool = False) -> int:
    """Bytes of the noise that is kept between steps: b − 1 vectors in float32, or in float64 if ``wide``."""
    return (8 if wide else 4) * (bands - 1) * parameters


def most_bands(parameters: int, limit_gib: float, *, wide: bool = False) -> int:
    """The largest number of bands whose noise fits into the limit; at least one, which keeps none."""
    limit, parameters = require_positive("noise_memory_gib", limit_gib), require_integer("parameters", parameters, 1)
    return 1 + int(limit * _GIB) // noise_memory(2, parameters, wide=wide)


def refuse_bands(bands: int, dataset_size: int, batch_size: int) -> None:
    """Raise an InputError unless ``bands`` groups can be sampled from with the expected batch size."""
    require_integer("bands", bands, 1)
    if bands * batch_size > dataset_size:
        raise InputError(
            f"bands is {bands}, but a group of {dataset_size}/{bands} examples cannot give an expected batch of {batch_size}; "
            f"bands times batch_size must be at most dataset_size, so bands at most {dataset_size // batch_size}"
        )


def refuse_memory(bands: int, parameters: int, limit_gib: float, *, wide: bool = False) -> None:
    """Raise an InputError if the noise of the last ``bands`` − 1 steps takes more memory than ``limit_gib``."""
    most = most_bands(parameters, limit_gib, wide=wide)
    if bands > most:
        raise InputError(
            f"bands is {bands}, which keeps {noise_memory(bands, parameters, wide=wide) / _GIB:.3g} GiB of noise for "
            f"{parameters} parameters, more than noise_memory_gib = {limit_gib:g}; bands must be at most {most}, or the limit "
            "larger"
        )


@dataclass(frozen=True)
class BandChoice:
    """What a number of bands gives at the same ε, δ and number of steps: its noise, and ratios relative to one band."""

    bands: int
    noise_multiplier: float
    single_step: float
    running_sum: float


def band_table(
    *,
    dataset_size: int,
    batch_size: int,
    steps: int,
    epsilon: float,
    delta: float,
    accountant: str = DEFAULT_ACCOUNTANT,
    most: int | None = None,
    also: int = 1,
    max_batch_size: int | None = None,
    exact: bool = True,
) -> tuple[BandChoice, ...]:
    """What 1, 2, 4, 8, … bands give, and the largest possible number: at most ``most``, N/B and the number of steps.

    ``also`` is one more number to include. Unless ``exact``, noise multipliers are solved to half a percent, and numbers of
    bands beyond the least noise are left out.

    >>> for choice in band_table(dataset_size=54_000, batch_size=256, steps=2000, epsilon=3.0, delta=1e-5, most=16):
    ...     print(f"{choice.bands:3} bands: σ = {choice.noise_multiplier:.4f}, sums {choice.running_sum:.2f}")
      1 bands: σ = 0.7017, sums 1.00
      2 bands: σ = 0.7980, sums 0.85
      4 bands: σ = 0.9397, sums 0.75
      8 bands: σ = 1.1538, sums 0.69
     16 bands: σ = 1.4761, sums 0.66

    Raises:
        LookupError: if not even one band can keep within ``epsilon``.
    """
    largest = min(dataset_size // batch_size, steps, dataset_size if most is None else most)
    candidates = {1 << power for power in range(largest.bit_length())} | {largest, also}
    found: list[BandChoice] = []
    for bands in sorted(candidates):
        rate, participations = bands * batch_size / dataset_size, -(-steps // bands)
        try:
            cap = cap_of(max_batch_size, dataset_size, bands)
            sigma = least_noise_multiplier(rate, participations, epsilon, delta, accountant, cap, exact=exact)
        except LookupError:
            if not found:
                raise
            continue
        ratios = noise_ratios(bands, steps)
        growth = sigma / (found[0].noise_multiplier if found else sigma)
        found.append(BandChoice(bands, sigma, growth * ratios.single_step, growth * ratios.running_sum))
        if not exact and len(found) > 1 and found[-1].running_sum > found[-2].running_sum:
            break
    return tuple(found)


def most_automatic_bands(steps: int, parameters: int | None, noise_memory_gib: float) -> int:
    """The most bands that ``"auto"`` may take; one if the number of trainable ``parameters`` is unknown."""
    if parameters is None:
        return 1
    return max(1, min(MOST_AUTOMATIC_BANDS, steps // _STEPS_FOR_EACH_BAND, most_bands(parameters, noise_memory_gib)))


def automatic_bands(choices: tuple[BandChoice, ...]) -> int:
    """The fewest bands that leave nearly the least noise in the running sum, and one where even that is not worth it.

    >>> sums = {1: 1.0, 2: 0.83, 4: 0.71, 8: 0.63, 16: 0.59}
    >>> automatic_bands(tuple(BandChoice(bands, 1.0, 1.0, running_sum) for bands, running_sum in sums.items()))
    8
    """
    least = min(choice.running_sum for choice in choices)
    if least > _WORTH_IT:
        return 1
    return min(choice.bands for choice in choices if choice.running_sum <= min(_WORTH_IT, _NEARLY_THE_LEAST * least))


def choose_bands(
    parameters: int | None, noise_memory_gib: float, *, steps: int | None, epsilon: float | None, **setting: Any
) -> int:
    """The number of bands that ``"auto"`` stands for: one if ε, steps or ``parameters`` are yet unknown."""
    if steps is None or epsilon is None or (most := most_automatic_bands(steps, parameters, noise_memory_gib)) == 1:
        return 1
    try:
        return automatic_bands(band_table(steps=steps, epsilon=epsilon, most=most, exact=False, **setting))
    except LookupError:
        return 1  # for which solving then says what is out of reach
