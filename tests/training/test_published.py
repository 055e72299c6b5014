"""What reaches the optimizer of a run: who is in it, how much of them, and which noise.

Statistical tests raise a false alarm with a probability below 1e-8 each, by the exact distribution of what they count.
"""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr
from scipy.stats import binom, chi2
from torch import nn

from dp_microadam import PrivacyPlan
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.workbench.audit.canaries import train_watched, watch_trainer

ALARM = 1e-8


def inside(law, count):
    return law.ppf(ALARM / 2) <= count <= law.isf(ALARM / 2)


def test_a_step_is_a_poisson_sample_in_which_each_example_adds_the_clipping_norm_over_the_expected_batch():
    """Nearly without noise, each with a direction of its own: 1 for who was drawn, and 0 for the others."""
    noise, rate, examples, steps = 0.05, 0.2, 400, 50
    plan = PrivacyPlan(examples, round(rate * examples), noise, steps, 1e-5)
    seen = []
    watch_trainer(plan, torch.ones(examples, dtype=torch.bool), lambda gradient: seen.append(gradient.clone()))
    values = torch.stack(seen).double().numpy()
    drawn = values.round()
    assert set(np.unique(drawn)) == {0, 1}  # nobody twice; a number beyond ten deviations has a probability of 1e-23
    assert inside(binom(drawn.size, rate), drawn.sum())
    assert inside(binom(drawn[1:].size, rate**2), (drawn[1:] * drawn[:-1]).sum())
    # Sizes of batches spread as binomial ones do; those of a fixed size have no spread at all.
    spread = ((drawn.sum(1) - examples * rate) ** 2).sum() / (examples * rate * (1 - rate))
    assert 0.25 * steps < spread < 3 * steps
    # What is left is noise of the plan's size, beside examples and where there are none.
    assert inside(chi2(values.size), ((values - drawn) ** 2).sum() / noise**2)


class Noisy(nn.Module):
    """Two weights of equal size, larger than a block of random numbers, and small tensors of equal size."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(260, 260), nn.Linear(260, 260)
        self.last = nn.Linear(260, 1)

    def forward(self, inputs):
        return self.last(self.second(torch.tanh(self.first(inputs))))


@pytest.mark.parametrize("bands", [1, 4])
def test_every_tensor_has_fresh_noise_of_the_plans_variance_in_every_step_and_epsilon_covers_all_steps(tmp_path, bands):
    """No example has a gradient, so that what is published is noise; with bands, C times it is white."""
    examples, sigma, steps, delta = 8, 1.3, 12, 1e-5
    plan = PrivacyPlan(examples, examples // bands, sigma, steps, delta, "rdp", bands)
    published = []

    def loss(model, batch):
        return model(batch[0]).flatten() * batch[1]

    def observe(gradients):
        published.append({name: gradient.flatten().double() for name, gradient in gradients.items()})

    for run in ("first", "second"):
        train_watched(Noisy(), loss, (torch.ones(examples, 260), torch.zeros(examples)), plan, tmp_path / run, observe)
    unit = plan.batch_size / sigma
    words = []
    for run in (published[:steps], published[steps:]):
        for step in range(steps):
            for name in run[0]:
                terms = zip(plan.noise_coefficients.tolist(), run[step::-1], strict=False)
                white = unit * sum(coefficient * before[name] for coefficient, before in terms)
                assert inside(chi2(len(white)), float((white**2).sum())), f"step {step}, {name}"
                words.append(white[: len(white) // 4 * 4].float().view(-1, 4).numpy().view("V16").ravel())
    # Four numbers in a row that occur twice, in whatever place, tensor, step or run: by chance below 1e-12.
    assert len(np.unique(np.concatenate(words))) == sum(map(len, words))
    record = read_ledger(tmp_path / "first")
    assert record.steps == steps
    # Everybody takes part in all steps of their group: Gaussian mechanisms, of which the sum is one (Balle and Wang 2018).
    mu = math.sqrt(steps / bands) / sigma
    exact = brentq(
        lambda e: np.exp(log_ndtr(mu / 2 - e / mu)) - np.exp(e + log_ndtr(-mu / 2 - e / mu)) - delta, 0, mu**2 / 2 + 40 * mu
    )
    assert exact <= record.epsilon(accountant="pld") * (1 + 1e-6)
