"""The two-world auditor against the real trainer: every planted fault is caught, and the honest pipeline passes.

All findings hold at a confidence of 1 − 1e-7 each, so that an honest pipeline is accused with a probability below 1e-6 in this
whole file. Repetitions are so many that a planted fault is missed with a probability below 1e-6; docs/audit.md has the figures.
"""

import numpy as np
import pytest
import torch

from dp_microadam import ClippedGradients, GaussianMechanism, PrivacyPlan, Randomness
from dp_microadam.errors import InputError
from dp_microadam.workbench.audit.canaries import by_canary, canary_batch, canary_loss
from dp_microadam.workbench.audit.probes import BANDS, COMPOSITION, NOISE, SAMPLING, USERS
from dp_microadam.workbench.audit.suite import PROFILES, audit_experiment, audit_pipeline
from dp_microadam.workbench.audit.two_world import DIRECTIONS, Probe, audit_two_worlds, strength

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
    findings = {finding.name: finding for finding in audit_pipeline(plan, profile.repetitions, confidence=SURE)}
    assert [finding.name for finding in findings.values() if finding.violated] == []
    # An auditor that always answers 0 fails: at 99 % the same scores show at least a tenth of the claim.
    noise = findings["noise scale"]
    worlds = (world[:, None, None] for world in (noise.scores_without, noise.scores_with))
    again = audit_two_worlds(*worlds, Probe("again", "", strength, noise.delta), noise.claim, confidence=0.99)
    assert again.bound >= noise.claim / 10


@pytest.mark.parametrize(
    ("fault", "options", "repetitions"),
    [
        ("slightly less noise", {"factor": 0.1}, 300),
        pytest.param("half the noise", {}, 1500, marks=pytest.mark.slow),
        pytest.param("an example counted twice", {}, 1500, marks=pytest.mark.slow),
    ],
)
def test_it_catches_in_the_scale_of_noise(plant, fault, options, repetitions):
    plant(fault, **options)
    assert audit(NOISE, repetitions)["noise scale"].violated


@pytest.mark.slow
def test_it_catches_noise_added_per_physical_chunk_with_too_little_each(plant):
    plant("noise per chunk", deviation=NOISE.plan.noise_multiplier, chunks=2)
    assert audit(NOISE, 1000)["batch size"].violated


@pytest.mark.slow
def test_it_catches_division_by_the_realised_batch(plant):
    plant("division by the realised batch")
    assert audit(NOISE, 400)["batch size"].violated


@pytest.mark.slow
def test_it_catches_noise_reused_between_steps(plant):
    plant("noise used for two steps")
    assert audit(COMPOSITION, 600)["repeated noise"].violated


@pytest.mark.slow
def test_it_catches_a_sampler_that_is_not_independent_between_steps(plant):
    plant("shuffled batches")
    assert audit(SAMPLING, 400)["sampling"].violated


@pytest.mark.slow
def test_it_catches_groups_that_do_not_match_the_bands(plant):
    """Everybody in every step of two bands: the two participations share a row, and add up there."""
    plant("groups ignored")
    assert audit(BANDS, 1500)["correlated noise"].violated


@pytest.mark.slow
def test_it_catches_examples_of_a_user_that_are_clipped_one_by_one(plant):
    """Three examples that pull the same way, each clipped by itself, weigh three times the clipping norm."""
    plant("clipping per example of a user")
    assert audit(USERS, 400)["users"].violated


@pytest.mark.slow
def test_honest_users_pass_and_the_attack_on_them_is_as_strong_as_on_examples():
    finding = audit(USERS, 1500)["users"]
    assert not finding.violated
    assert finding.claim == pytest.approx(NOISE.claim(NOISE.probes[0]))
    assert finding.bound > 0.1
    assert finding.scores_with.mean() - finding.scores_without.mean() == pytest.approx(1, abs=0.15)
    assert finding.scores_without.std() == pytest.approx(0.6, rel=0.15)


@pytest.mark.slow
def test_honest_bands_pass_and_the_attack_on_them_is_as_strong_as_on_one_band():
    finding = audit(BANDS, 1500)["correlated noise"]
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
        mechanisms = [GaussianMechanism.from_plan(NOISE.plan, engine.sensitivity, randomness=own) for own in sources(present)]
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
