"""Two-world audit: thousands of repetitions of one or two steps with and without a target example, and a test between the two.

Its error rates in both worlds (with and without the example) bound ε from below. It is more sensitive than the one-run audit:
even noise of half the scale contradicts the claim. The test statistic is fixed in advance; threshold and direction are chosen
on the first half of the repetitions, and the bound is computed on the second half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.plan.bands import banded_square_root
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.validation import require_in_open, require_integer
from dp_microadam.workbench.audit.canaries import watch_trainer
from dp_microadam.workbench.audit.statistics import Finding, Floats, two_world_epsilon

Observations = NDArray[np.float64]
"""Outputs of the mechanism: repetitions × steps × directions, in units of the clipping norm."""

Mechanism = Callable[[bool, int], Observations]
"""Function of (target present, repetitions): runs one or two steps that many times, with fresh randomness."""

# Direction 0 is the target's, direction 1 that of the other example; all others carry noise alone.
TARGET = 0
DIRECTIONS = 64
_FIRST_IDLE = 2
_MOST_THRESHOLDS = 1000
# Confidence at which thresholds are compared, at least: one that looks good because of a few rare scores is passed over.
_CAUTION = 0.99999


@dataclass(frozen=True)
class Probe:
    """A test statistic of a mechanism's outputs, and the δ at which ε is bounded.

    A mechanism has an ε for every δ. Thousands of repetitions cannot resolve δ = 1e-5, so each probe uses the δ at which its
    statistic is strongest; the claimed ε there follows from the same noise and sampling.
    """

    name: str
    question: str
    statistic: Callable[[Observations], Floats]
    delta: float


def audit_two_worlds(
    observed_without: Observations, observed_with: Observations, probe: Probe, claim: float, *, confidence: float = 0.95
) -> Finding:
    """Lower bound on ε from the outputs of a mechanism with and without the target, as ``Mechanism`` returns them.

    Formal guarantees: if repetitions are independent and the mechanism is (ε, ``probe.delta``)-differentially private under
    adding or removing the target, the bound exceeds ε with probability at most 1 − ``confidence``.
    """
    require_in_open("confidence", confidence, 0, 1)
    without, present = probe.statistic(observed_without), probe.statistic(observed_with)
    for scores, observed in ((without, observed_without), (present, observed_with)):
        if scores.shape != observed.shape[:1]:
            raise InputError(f"the statistic of {probe.name!r} has shape {scores.shape}; it must be one number per repetition")
    require_integer("repetitions", min(len(without), len(present)), 4)
    fit_without, judge_without = np.array_split(without, 2)
    fit_with, judge_with = np.array_split(present, 2)
    sign, threshold = _best_test(fit_without, fit_with, probe.delta, max(confidence, _CAUTION))
    bound = two_world_epsilon(
        np.count_nonzero(sign * judge_without > sign * threshold),
        np.count_nonzero(sign * judge_with <= sign * threshold),
        len(judge_without),
        len(judge_with),
        probe.delta,
        confidence,
    )
    return Finding(
        name=probe.name,
        question=probe.question,
        claim=claim,
        delta=probe.delta,
        bound=float(bound),
        confidence=confidence,
        largest=float(two_world_epsilon(0, 0, len(judge_without), len(judge_with), probe.delta, confidence)),
        size=len(without),
        unit="repetitions",
        scores_without=without,
        scores_with=present,
    )


def _best_test(without: Floats, present: Floats, delta: float, confidence: float) -> tuple[int, float]:
    """Direction and threshold of the test that give the largest bound on these scores."""
    pooled = np.unique(np.concatenate([without, present]))
    if len(pooled) > _MOST_THRESHOLDS:
        pooled = pooled[np.linspace(0, len(pooled) - 1, _MOST_THRESHOLDS).round().astype(int)]
    # Between scores, so that rounding does not decide about a score at the threshold.
    thresholds = (pooled[:-1] + pooled[1:]) / 2 if len(pooled) > 1 else pooled
    above_without = len(without) - np.searchsorted(np.sort(without), thresholds, side="right")
    above_with = len(present) - np.searchsorted(np.sort(present), thresholds, side="right")
    sizes = len(without), len(present)
    upward = two_world_epsilon(above_without, sizes[1] - above_with, *sizes, delta, confidence)
    downward = two_world_epsilon(sizes[0] - above_without, above_with, *sizes, delta, confidence)
    if downward.max() > upward.max():
        return -1, float(thresholds[int(np.argmax(downward))])
    return 1, float(thresholds[int(np.argmax(upward))])


def strength(observed: Observations) -> Floats:
    """Component of the outputs in the target's direction, summed over all steps."""
    return observed[:, :, TARGET].sum(1)


def quiet(observed: Observations) -> Floats:
    """Minus the norm of the noise in directions without any gradient: it must not depend on who is present."""
    return -np.linalg.norm(observed[:, :, _FIRST_IDLE:], axis=(1, 2))


def change(observed: Observations) -> Floats:
    """Difference of two steps in the target's direction, in which noise used twice cancels."""
    return np.abs(observed[:, 0, TARGET] - observed[:, 1, TARGET])


