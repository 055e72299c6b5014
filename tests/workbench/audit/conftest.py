"""Ways to break the guarantee, as patches of the real pipeline; none is a switch of the product."""

import dataclasses

import numpy as np
import pytest
import torch

from dp_microadam.accounting import costs as accounting
from dp_microadam.clipping import engine as engine_module
from dp_microadam.clipping.batches import select
from dp_microadam.clipping.embedding import EmbeddingCall
from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.clipping.rule import PartsCall
from dp_microadam.ledger.ledger import LedgerRecord, PrivacyLedger
from dp_microadam.noise import mechanism, randomness
from dp_microadam.noise.correlated import CorrelatedNoise
from dp_microadam.noise.mechanism import GaussianMechanism
from dp_microadam.noise.randomness import Randomness
from dp_microadam.sampling import poisson as sampling
from dp_microadam.sampling.poisson import PoissonSampler
from dp_microadam.sampling.users import Units


def no_noise(patch):
    patch.setattr(GaussianMechanism, "_noisy", lambda self, totals, noise: [total.clone() for total in totals])


def no_clipping(patch):
    patch.setattr(ClippedGradients, "_coefficients", staticmethod(lambda norms, bound, usable: usable.to(norms.dtype)))


def blind_start_up_check(patch):
    """So that what comes after it has to notice what it would have refused."""
    patch.setattr(engine_module, "check_clip", lambda *arguments: None)


def clipping_per_chunk(patch):
    """One coefficient for all examples of a chunk, from the norm of all of them."""

    def coefficients(norms, bound, usable):
        together = torch.linalg.vector_norm(norms[usable]).clamp(min=bound)
        return torch.where(usable, bound / together, torch.zeros_like(norms))

    patch.setattr(ClippedGradients, "_coefficients", staticmethod(coefficients))


def clipping_without_embeddings(patch):
    original = EmbeddingCall.clipped_sums
    patch.setattr(EmbeddingCall, "clipped_sums", lambda self, coefficients: original(self, torch.ones_like(coefficients)))


def clipping_without_biases(patch):
    def clipped_sums(self, coefficients):
        ones = torch.ones_like(coefficients)
        return {name: part.weighted_sum(ones if name == "bias" else coefficients) for name, part in self.parts.items()}

    patch.setattr(PartsCall, "clipped_sums", clipped_sums)


def norms_without_embeddings(patch):
    original = EmbeddingCall.squared_norms
    patch.setattr(EmbeddingCall, "squared_norms", lambda self, gradient: 0 * original(self, gradient))


def non_finite_examples_kept(patch):
    patch.setattr(PartsCall, "remove", lambda self, rows: None)


def clipping_per_example_of_a_user(patch, *, mean=False):
    """Each example of a user is clipped by itself, and the clipped ones are added up, or averaged."""
    original = ClippedGradients.accumulate

    def accumulate(self, batch, weights=None):
        if weights is None:
            return original(self, batch)
        for user, own in enumerate(weights):
            for column, weight in enumerate(own.tolist()):
                if weight:
                    before = {name: total.clone() for name, total in self.sums.items()}
                    row = torch.tensor([user * len(own) + column])
                    original(self, select(batch, row))
                    for name, total in self.sums.items():
                        total.copy_(before[name] + (weight if mean else 1.0) * (total - before[name]))
        return torch.zeros(len(weights))

    patch.setattr(ClippedGradients, "accumulate", accumulate)


def same_examples_of_a_user(patch):
    """Of a user with many examples the first k are taken in every step."""
    patch.setattr(Randomness, "uniforms", _ascending(Randomness.uniforms))


def _ascending(original):
    def uniforms(self, purpose, step, count, *, first=0):
        drawn = original(self, purpose, step, count, first=first)
        return np.arange(count) / (count + 1) if purpose == "examples of users" else drawn

    return uniforms


def more_examples_of_a_user(patch):
    """Users bring one example more than the plan says."""
    original = Units.__init__
    patch.setattr(Units, "__init__", lambda self, users, most: original(self, users, most + 1))


def users_drawn_by_their_examples(patch):
    """A user takes part if any of their examples is drawn, as when examples are sampled and then gathered."""

    def batches(self, users, step, randomness, physical_batch_size):
        sizes = np.diff(self._offsets)
        missed = 1 - len(users) / len(self)
        taken = np.flatnonzero(np.random.default_rng().random(len(self)) > missed**sizes)
        return original(self, taken, step, randomness, physical_batch_size)

    original = Units.batches
    patch.setattr(Units, "batches", batches)


def half_the_sensitivity(patch):
    """The clipping norm reaches the noise as half of what the engine clips to."""
    patch.setattr(ClippedGradients, "sensitivity", property(lambda self: self._bound / 2))


