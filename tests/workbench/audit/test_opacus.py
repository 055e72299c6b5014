"""The same auditors on a pipeline that is not ours: Opacus with its usual settings."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dp_microadam import PrivacyPlan
from dp_microadam.workbench.audit.canaries import CLIPPING_NORM, by_canary, canary_batch, canary_loss, canary_width
from dp_microadam.workbench.audit.one_run import audit_one_run
from dp_microadam.workbench.audit.two_world import DIRECTIONS, NOISE, audit_two_worlds

opacus = pytest.importorskip("opacus")

# What Opacus warns about, secure randomness and hooks on inputs without gradients, is not under audit.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def opacus_gradients(plan, present, *, steps, noise_multiplier, directions=None):
    """The gradients that Opacus hands to the optimizer, in units of the clipping norm."""
    width = canary_width(directions or len(present))
    model = torch.nn.Linear(width, width, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    seen = []
    # With summed losses Opacus does not divide by the batch size.
    optimizer.register_step_pre_hook(lambda *_: seen.append(by_canary(model.weight.grad) / CLIPPING_NORM))
    loader = DataLoader(TensorDataset(torch.arange(len(present))), batch_size=plan.batch_size)
    private_model, private_optimizer, loader = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=CLIPPING_NORM,
        loss_reduction="sum",
    )
    while len(seen) < steps:
        for (indices,) in loader:
            private_optimizer.zero_grad()
            canary_loss(private_model, canary_batch(indices[present[indices]], width)).sum().backward()
            private_optimizer.step()
    return seen[:steps]


@pytest.fixture(scope="module")
def plan():
    return PrivacyPlan.solve(dataset_size=10_000, batch_size=5000, delta=1e-5, epsilon=1.0, steps=4, accountant="pld")


def audit(plan, noise_multiplier):
    torch.manual_seed(5)

    def pipeline(present):
        return sum(opacus_gradients(plan, present, steps=plan.steps, noise_multiplier=noise_multiplier))

    return audit_one_run(pipeline, plan.dataset_size, plan.epsilon, plan.delta, seed=5)


def test_one_run_finds_opacus_honest_with_a_bound_that_says_something(plan):
    finding = audit(plan, plan.noise_multiplier)
    assert not finding.violated
    assert finding.bound >= plan.epsilon / 8


def test_one_run_catches_opacus_without_noise(plan):
    assert audit(plan, 0.0).bound > 2 * plan.epsilon


WORLDS = [pytest.param(1.0, False, id="as claimed"), pytest.param(0.5, True, id="half the noise")]


@pytest.mark.slow
@pytest.mark.parametrize(("share", "caught"), WORLDS)
def test_two_worlds_agree_on_opacus(share, caught):
    """At 1 − 1e-7 each; half the noise is missed with a probability below 1e-6, as for our own pipeline."""
    repetitions = 1500
    torch.manual_seed(6)

    def mechanism(present):
        members = torch.tensor([present, True])
        noise = share * NOISE.plan.noise_multiplier
        steps = opacus_gradients(NOISE.plan, members, steps=repetitions, noise_multiplier=noise, directions=DIRECTIONS)
        return torch.stack(steps).double().unsqueeze(1).numpy()

    without, present = mechanism(False), mechanism(True)
    findings = [audit_two_worlds(without, present, probe, NOISE.claim(probe), confidence=1 - 1e-7) for probe in NOISE.probes]
    assert findings[0].violated == caught
    assert not any(finding.violated for finding in findings[1:])
    assert np.mean(findings[0].scores_with) == pytest.approx(1, abs=0.1)
