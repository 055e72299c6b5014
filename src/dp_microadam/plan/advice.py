"""Advice on batch size, steps and bands: what an amount of computing is best spent on, by predicted noise alone.

The mean of all noisy gradients of a run has noise of deviation ν = σC/(B·√T) in each coordinate. For a fixed number B·T of
processed examples it falls with B until σ grows in proportion to B, and then no more: larger batches only leave fewer steps.
``docs/choosing.md`` derives the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dp_microadam.accounting.costs import DEFAULT_ACCOUNTANT
from dp_microadam.errors import InputError
from dp_microadam.plan.bands import DEFAULT_NOISE_MEMORY_GIB, automatic_bands, band_table, most_automatic_bands
from dp_microadam.validation import require_integer, require_positive

SMALLEST_BATCH = 64
MOST_STEPS = 5000
"""With more, the steps of a fixed learning rate leave more noise in the weights, for the same noise in their mean."""

# Mean squared norm of clipped mean gradients, relative to the clipping norm: beside the noise it decides how many steps are
# needed if the learning rate follows from the plan.
_GRADIENT = 0.02

# With a fixed learning rate, halving T steps is worth so much noise as the exponential of this over T, and of what bands take
# from the logarithm of the noise of running sums, runs gain about this share: fitted to results.
_STEPS_OF_FIXED_RATES = 1000
_SHARE_OF_BANDS = 0.5

# Scores that differ by less are equal.
_AS_GOOD = 0.03


@dataclass(frozen=True)
class Proposal:
    """A batch size with the steps that can be afforded, and the bands that suit them; a smaller ``score`` is better.

    ``noise_multiplier`` is right to half a percent. ``noise`` is the deviation σ/(B·√T) of the noise in the mean gradient of
    the run for a clipping norm of 1, with what runs gain from bands.
    """

    batch_size: int
    steps: int
    bands: int
    noise_multiplier: float
    noise: float
    score: float

    @property
    def examples(self) -> int:
        """The expected number of examples that are processed."""
        return self.batch_size * self.steps


def advise(
    *,
    dataset_size: int,
    epsilon: float,
    delta: float,
    steps_for: Callable[[int], float],
    parameters: int,
    bands: bool = True,
    fixed_rate: bool = False,
    noise_memory_gib: float = DEFAULT_NOISE_MEMORY_GIB,
    accountant: str = DEFAULT_ACCOUNTANT,
) -> tuple[Proposal, ...]:
    """A proposal for each of the batch sizes 64, 128, 256, … up to where they become worse.

    ``steps_for`` tells how many steps of a batch size can be afforded, ``parameters`` is the number of trainable parameters.
    Without ``bands`` all proposals have one. ``fixed_rate`` is for learning rates that do not follow from the plan.

    >>> options = dict(dataset_size=54_000, epsilon=3.0, delta=1e-5, parameters=26_010, bands=False)
    >>> best(advise(**options, steps_for=lambda batch_size: 500_000 / batch_size)).batch_size
    512

    Raises:
        InputError: for a value out of range, or if not one step can be afforded.
    """
    require_integer("dataset_size", dataset_size, 1)
    require_positive("epsilon", epsilon)
    require_integer("parameters", parameters, 1)
    setting: dict[str, Any] = {"dataset_size": dataset_size, "epsilon": epsilon, "delta": delta, "accountant": accountant}
    found: list[Proposal] = []
    batch_size = min(SMALLEST_BATCH, dataset_size)
    while batch_size <= dataset_size and (steps := int(min(MOST_STEPS, steps_for(batch_size)))) >= 1:
        most = most_automatic_bands(steps, parameters if bands else None, noise_memory_gib)
        try:
            table = band_table(batch_size=batch_size, steps=steps, most=most, exact=False, **setting)
        except LookupError:
            batch_size *= 2
            continue
        chosen = automatic_bands(table)
        choice = next(choice for choice in table if choice.bands == chosen)
        gained = choice.running_sum ** (_SHARE_OF_BANDS if fixed_rate else 1.0)
        noise = table[0].noise_multiplier * gained / (batch_size * math.sqrt(steps))
        if fixed_rate:  # the logarithm of what a run is expected to lose, up to a constant
            score = math.log(noise) + _STEPS_OF_FIXED_RATES / steps
        else:
            score = math.log(parameters * noise**2 + _GRADIENT / steps) / 2
        found.append(Proposal(batch_size, steps, chosen, choice.noise_multiplier, noise, score))
        if len(found) > 2 and found[-1].score > found[-2].score > found[-3].score:
            break
        batch_size *= 2
    if not found:
        raise InputError(
            f"there is nothing to propose for {dataset_size} examples at epsilon {epsilon}: not one step of "
            f"{min(SMALLEST_BATCH, dataset_size)} examples can be afforded, or no noise is enough; allow more"
        )
    return tuple(found)


def best(proposals: Sequence[Proposal]) -> Proposal:
    """The proposal with the smallest score; of those that are about as good, that with fewer examples, then with more steps."""
    least = min(proposal.score for proposal in proposals)
    good = [proposal for proposal in proposals if proposal.score <= least + _AS_GOOD]
    return min(good, key=lambda proposal: (round(math.log(proposal.examples), 1), -proposal.steps))
