"""Samplers of plans of a given size, and what they draw."""

import numpy as np

from dp_microadam import PrivacyPlan
from dp_microadam.noise.randomness import Randomness
from dp_microadam.sampling.poisson import PoissonSampler

_OF_THE_PLAN = ("bands", "max_batch_size")


def sampler_of(dataset_size, batch_size, steps=1, *, seed=None, **options):
    """The sampler of a plan of this size; ``options`` are the plan's or the sampler's."""
    of_plan = {name: options.pop(name) for name in _OF_THE_PLAN if name in options}
    if "units" in options:
        of_plan["examples_per_user"] = options["units"].most
    plan = PrivacyPlan(dataset_size, batch_size, 1.0, max(steps, of_plan.get("bands", 1)), 1e-5, **of_plan)
    randomness = Randomness.from_entropy() if seed is None else Randomness.seeded(seed)
    return PoissonSampler(plan, steps=steps, randomness=randomness, **options)


def membership(sampler):
    """How often each example is in each step, as a matrix."""
    drawn = np.zeros((len(sampler), sampler.dataset_size), dtype=np.int64)
    for row, step in zip(drawn, sampler, strict=True):
        for indices in step.chunks:
            row[indices.numpy()] += 1
    return drawn
