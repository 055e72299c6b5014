"""One-run audit: a lower bound on ε from a single training run with many canaries, each included with probability ½.

Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", with white-box canaries: each has its own
gradient direction, and its score is the component of the privatized gradients in that direction, summed over all steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.validation import require_in_open, require_integer
from dp_microadam.workbench.audit.canaries import watch_trainer
from dp_microadam.workbench.audit.statistics import Finding, one_run_epsilon

# Fractions of the canaries that are guessed, half as "in" and half as "out"; for the rest the attack abstains. Few guesses are
# more accurate, many give more evidence, and the best number depends on the noise: all are tried, each at a third of the
# error probability.
GUESSED_PARTS = (0.05, 0.1, 0.2)

Pipeline = Callable[[Tensor], Tensor]
"""Trains on the canaries that are present, and returns a score for each: larger if it seems to have been present."""


def audit_one_run(
    pipeline: Pipeline,
    canaries: int,
    claim: float,
    delta: float,
    *,
    confidence: float = 0.95,
    seed: int | None = None,
) -> Finding:
    """Include each canary with probability ½, run ``pipeline`` once, and bound ε from how well its scores reveal membership.

    ``pipeline`` may be any training procedure: it is given which canaries are present and returns a score for each.
    ``claim`` is its claimed ε at ``delta`` for adding or removing one canary.

    Formal guarantees: if ``pipeline`` is (ε, ``delta``)-differentially private under adding or removing one canary, the bound
    exceeds ε with probability at most 1 − ``confidence``, all choices of how many to guess together.
    """
    require_integer("canaries", canaries, 2)
    require_in_open("confidence", confidence, 0, 1)
    present = np.random.default_rng(seed).random(canaries) < 0.5
    scores = np.asarray(pipeline(torch.from_numpy(present)), dtype=np.float64)
    if scores.shape != (canaries,):
        raise InputError(
            f"the pipeline returned scores of shape {scores.shape}; it must return one for each of {canaries} canaries"
        )
    return judge(present, scores, claim, delta, confidence=confidence)


def judge(present: NDArray[np.bool_], scores: NDArray[np.float64], claim: float, delta: float, *, confidence: float) -> Finding:
    """The bound on ε from scores of canaries, of which those that are ``present`` were drawn by fair coins."""
    canaries = len(present)
    each = 1 - (1 - confidence) / len(GUESSED_PARTS)
    guesses = guesses_of(present, scores)
    return Finding(
        name="one run",
        question="does one training run tell which canaries it was given?",
        claim=claim,
        delta=delta,
        bound=max(one_run_epsilon(canaries, count, correct, delta, each) for count, correct in guesses),
        confidence=confidence,
        largest=max(one_run_epsilon(canaries, count, count, delta, each) for count, _ in guesses),
        size=canaries,
        unit="canaries",
        scores_without=scores[~present],
        scores_with=scores[present],
    )


def guesses_of(present: NDArray[np.bool_], scores: NDArray[np.float64]) -> list[tuple[int, int]]:
    """For each part that is guessed, how many guesses are made and how many are right: the lowest "out", the highest "in"."""
    # Ties are broken by the order of the canaries, which is independent of their presence.
    order = np.argsort(scores, kind="stable")
    halves = [max(1, round(len(present) * part / 2)) for part in GUESSED_PARTS]
    return [
        (2 * half, int(np.count_nonzero(~present[order[:half]]) + np.count_nonzero(present[order[-half:]]))) for half in halves
    ]


def trainer_scores(plan: PrivacyPlan, *, seed: int | None = None) -> Pipeline:
    """The library's own pipeline for :func:`audit_one_run`: one run of ``PrivateTrainer`` with ``plan``."""

    def pipeline(present: Tensor) -> Tensor:
        total = torch.zeros(0)

        def observe(gradient: Tensor) -> None:
            nonlocal total
            total = gradient.double() if len(total) == 0 else total + gradient.double()

        watch_trainer(plan, present, observe, physical_batch_size=1024, seed=seed)
        return total[: len(present)]

    return pipeline
