"""One-run audit: a lower bound on ε from a single training run with many canaries, each included with probability ½.

Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", with white-box canaries: each has its own
gradient direction, and its score is the component of the privatized gradients in that direction, summed over all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.validation import require_in_open, require_integer
from dp_microadam.workbench.audit.canaries import watch_trainer
from dp_microadam.workbench.audit.finding import Finding
from dp_microadam.workbench.audit.statistics import one_run_epsilon

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
    guessed_parts: Sequence[float] = GUESSED_PARTS,
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
    return judge(present, scores, claim, delta, confidence=confidence, guessed_parts=guessed_parts)


def judge(
    present: NDArray[np.bool_],
    scores: NDArray[np.float64],
    claim: float,
    delta: float,
    *,
    confidence: float,
    guessed_parts: Sequence[float] = GUESSED_PARTS,
) -> Finding:
    """The bound on ε from scores of canaries, of which those that are ``present`` were drawn by fair coins."""
    canaries = len(present)
    # Ties are broken by the order of the canaries, which is independent of their presence.
    order = np.argsort(scores, kind="stable")
    each = 1 - (1 - confidence) / len(guessed_parts)
    halves = [max(1, round(canaries * part / 2)) for part in guessed_parts]
    bounds = [one_run_epsilon(canaries, 2 * half, correct_guesses(present, order, half), delta, each) for half in halves]
    half = halves[int(np.argmax(bounds))]
    return Finding(
        name="one run",
        question="does one training run tell which canaries it was given?",
        claim=claim,
        delta=delta,
        bound=max(bounds),
        confidence=confidence,
        largest=max(one_run_epsilon(canaries, 2 * half, 2 * half, delta, each) for half in halves),
        size=canaries,
        unit="canaries",
        scores_without=scores[~present],
        scores_with=scores[present],
        thresholds=(float(scores[order[half - 1]]), float(scores[order[-half]])),
    )


def correct_guesses(present: NDArray[np.bool_], order: NDArray[np.intp], half: int) -> int:
    """Number of correct guesses if the ``half`` lowest scores are guessed "out" and the ``half`` highest "in"."""
    return int(np.count_nonzero(~present[order[:half]]) + np.count_nonzero(present[order[-half:]]))


def trainer_scores(
    plan: PrivacyPlan,
    *,
    seed: int | None = None,
    physical_batch_size: int = 1024,
) -> Pipeline:
    """The library's own pipeline for :func:`audit_one_run`: one run of ``PrivateTrainer`` with ``plan``."""

    def pipeline(present: Tensor) -> Tensor:
        total = torch.zeros(0)

        def observe(gradient: Tensor) -> None:
            nonlocal total
            total = gradient.double() if len(total) == 0 else total + gradient.double()

        watch_trainer(plan, present, observe, physical_batch_size=physical_batch_size, seed=seed)
        return total[: len(present)]

    return pipeline
