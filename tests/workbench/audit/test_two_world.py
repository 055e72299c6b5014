"""The two-world auditor against the real trainer: every planted fault is caught, and the honest pipeline passes.

All findings hold at a confidence of 1 − 1e-7 each, so that an honest pipeline is accused with a probability below 1e-6 in this
whole file. Repetitions are so many that a planted fault is missed with a probability below 1e-6; docs/audit.md has the figures.
"""

import numpy as np
import pytest
import torch

from dp_microadam import ClippedGradients, GaussianMechanism, PrivacyPlan
from dp_microadam.errors import InputError
from dp_microadam.noise.randomness import Randomness
from dp_microadam.workbench.audit.canaries import by_canary, canary_batch, canary_loss
from dp_microadam.workbench.audit.suite import PROFILES, audit_experiment, audit_pipeline
from dp_microadam.workbench.audit.two_world import (
    BANDS,
    COMPOSITION,
    DIRECTIONS,
    NOISE,
    SAMPLING,
    USERS,
    Probe,
    audit_two_worlds,
    strength,
)

SURE = 1 - 1e-7


def audit(experiment, repetitions):
    return {finding.name: finding for finding in audit_experiment(experiment, repetitions, confidence=SURE)}


@pytest.mark.slow
def test_the_honest_pipeline_passes_the_quick_profile():
    """All audits of ``dp-microadam audit``, of no smaller size than those below."""
    profile = PROFILES["quick"]
    plan = PrivacyPlan.solve(
        dataset_size=profile.canaries, batch_size=profile.canaries // 2, delta=1e-5, epsilon=1.0, steps=4, accountant="pld"
    )
    findings = {finding.name: finding for finding in audit_pipeline(plan, profile.repetitions, confidence=SURE).findings}
    assert [finding.name for finding in findings.values() if finding.violated] == []
    # An auditor that always answers 0 fails: at 99 % the same scores show at least a tenth of the claim.
    noise = findings["noise scale"]
    worlds = (world[:, None, None] for world in (noise.scores_without, noise.scores_with))
    again = audit_two_worlds(*worlds, Probe("again", "", strength, noise.delta), noise.claim, confidence=0.99)
    assert again.bound >= noise.claim / 10


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("fault", "options", "experiment", "probe", "repetitions"),
    [
        ("less noise", {"factor": 0.1}, NOISE, "noise scale", 300),
        slow("less noise", {"factor": 0.5}, NOISE, "noise scale", 1500),
        slow("an example counted twice", {}, NOISE, "noise scale", 1500),
        # Noise is added per physical chunk, with too little each.
        slow("noise per chunk", {"deviation": NOISE.plan.noise_multiplier, "chunks": 2}, NOISE, "batch size", 1000),
        slow("division by the realised batch", {}, NOISE, "batch size", 400),
        slow("noise used for two steps", {}, COMPOSITION, "repeated noise", 600),
        slow("shuffled batches", {}, SAMPLING, "sampling", 400),
        # Everybody is in every step of two bands: the two participations share a row, and add up there.
        slow("groups ignored", {}, BANDS, "correlated noise", 1500),
        # Three examples that pull the same way, each clipped by itself, weigh three times the clipping norm.
        slow("clipping per example of a user", {}, USERS, "users", 400),
    ],
)
def test_it_catches(plant, fault, options, experiment, probe, repetitions):
    plant(fault, **options)
    assert audit(experiment, repetitions)[probe].violated


@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "probe"), [(USERS, "users"), (BANDS, "correlated noise")])
def test_users_and_bands_pass_and_the_attack_on_them_is_as_strong_as_on_examples(experiment, probe):
    finding = audit(experiment, 1500)[probe]
    assert not finding.violated
    assert finding.claim == pytest.approx(NOISE.claim(NOISE.probes[0]))
    assert finding.bound > 0.1
    assert finding.scores_with.mean() - finding.scores_without.mean() == pytest.approx(1, abs=0.15)
    assert finding.scores_without.std() == pytest.approx(0.6, rel=0.15)


def ranks(sources):
    """Two ranks that each hold half of the coordinates and add the noise of their shard, as sharded training does.

    ``sources`` gives the randomness of both for the world without and the world with the target.
    """

    def mechanism(present, repetitions):
        width = int(DIRECTIONS**0.5)
        engine = ClippedGradients(torch.nn.Linear(width, width, bias=False), canary_loss, max_grad_norm=1.0)
        engine.accumulate(canary_batch(torch.tensor([0, 1] if present else [1]), width))
        shards = by_canary(engine.sums["weight"]).chunk(2)
        mechanisms = [GaussianMechanism(NOISE.plan, engine.sensitivity, randomness=own) for own in sources(present)]
        rows = [
            torch.cat(
                [rank.privatize({"shard": shard}, step=step)["shard"] for rank, shard in zip(mechanisms, shards, strict=True)]
            )
            for step in range(repetitions)
        ]
        return (torch.stack(rows) * NOISE.plan.batch_size).double().unsqueeze(1).numpy()

    without, present = mechanism(False, 1000), mechanism(True, 1000)
    return [audit_two_worlds(without, present, probe, NOISE.claim(probe), confidence=SURE) for probe in NOISE.probes]


def test_it_catches_ranks_that_share_their_noise():
    honest = ranks(lambda present: (Randomness.from_entropy(), Randomness.from_entropy()))
    assert [finding.name for finding in honest if finding.violated] == []
    shared = ranks(lambda present: (Randomness.seeded(int(present)), Randomness.seeded(int(present))))
    assert "coordinates" in [finding.name for finding in shared if finding.violated]


def test_a_statistic_must_give_one_number_per_repetition():
    observed = np.zeros((10, 1, 4))
    with pytest.raises(InputError, match="one number per repetition"):
        audit_two_worlds(observed, observed, Probe("wrong", "", lambda seen: seen.ravel(), 0.1), 1.0)