def contrast(observed: Observations) -> Floats:
    """Difference between the target's coordinate and its counterpart in the other half, in which shared noise cancels."""
    return np.abs(observed[:, :, TARGET] - observed[:, :, TARGET + observed.shape[2] // 2]).sum(1)


def ever(observed: Observations) -> Floats:
    """Largest component in the target's direction over the steps: was the target sampled at all?"""
    return observed[:, :, TARGET].max(1)


def echo(observed: Observations) -> Floats:
    """Component in the target's direction over the rows that one participation moves, weighted as the bands move them."""
    return np.asarray(observed[:, :, TARGET] @ banded_square_root(observed.shape[1]), dtype=np.float64)


def trainer_steps(plan: PrivacyPlan) -> Mechanism:
    """The library's own mechanism for :func:`audit_two_worlds`: ``plan.steps`` steps of ``PrivateTrainer``.

    Repetitions follow each other in one run. A canary's gradient does not depend on the weights, and steps draw their sample
    and noise independently (part of what is claimed), so each group of ``plan.steps`` steps is a repetition of the same
    experiment. Physical batches have one example, or one user, so that every step accumulates several. Randomness is the
    operating system's entropy, as in any private run. With bands, what the steps published is mixed by the matrix of the noise,
    which makes noise independent again and moves the rows of one participation only.
    """

    def mechanism(present: bool, repetitions: int) -> Observations:
        run = replace(plan, steps=plan.steps * repetitions, accountant="rdp")
        members = torch.ones(plan.dataset_size, dtype=torch.bool)
        members[TARGET] = present
        seen: list[Tensor] = []

        def observe(gradient: Tensor) -> None:
            seen.append(gradient.double())

        watch_trainer(run, members, observe, directions=DIRECTIONS, physical_batch_size=run.examples_per_user or 1)
        published = torch.stack(seen)
        mixed = whitened(published, run) if run.bands > 1 else published
        return mixed.unflatten(0, (repetitions, plan.steps)).numpy()

    return mechanism


def whitened(observed: Tensor, plan: PrivacyPlan) -> Tensor:
    """C times what the steps of a run published, a row for each step: the sums mixed by C, plus independent noise."""
    mixed = torch.zeros_like(observed)
    for age, coefficient in enumerate(plan.noise_coefficients.tolist()[: len(observed)]):
        mixed[age:] += coefficient * observed[: len(observed) - age]
    return mixed


@dataclass(frozen=True)
class Experiment:
    """One or two steps on two examples or users, one of which is the target, and the probes applied to their outputs."""

    name: str
    plan: PrivacyPlan
    probes: tuple[Probe, ...]

    def claim(self, probe: Probe) -> float:
        """The ε of the plan at the probe's δ, by the PLD accountant, which is tight and errs upwards."""
        return replace(self.plan, delta=probe.delta, accountant="pld").epsilon


# Everybody takes part in the only step: the Gaussian mechanism itself, whose trade-off between errors has a closed form.
NOISE = Experiment(
    "noise",
    PrivacyPlan(dataset_size=2, batch_size=2, noise_multiplier=0.6, steps=1, delta=1e-5),
    (
        Probe("noise scale", "is the noise as large as the sum's sensitivity demands?", strength, delta=0.3),
        Probe("batch size", "does the scale of the result betray how many took part?", quiet, delta=0.3),
        Probe("coordinates", "does noise in one coordinate cancel against another's?", contrast, delta=0.3),
    ),
)

# Half of the examples in each of two steps.
COMPOSITION = Experiment(
    "composition",
    PrivacyPlan(dataset_size=2, batch_size=1, noise_multiplier=1.0, steps=2, delta=1e-5),
    (Probe("repeated noise", "does noise in one step cancel against another's?", change, delta=0.1),),
)

# Hardly any noise, to see the sampling. The target misses both steps with probability ¼, so no test whatsoever may tell the
# worlds apart with an advantage above ¾; at this δ the claim is that ε is zero.
SAMPLING = Experiment(
    "sampling",
    PrivacyPlan(dataset_size=2, batch_size=1, noise_multiplier=0.15, steps=2, delta=1e-5),
    (Probe("sampling", "does each step draw its examples independently of the other?", ever, delta=0.76),),
)

# Two bands, and everybody of a group in its step: the target is in one of the two steps, as in the first experiment.
BANDS = Experiment(
    "bands",
    PrivacyPlan(dataset_size=2, batch_size=1, noise_multiplier=0.6, steps=2, delta=1e-5, bands=2),
    (Probe("correlated noise", "does taking back noise reveal more than one participation?", echo, delta=0.3),),
)

# Users with several examples that all pull the same way: together they may add no more than one example alone.
USERS = Experiment(
    "users",
    PrivacyPlan(dataset_size=2, batch_size=2, noise_multiplier=0.6, steps=1, delta=1e-5, examples_per_user=3),
    (Probe("users", "does all that a user has together weigh more than the clipping norm?", strength, delta=0.3),),
)

EXPERIMENTS = (NOISE, COMPOSITION, SAMPLING, BANDS, USERS)
