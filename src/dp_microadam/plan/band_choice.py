"""The choice of the number of bands: more bands take back more of the noise, but amplify privacy less by sampling.

With b bands the noise that a run needs is σ(b), which grows with b because an example is sampled b times as often in the steps
of its group. The noise of the running sum relative to independent noise of the same σ falls with b (``banded.py``). Their
product, relative to one band, says what correlated noise gains at the same ε. This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dp_microadam.accounting.costs import DEFAULT_ACCOUNTANT, least_noise_multiplier
from dp_microadam.accounting.one_step import cap_of
from dp_microadam.errors import InputError
from dp_microadam.plan.banded import banded_square_root, noise_ratios
from dp_microadam.validation import require_integer, require_positive

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

_BYTES = 4
_GIB = 1 << 30


@dataclass(frozen=True)
class BandChoice:
    """What a number of bands gives at the same ε, δ and number of steps.

    ``single_step`` and ``running_sum`` are the noise in one step's mean and in the running sum of all steps so far, as root
    mean squares over the steps, relative to one band.
    """

    bands: int
    noise_multiplier: float
    single_step: float
    running_sum: float


def noise_memory(bands: int, parameters: int, *, wide: bool = False) -> int:
    """Bytes of the noise that is kept between steps: b − 1 vectors in float32, or in float64 if ``wide``."""
    return (2 if wide else 1) * _BYTES * (bands - 1) * parameters


def refuse_bands(bands: int, dataset_size: int, batch_size: int) -> None:
    """Raise an InputError unless ``bands`` groups can be sampled from with the expected batch size."""
    require_integer("bands", bands, 1)
    if bands > dataset_size:
        raise InputError(
            f"bands is {bands}, more groups than the {dataset_size} examples of the dataset; it must be at most dataset_size"
        )
    if bands * batch_size > dataset_size:
        raise InputError(
            f"bands is {bands}, but a group of {dataset_size}/{bands} examples cannot give an expected batch of {batch_size}; "
            f"bands times batch_size must be at most dataset_size, so bands at most {dataset_size // batch_size}"
        )


def refuse_memory(bands: int, parameters: int, limit_gib: float, *, wide: bool = False) -> None:
    """Raise an InputError if the noise of the last ``bands`` − 1 steps takes more memory than ``limit_gib``."""
    needed = noise_memory(bands, require_integer("parameters", parameters, 1), wide=wide)
    if needed > require_positive("noise_memory_gib", limit_gib) * _GIB:
        raise InputError(
            f"bands is {bands}, which keeps {needed / _GIB:.3g} GiB of noise for {parameters} parameters, more than "
            f"noise_memory_gib = {limit_gib:g}; bands must be at most {most_bands(parameters, limit_gib, wide=wide)}, or the "
            "limit larger"
        )


def most_bands(parameters: int, limit_gib: float, *, wide: bool = False) -> int:
    """The largest number of bands whose noise fits into the limit; at least one, which keeps none."""
    return 1 + int(require_positive("noise_memory_gib", limit_gib) * _GIB) // noise_memory(2, parameters, wide=wide)


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

    ``also`` is one more number to include. ``max_batch_size`` is the plan's. Unless ``exact``, noise multipliers are solved to
    half a percent, and numbers of bands beyond the least noise are left out.

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
        ratios = noise_ratios(banded_square_root(bands), steps)
        of_one = found[0].noise_multiplier if found else sigma
        found.append(BandChoice(bands, sigma, sigma / of_one * ratios.single_step, sigma / of_one * ratios.running_sum))
        if not exact and len(found) > 1 and found[-1].running_sum > found[-2].running_sum:
            break
    return tuple(found)


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


def most_automatic_bands(steps: int, parameters: int | None, noise_memory_gib: float) -> int:
    """The most bands that ``"auto"`` may take; one if the number of trainable ``parameters`` is unknown."""
    if parameters is None:
        return 1
    fitting = most_bands(require_integer("parameters", parameters, 1), noise_memory_gib)
    return max(1, min(MOST_AUTOMATIC_BANDS, steps // _STEPS_FOR_EACH_BAND, fitting))


def choose_bands(
    word: str,
    parameters: int | None,
    noise_memory_gib: float,
    *,
    steps: int | None,
    epsilon: float | None,
    **setting: Any,
) -> int:
    """The number of bands that ``"auto"`` stands for in a plan; ``setting`` is that of :func:`band_table`.

    It is one band where ε or the steps are yet to be solved for, and where the number of ``parameters`` is unknown.
    """
    if word != "auto":
        raise InputError(f"bands is {word!r}; it must be a whole number of at least 1, or 'auto'")
    if parameters is not None:
        require_integer("parameters", parameters, 1)
    if steps is None or epsilon is None or (most := most_automatic_bands(steps, parameters, noise_memory_gib)) == 1:
        return 1
    try:
        return automatic_bands(band_table(steps=steps, epsilon=epsilon, most=most, exact=False, **setting))
    except LookupError:
        return 1  # for which solving then says what is out of reach
