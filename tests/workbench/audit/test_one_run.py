"""The one-run auditor against the real trainer: honest runs pass with a bound that says something, faults are caught."""

import numpy as np
import pytest
import torch
from scipy.stats import binom

from dp_microadam import PrivacyPlan
from dp_microadam.clipping.per_example import per_example_gradients
from dp_microadam.errors import InputError
from dp_microadam.workbench.audit.canaries import (
    GRADIENT_NORM,
    by_canary,
    canary_batch,
    canary_loss,
    canary_width,
)
from dp_microadam.workbench.audit.one_run import GUESSED_PARTS, audit_one_run, trainer_scores
from dp_microadam.workbench.audit.statistics import one_run_epsilon

CANARIES = 10_000


@pytest.fixture(scope="module")
def plan():
    """The claim that ``dp-microadam audit`` audits by default."""
    return PrivacyPlan.solve(
        dataset_size=CANARIES, batch_size=CANARIES // 2, delta=1e-5, epsilon=1.0, steps=4, accountant="pld"
    )


def audit(plan, seed):
    return audit_one_run(trainer_scores(plan, seed=seed), plan.dataset_size, plan.epsilon, plan.delta, seed=seed)


@pytest.mark.parametrize("runs", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_an_honest_pipeline_passes_with_a_bound_of_at_least_a_quarter_of_the_claim(plan, runs):
    """Each bound exceeds the true ε with probability at most 5 %, so that so many of the runs do with less than 2e-7."""
    too_many = next(count for count in range(runs + 1) if binom.sf(count - 1, runs, 0.05) < 2e-7)
    findings = [audit(plan, seed) for seed in range(runs)]
    assert sum(finding.violated for finding in findings) < too_many <= runs
    assert np.median([finding.bound for finding in findings]) >= plan.epsilon / 4


@pytest.mark.parametrize("fault", ["no noise", "no clipping"])
def test_it_catches(plan, plant, fault):
    plant("a blind start-up check")  # which refuses to train without clipping
    plant(fault)
    finding = audit(plan, seed=1)
    assert finding.violated
    assert finding.bound > 2 * plan.epsilon


def test_several_numbers_of_guesses_are_corrected_for():
    """Perfect scores: the best of three choices is reported at a third of the error probability, not at all of it."""
    canaries = 1000
    finding = audit_one_run(lambda present: present.double(), canaries, 1.0, 1e-5, confidence=0.97, seed=0)
    guesses = [round(canaries * part) for part in GUESSED_PARTS]
    assert finding.bound == max(one_run_epsilon(canaries, count, count, 1e-5, 0.99) for count in guesses)


def test_a_pipeline_must_score_every_canary():
    with pytest.raises(InputError, match="scores of shape"):
        audit_one_run(lambda present: torch.zeros(3), 1000, 1.0, 1e-5)


def test_canaries_have_orthogonal_gradients_far_above_the_clipping_norm():
    width = canary_width(10)
    model = torch.nn.Linear(width, width, bias=False)
    rows = per_example_gradients(model, canary_loss, canary_batch(torch.arange(10), width))
    gradients = torch.stack([by_canary(row["weight"]) for row in rows])
    assert width == 4
    assert torch.equal(gradients, GRADIENT_NORM * torch.eye(10, width * width))