def larger_rate(patch, *, factor):
    patch.setattr(PoissonSampler, "sample_rate", property(lambda self: factor * self.batch_size / self.dataset_size))


def batches_of_fixed_size(patch):
    def draw(self, step):
        chosen = np.random.default_rng().permutation(self.dataset_size)[: self.batch_size]
        return torch.from_numpy(np.sort(chosen)).split(self.physical_batch_size)

    patch.setattr(PoissonSampler, "draw", draw)


def shuffled_epochs(patch):
    """Every epoch goes through a new order, batch by batch, of whatever size the Poisson sample would have had."""
    original = PoissonSampler.draw
    kept = {}

    def draw(self, step):
        count = sum(len(chunk) for chunk in original(self, step))
        order = kept.get(id(self), np.empty(0, dtype=np.int64))
        if len(order) < count:
            order = np.random.default_rng().permutation(self.dataset_size)
        chosen, kept[id(self)] = order[:count], order[count:]
        return torch.from_numpy(np.sort(chosen)).split(self.physical_batch_size) if count else ()

    patch.setattr(PoissonSampler, "draw", draw)


def repeated_samples(patch):
    original = PoissonSampler.draw
    kept = {}

    def draw(self, step):
        if step % 2 == 0:
            kept["sample"] = original(self, step)
        return kept["sample"]

    patch.setattr(PoissonSampler, "draw", draw)


def _change_noise(patch, change):
    """``change(normals by tensor, step)`` alters what the generator made for a step."""
    original = mechanism.white_noise

    def white_noise(*arguments, step, dtype):
        made = original(*arguments, step=step, dtype=dtype)
        change(made, step)
        return made

    patch.setattr(mechanism, "white_noise", white_noise)


def no_noise_in_every_tenth_step(patch, *, every=10):
    def change(made, step):
        for numbers in made.values():
            numbers.mul_(step % every != every - 1)

    _change_noise(patch, change)


def no_noise_on_a_bias(patch):
    _change_noise(patch, lambda made, step: made["second.bias"].zero_())


def noise_repeated_in_blocks(patch):
    original = Randomness._bits
    patch.setattr(Randomness, "_bits", lambda self, label, block, *count: original(self, label, 0, *count))


def noise_repeated_between_tensors(patch, *, factor=1.0):
    _change_noise(patch, lambda made, step: made["second.weight"].copy_(factor * made["first.weight"]))


def same_noise_in_every_step(patch):
    original = Randomness.fill_normals
    kept = {}

    def fill_normals(self, parts, step):
        original(self, parts, step)
        for purpose, numbers in parts.items():
            numbers.copy_(kept.setdefault(purpose, numbers.clone()))

    patch.setattr(Randomness, "fill_normals", fill_normals)


def slightly_less_noise(patch, *, factor):
    original = GaussianMechanism._noisy
    patch.setattr(
        GaussianMechanism, "_noisy", lambda self, totals, noise: original(self, totals, [one * factor for one in noise])
    )


def same_seed_in_every_run(patch):
    own = {"seed": None, "made_by": randomness._OWN_CLASS_METHODS}
    patch.setattr(Randomness, "from_entropy", classmethod(lambda cls, secure=False: cls(bytes(32), secure=secure, **own)))


def short_seeds(patch, *, bits):
    original = randomness._statistical_bits
    keep = (1 << bits) - 1
    short = lambda key: (int.from_bytes(key, "little") & keep).to_bytes(32, "little")  # noqa: E731
    patch.setattr(randomness, "_statistical_bits", lambda key, count: original(short(key), count))


def coarse_uniforms(patch, *, bits):
    """Normal numbers from uniforms of so many bits, whose tails end early."""
    patch.setattr(randomness, "_uniforms", lambda words: (words >> np.uint64(64 - bits)).astype(np.float64) * 2.0**-bits)


def steps_left_out_of_the_ledger(patch):
    original = PrivacyLedger.record_step
    taken = {}

    def record_step(self, *arguments, **options):
        step = taken[self.path] = taken.get(self.path, -1) + 1
        return original(self, *arguments, **options) if step < 8 else step

    patch.setattr(PrivacyLedger, "record_step", record_step)


def one_step_not_accounted(patch):
    def epsilon(self, delta=None, accountant=None):
        fewer = [dataclasses.replace(part, steps=part.steps - 1) for part in self.spent if part.steps > 1]
        chosen = self.plan.delta if delta is None else delta
        return accounting.epsilon(fewer, chosen, accountant or self.plan.accountant)

    patch.setattr(LedgerRecord, "epsilon", epsilon)


def half_the_noise(patch):
    original = GaussianMechanism._noisy
    patch.setattr(GaussianMechanism, "_noisy", lambda self, totals, noise: original(self, totals, [one / 2 for one in noise]))


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


