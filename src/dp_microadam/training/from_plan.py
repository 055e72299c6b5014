"""Makes the values of a training step from its plan and settings: sampler and data, mechanism, account; and checks them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dp_microadam.clipping.checks.transform import check_transform
from dp_microadam.errors import InputError
from dp_microadam.ledger.ledger import RunSettings
from dp_microadam.noise.mechanism import GaussianMechanism, NoNoise
from dp_microadam.noise.randomness import Randomness
from dp_microadam.plan.bands import refuse_memory
from dp_microadam.plan.plan import PrivacyPlan, UnprotectedPlan
from dp_microadam.sampling.poisson import PoissonSampler, alone
from dp_microadam.sampling.users import Units, widths
from dp_microadam.training.account import Account, NoAccount
from dp_microadam.training.method import Phase, phases_from
from dp_microadam.training.same_examples import refuse_repeats, require_same_data
from dp_microadam.training.settings import PrivacySettings
from dp_microadam.training.torch_randomness import forked_torch
from dp_microadam.training.training_data import TrainingData
from dp_microadam.training.withheld import withheld

if TYPE_CHECKING:
    from dp_microadam.training.private_step import PrivateStep


def randomness_of(settings: PrivacySettings) -> Randomness:
    """From the operating system's entropy, or from a fixed seed for tests."""
    if settings.seed is None:
        return Randomness.from_entropy(secure=settings.secure)
    return Randomness.seeded(settings.seed, secure=settings.secure)


def mechanism_of(step: PrivateStep) -> GaussianMechanism | NoNoise:
    """The mechanism that the plan accounts for, each rank adding the noise of its own slice; none without privacy."""
    plan = step.plan
    if isinstance(plan, UnprotectedPlan):
        return NoNoise(plan.batch_size)
    named = frozenset().union(*(phase.trainable for phase in step.phases if phase.trainable is not None))
    trained = [p for name, p in step.model.named_parameters() if p.requires_grad or name in named]
    wide = step.settings.secure or any(parameter.dtype == torch.float64 for parameter in trained)
    count = max(1, sum(parameter.numel() for parameter in trained))
    refuse_memory(plan.bands, count, step.performance.noise_memory_gib, wide=wide)
    noise_slice = partial(step.ranks.noise_slice, private=step.randomness.private)
    return GaussianMechanism(plan, step.clip.sensitivity, noise_slice=noise_slice, randomness=step.randomness)


def account_of(step: PrivateStep, run_dir: Path, last_step: int) -> NoAccount:
    """The ledger and statement of a run, or what counts the steps of a run without privacy."""
    plan = step.plan
    if isinstance(plan, UnprotectedPlan):
        return NoAccount(plan, run_dir, step.ranks, last_step)
    settings = partial(_run_settings, step)
    return Account(plan, run_dir, step.ranks, last_step, settings, unpredictable=step.randomness.private)


def sampled_data(step: PrivateStep, train: Any, users: Any) -> TrainingData:
    """The training data of this rank, from which each step draws its sample."""
    with step.ranks.together():
        units = _units_of(step.plan, users)
        data = TrainingData(
            train, partial(_sampler, step, units), step.position, step.loading, step.model, step.ranks.rank, units
        )
        step.method.refuse_data(train)
        return data


def check(step: PrivateStep, data: TrainingData, users: Any) -> None:
    """Refuse a model, loss or transform in which examples interact, and ranks that would not take the same steps."""
    with step.ranks.together():
        if isinstance(step.plan, PrivacyPlan):
            _check_model(step, data)
        else:
            step.clip.reopen()  # without privacy examples may interact, as in batch normalization
    if step.ranks.world_size > 1:
        rules = step.plan, tuple(step.phases), step.account.stamp, step.randomness.description, step.settings.clipping
        step.ranks.require_same("plan, phases, clipping or randomness", (*rules, step.clip.sensitivity))
        require_same_data(step.ranks, data.data)
        step.ranks.require_same("users, the ids of the examples", data.units and data.units.digest())


def _check_model(step: PrivateStep, data: TrainingData) -> None:
    refuse_repeats(data.data)
    loading, model = step.loading, step.model
    sample = withheld(data.sample, shown=step.settings.show_private_metrics)

    def transformed(batch: Any) -> Any:
        with forked_torch(model):
            return loading.transformed(batch, model)

    if loading.transforms:
        check_transform(lambda batch: loading.transformed(batch, model), sample, model, what=loading.transforms)
    prepared = withheld(lambda: transformed(sample), shown=step.settings.show_private_metrics)
    numbers_of_rows = [] if data.units is None else widths(data.units.most)
    step.clip.check(phases_from(step.phases, step.account.updates), prepared, numbers_of_rows)


def _sampler(step: PrivateStep, units: Units | None, first_step: int) -> PoissonSampler:
    plan, ranks, last_step = step.plan, step.ranks, step.account.last_step
    return PoissonSampler(
        plan,
        physical_batch_size=step.performance.physical_batch_size,
        first_step=min(first_step, last_step),
        steps=last_step,
        shard=ranks.shard(plan.dataset_size),
        randomness=step.randomness,
        units=units,
        exchange=alone if ranks.world_size == 1 else lambda own: (ranks.gather(own), ranks.rank),
    )


def _units_of(plan: PrivacyPlan | UnprotectedPlan, users: Any) -> Units | None:
    """The users of a plan of users, None for a plan of examples; InputError if ids are missing, or too many."""
    if plan.unit == "user" and users is None:
        raise InputError("the plan's unit is the user, but users is missing; pass one id per training example as users")
    if plan.unit == "example" and users is not None:
        raise InputError("users is given, but the plan's unit is the example; solve a plan with examples_per_user")
    return None if users is None else Units(users, plan.examples_per_user or 1)


def _run_settings(step: PrivateStep) -> RunSettings:
    """What the header of the ledger says besides the plan."""
    method, settings = step.method, step.settings
    public = ("clipping norm", *settings.public, *method.public, *_phases_in_words(step.phases))
    clipped = method.clipped
    if step.plan.unit == "user":
        whose = f"the mean gradient of each {settings.unit_name or 'user'}'s examples"
        clipped = clipped.replace("the gradient of each example", whose, 1)
    scope = "all trainable parameters together" if settings.clipping == "flat" else "each layer to its share of the bound"
    return RunSettings(
        private=step.randomness.private,
        randomness=step.randomness.description,
        sensitivity=step.clip.sensitivity,
        clipping=f"{clipped}, {scope}, in L2 norm",
        unit_name=settings.unit_name,
        public=public,
    )


def _phases_in_words(phases: Sequence[Phase]) -> list[str]:
    """The phases of a run with several, in words for its privacy statement."""
    if len(phases) == 1:
        return []
    steps: Counter[str] = Counter()
    for phase in phases:
        steps[phase.name] += phase.steps
    return ["steps of each phase (" + ", ".join(f"{name} {count}" for name, count in steps.items()) + ")"]
