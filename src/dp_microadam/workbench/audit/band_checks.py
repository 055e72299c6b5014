"""Checks of correlated noise: do groups match the bands, and is the noise what the bands promise?

The proof needs two things of a run with b bands. No example takes part in two steps closer than b: example i is in steps t with
t ≡ i modulo b only, each with the plan's rate. And C times the published noise is white, in every step and from one step to the
next: what a run publishes without gradients is mixed by C here, and then passes the checks that independent noise passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.sampling.poisson import PoissonSampler
from dp_microadam.workbench.audit.accounting_checks import accounting_checks
from dp_microadam.workbench.audit.check import Check
from dp_microadam.workbench.audit.noise_checks import DELTA, EXAMPLES, NOISE_MULTIPLIER, NoiseStatistics, Numbers, observe_noise
from dp_microadam.workbench.audit.sampling_checks import Drawn, drawing_checks

BANDS = 4
_SAMPLED = 8_000
_BATCH = 500


def band_checks(steps: int, noise_steps: int, advance: Callable[[int], None] = lambda steps: None) -> list[Check]:
    """Check the sampler for ``steps`` cycles of its groups, and ``PrivateTrainer`` for ``noise_steps`` steps."""
    return [*group_checks(steps, advance), *banded_noise_checks(noise_steps, advance)]


def group_checks(cycles: int, advance: Callable[[int], None] = lambda steps: None) -> list[Check]:
    """Check that the sampler keeps to the groups of the plan, and draws a Poisson sample within each.

    One cycle of b steps goes through all groups once, so its draws together are a Poisson sample of all examples with rate
    b·B/N, and pass the checks of such samples.
    """
    plan = PrivacyPlan(_SAMPLED, _BATCH, 1.0, BANDS * cycles, 1e-5, bands=BANDS)
    together: Drawn = np.zeros((cycles, _SAMPLED), dtype=np.uint8)
    foreign = 0
    for step in PoissonSampler.from_plan(plan, physical_batch_size=512):
        for chunk in step.chunks:
            members = chunk.numpy()
            foreign += int(np.count_nonzero(members % BANDS != step.index % BANDS))
            np.add.at(together[step.index // BANDS], members, 1)
        advance(1)
    size = f"{plan.steps:,} steps, {_SAMPLED:,} examples in {BANDS} groups"
    own = Check(
        "sampling",
        "bands: groups",
        "does each step sample from its own group only, so that nobody takes part twice within the bands?",
        "draws from other groups",
        foreign,
        0,
        0,
        0.0,
        size,
    )
    return [own, *drawing_checks("bands", together, plan.sample_rate)]


def banded_noise_checks(steps: int, advance: Callable[[int], None] = lambda steps: None) -> list[Check]:
    """Check the published noise of a run with bands, mixed by C, and that the stated ε covers the steps of each group."""
    statistics = NoiseStatistics()
    plan = PrivacyPlan(EXAMPLES, EXAMPLES // BANDS, NOISE_MULTIPLIER, steps, DELTA, "pld", BANDS)
    coefficients = plan.noise_coefficients
    last: list[dict[str, Numbers]] = []

    def observe(noise: dict[str, Numbers]) -> None:
        last.insert(0, noise)
        del last[BANDS:]
        mixed = {
            name: sum((c * before[name] for c, before in zip(coefficients, last, strict=False)), np.zeros(1)).astype(np.float32)
            for name in noise
        }
        statistics.observe(mixed)
        advance(1)

    stated = observe_noise(plan, observe)
    # At rate 1 a group is in every b-th step, so the closed form is that of so many Gaussians.
    per_group = replace(stated, updates=math.ceil(stated.updates / BANDS))
    (recorded, _), (_, epsilon) = (accounting_checks(each, NOISE_MULTIPLIER, DELTA) for each in (stated, per_group))
    return [replace(check, name=f"bands: {check.name}") for check in (*statistics.checks(), recorded, epsilon)]


def whitened(observed: torch.Tensor, plan: PrivacyPlan) -> torch.Tensor:
    """C times what the steps of a run published, a row for each step: the sums mixed by C, plus independent noise."""
    mixed = torch.zeros_like(observed)
    for age, coefficient in enumerate(plan.noise_coefficients.tolist()[: len(observed)]):
        mixed[age:] += coefficient * observed[: len(observed) - age]
    return mixed