def groups_that_do_not_match_bands(patch, *, groups):
    """The sampler divides the examples into another number of groups than the noise has bands; batches have the right size."""
    original = PoissonSampler.draw

    def draw(self, step):
        bands, self.bands = self.bands, groups
        try:
            return original(self, step)
        finally:
            self.bands = bands

    patch.setattr(PoissonSampler, "draw", draw)


def groups_by_place_in_the_order_of_another_run(patch):
    """Groups that change from cycle to cycle: an example may be last in one and first in the next."""
    original = PoissonSampler.draw

    def draw(self, step):
        return original(self, step + step // self.bands)

    patch.setattr(PoissonSampler, "draw", draw)


def last_ones_dropped(patch):
    """Of a sample that exceeds the cap, those with the smallest numbers are kept."""
    patch.setattr(sampling, "keep_smallest", lambda own, most, exchange: np.arange(len(own)) < most)


def cap_ignored(patch):
    patch.setattr(PoissonSampler, "_within_cap", lambda self, sampled, step, first, end: sampled)


def cap_not_accounted(patch):
    """Samples are cut to the cap, but ε is that of Poisson sampling."""
    original = LedgerRecord.epsilon

    def epsilon(self, *arguments, **options):
        spent = tuple(dataclasses.replace(part, cap=None) for part in self.spent)
        return original(dataclasses.replace(self, spent=spent), *arguments, **options)

    patch.setattr(LedgerRecord, "epsilon", epsilon)


def groups_ignored(patch):
    """Every step takes from all examples, with the rate that is meant for one group."""
    rate = PoissonSampler.sample_rate.fget
    original = PoissonSampler.draw

    def draw(self, step):
        bands, self.bands = self.bands, 1
        fixed = rate(self) * bands
        patch.setattr(PoissonSampler, "sample_rate", property(lambda self: fixed))
        try:
            return original(self, step)
        finally:
            self.bands = bands

    patch.setattr(PoissonSampler, "draw", draw)


def chain_restarted_every_step(patch):
    original = CorrelatedNoise.correlate_

    def correlate_(self, white, *, step):
        self.forget()
        original(self, white, step=step)

    patch.setattr(CorrelatedNoise, "correlate_", correlate_)


def noise_not_correlated(patch):
    patch.setattr(CorrelatedNoise, "correlate_", lambda self, white, *, step: None)


FAULTS = {
    "groups that do not match bands": groups_that_do_not_match_bands,
    "groups that change": groups_by_place_in_the_order_of_another_run,
    "groups ignored": groups_ignored,
    "the last ones dropped": last_ones_dropped,
    "the cap ignored": cap_ignored,
    "a cap that is not accounted": cap_not_accounted,
    "a chain restarted every step": chain_restarted_every_step,
    "noise that is not correlated": noise_not_correlated,
    "clipping per example of a user": clipping_per_example_of_a_user,
    "the same examples of a user": same_examples_of_a_user,
    "more examples of a user": more_examples_of_a_user,
    "users drawn by their examples": users_drawn_by_their_examples,
    "no noise": no_noise,
    "no clipping": no_clipping,
    "a blind start-up check": blind_start_up_check,
    "clipping per chunk": clipping_per_chunk,
    "embeddings not clipped": clipping_without_embeddings,
    "biases not clipped": clipping_without_biases,
    "norms without embeddings": norms_without_embeddings,
    "non-finite examples kept": non_finite_examples_kept,
    "half the noise": half_the_noise,
    "half the sensitivity": half_the_sensitivity,
    "slightly less noise": slightly_less_noise,
    "noise per chunk": noise_per_chunk,
    "noise used for two steps": noise_used_for_two_steps,
    "no noise in every tenth step": no_noise_in_every_tenth_step,
    "no noise on a bias": no_noise_on_a_bias,
    "noise repeated in blocks": noise_repeated_in_blocks,
    "noise repeated between tensors": noise_repeated_between_tensors,
    "same noise in every step": same_noise_in_every_step,
    "same seed in every run": same_seed_in_every_run,
    "short seeds": short_seeds,
    "coarse uniforms": coarse_uniforms,
    "division by the realised batch": division_by_the_realised_batch,
    "an example counted twice": last_of_a_chunk_counted_again_in_the_next,
    "shuffled batches": shuffled_batches,
    "a larger rate": larger_rate,
    "batches of fixed size": batches_of_fixed_size,
    "shuffled epochs": shuffled_epochs,
    "repeated samples": repeated_samples,
    "steps left out of the ledger": steps_left_out_of_the_ledger,
    "one step not accounted": one_step_not_accounted,
}


@pytest.fixture
def plant(monkeypatch):
    """Plants a fault by its name for the length of a test."""
    return lambda fault, **options: FAULTS[fault](monkeypatch, **options)
