"""Ways to break the guarantee, as patches of the real pipeline; none is a switch of the product."""

import numpy as np
import pytest
import torch

from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.privacy.mechanism import GaussianMechanism
from dp_microadam.privacy.randomness import Randomness
from dp_microadam.privacy.sampling import PoissonSampler


def no_noise(patch):
    patch.setattr(GaussianMechanism, "_noisy", lambda self, total, standard: total.clone())


def no_clipping(patch):
    patch.setattr(ClippedGradients, "_coefficients", staticmethod(lambda norms, bound, usable: usable.to(norms.dtype)))


def half_the_noise(patch):
    original = GaussianMechanism._noisy
    patch.setattr(GaussianMechanism, "_noisy", lambda self, total, standard: original(self, total, standard / 2))


def noise_per_chunk(patch, *, deviation, chunks):
    """Each chunk with examples in it adds its share of the deviation, as if deviations and not variances added up."""
    no_noise(patch)
    original = ClippedGradients.accumulate

    def accumulate(self, batch):
        norms = original(self, batch)
        if len(norms):
            for total in self.sums.values():
                total += deviation / chunks * torch.randn_like(total)
        return norms

    patch.setattr(ClippedGradients, "accumulate", accumulate)


def noise_used_for_two_steps(patch):
    original = Randomness.normals_for
    kept = {}

    def normals_for(self, counts, step, dtype):
        if step % 2 == 0:
            kept.update(original(self, counts, step, dtype))
        return {purpose: kept[purpose].clone() for purpose in counts}

    patch.setattr(Randomness, "normals_for", normals_for)


def division_by_the_realised_batch(patch):
    accumulate, mean = ClippedGradients.accumulate, GaussianMechanism.mean
    seen = []

    def count(self, batch):
        norms = accumulate(self, batch)
        seen.append(len(norms))
        return norms

    def divide(self, noisy_sums, *, like):
        realised = max(1, sum(seen))
        seen.clear()
        right = mean(self, noisy_sums, like=like)
        return {name: value * self.expected_batch_size / realised for name, value in right.items()}

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


FAULTS = {
    "no noise": no_noise,
    "no clipping": no_clipping,
    "half the noise": half_the_noise,
    "noise per chunk": noise_per_chunk,
    "noise used for two steps": noise_used_for_two_steps,
    "division by the realised batch": division_by_the_realised_batch,
    "an example counted twice": last_of_a_chunk_counted_again_in_the_next,
    "shuffled batches": shuffled_batches,
}


@pytest.fixture
def plant(monkeypatch):
    """Plants a fault by its name for the length of a test."""
    return lambda fault, **options: FAULTS[fault](monkeypatch, **options)
