"""Ways to break the guarantee, as patches of the real pipeline; none is a switch of the product."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dp_microadam.clipping import engine as engine_module
from dp_microadam.clipping.batches import select
from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.noise.mechanism import GaussianMechanism
from dp_microadam.noise.randomness import Randomness
from dp_microadam.sampling.poisson import PoissonSampler


def no_noise(patch):
    patch.setattr(GaussianMechanism, "_noisy", lambda self, totals, noise: [total.clone() for total in totals])


def no_clipping(patch):
    patch.setattr(ClippedGradients, "_coefficients", staticmethod(lambda norms, bound: torch.ones_like(norms)))


def blind_start_up_check(patch):
    """So that what comes after it has to notice what it would have refused."""
    patch.setattr(engine_module, "check_against_autograd", lambda *arguments: None)


def clipping_per_example_of_a_user(patch):
    """Each example of a user is clipped by itself, and the clipped ones are added up."""
    original = ClippedGradients.accumulate

    def accumulate(self, batch, weights=None):
        if weights is None:
            return original(self, batch)
        for user, own in enumerate(weights):
            for column, weight in enumerate(own.tolist()):
                if weight:
                    original(self, select(batch, torch.tensor([user * len(own) + column])))
        return torch.zeros(len(weights))

    patch.setattr(ClippedGradients, "accumulate", accumulate)


def less_noise(patch, *, factor):
    original = GaussianMechanism._noisy
    patch.setattr(
        GaussianMechanism, "_noisy", lambda self, totals, noise: original(self, totals, [one * factor for one in noise])
    )


def noise_per_chunk(patch, *, deviation, chunks):
    """Each chunk with examples in it adds its share of the deviation, as if deviations and not variances added up."""
    no_noise(patch)
    original = ClippedGradients.accumulate

    def accumulate(self, batch, weights=None):
        norms = original(self, batch, weights)
        if len(norms):
            for total in self.sums.values():
                total += deviation / chunks * torch.randn_like(total)
        return norms

    patch.setattr(ClippedGradients, "accumulate", accumulate)


def noise_used_for_two_steps(patch):
    original = Randomness.fill_normals
    kept = {}

    def fill_normals(self, parts, step):
        original(self, parts, step)
        for purpose, numbers in parts.items():
            if step % 2 == 0:
                kept[purpose] = numbers.clone()
            numbers.copy_(kept[purpose])

    patch.setattr(Randomness, "fill_normals", fill_normals)


def division_by_the_realised_batch(patch):
    accumulate, mean = ClippedGradients.accumulate, GaussianMechanism.mean
    seen = []

    def count(self, batch, weights=None):
        norms = accumulate(self, batch, weights)
        seen.append(len(norms))
        return norms

    def divide(self, noisy_sums, *, like):
        realised = max(1, sum(seen))
        seen.clear()
        right = mean(self, noisy_sums, like=like)
        return {name: value * self._plan.batch_size / realised for name, value in right.items()}

    patch.setattr(ClippedGradients, "accumulate", count)
    patch.setattr(GaussianMechanism, "mean", divide)


def last_of_a_chunk_counted_again_in_the_next(patch):
    original = PoissonSampler.draw

    def draw(self, step):
        chunks = original(self, step)
        if not chunks:
            return chunks
        before = (torch.empty(0, dtype=torch.long), *chunks[:-1])
        return tuple(torch.cat([previous[-1:], chunk]) for previous, chunk in zip(before, chunks, strict=True))

    patch.setattr(PoissonSampler, "draw", draw)


def shuffled_batches(patch):
    """Every two steps go through the data once: who was in the first is not in the second."""
    first = {}

    def draw(self, step):
        if step % 2 == 0:
            first["half"] = np.random.default_rng().random(self.dataset_size) < 0.5
        chosen = np.flatnonzero(first["half"] == (step % 2 == 0))
        return torch.from_numpy(chosen).split(self.physical_batch_size) if len(chosen) else ()

    patch.setattr(PoissonSampler, "draw", draw)


def groups_ignored(patch):
    """Every step takes from all examples, with the rate that is meant for one group."""
    original = PoissonSampler.draw

    def draw(self, step):
        plan = self.plan
        self.plan = replace(plan, bands=1, batch_size=plan.bands * plan.batch_size)
        try:
            return original(self, step)
        finally:
            self.plan = plan

    patch.setattr(PoissonSampler, "draw", draw)


FAULTS = {
    "no noise": no_noise,
    "less noise": less_noise,
    "no clipping": no_clipping,
    "a blind start-up check": blind_start_up_check,
    "noise per chunk": noise_per_chunk,
    "noise used for two steps": noise_used_for_two_steps,
    "division by the realised batch": division_by_the_realised_batch,
    "an example counted twice": last_of_a_chunk_counted_again_in_the_next,
    "shuffled batches": shuffled_batches,
    "groups ignored": groups_ignored,
    "clipping per example of a user": clipping_per_example_of_a_user,
}


@pytest.fixture
def plant(monkeypatch):
    """Plants a fault by its name for the length of a test."""
    return lambda fault, **options: FAULTS[fault](monkeypatch, **options)
