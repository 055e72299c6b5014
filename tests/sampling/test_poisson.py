"""Poisson sampling. False-alarm rates of the statistical tests are below 1e-6."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from samplers import membership, sampler_of
from scipy import stats
from torch.utils.data import Dataset, TensorDataset

from dp_microadam import InputError, PrivacyPlan
from dp_microadam.noise.randomness import Randomness
from dp_microadam.sampling.poisson import PoissonSampler

ALARM = 1e-7


class Squares(Dataset):
    """A map-style dataset whose example i is (i, i²)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return torch.tensor(index), index * index


@pytest.fixture(scope="module")
def drawn() -> np.ndarray:
    return membership(sampler_of(2000, 200, 1000, physical_batch_size=64))


def assert_binomial(counts: np.ndarray, trials: int, rate: float, alarm: float = ALARM) -> None:
    """χ² of independent binomial counts: their mean, and how far they spread around it."""
    assert stats.binomtest(int(counts.sum()), trials * len(counts), rate).pvalue > alarm
    statistic = ((counts - trials * rate) ** 2).sum() / (trials * rate * (1 - rate))
    assert alarm / 2 < stats.chi2.cdf(statistic, df=len(counts)) < 1 - alarm / 2


def test_counts_per_step_are_binomial(drawn):
    """Batch sizes vary as Poisson sampling makes them vary, and no example is in a step twice."""
    assert drawn.max() == 1
    assert_binomial(drawn.sum(axis=1), 2000, 0.1)


def test_every_example_has_the_same_probability(drawn):
    assert_binomial(drawn.sum(axis=0), 1000, 0.1)


def test_steps_are_independent(drawn):
    """Whether an example is in a step says nothing about the next step, nor the one ten later."""
    for lag in (1, 10):
        both = int((drawn[:-lag] & drawn[lag:]).sum())
        assert stats.binomtest(both, drawn[lag:].size, 0.01).pvalue > ALARM


def test_examples_are_independent(drawn):
    for distance in (1, 64):
        both = int((drawn[:, :-distance] & drawn[:, distance:]).sum())
        assert stats.binomtest(both, drawn[:, distance:].size, 0.01).pvalue > ALARM


def test_chunks_are_independent():
    """The first chunk holds the lowest indices drawn; how far it reaches says nothing about who comes after."""
    together, total = 0, 0
    for step in sampler_of(1000, 100, 4000, physical_batch_size=50):
        first, *rest = step.chunks
        together += sum(map(len, rest))
        total += 999 - int(first[-1])
    assert stats.binomtest(together, total, 0.1).pvalue > ALARM


def test_chunking_does_not_change_what_is_drawn():
    whole, cut = (sampler_of(5000, 500, 20, physical_batch_size=size, seed=4) for size in (5000, 7))
    assert np.array_equal(membership(whole), membership(cut))
    for step in cut:
        assert [len(indices) for indices in step.chunks[:-1]] == [7] * (len(step.chunks) - 1)
        assert len(step.chunks[-1]) <= 7


def test_an_empty_batch_is_still_a_step():
    """With one example of 1000 expected, about a third of the steps are empty, and every step is yielded."""
    sampler = sampler_of(1000, 1, 200)
    for steps in (list(sampler), list(sampler.load(torch.arange(1000))), list(sampler.load(Squares(1000)))):
        assert [step.index for step in steps] == list(range(200))
    assert 0 in [len(step.chunks) for step in sampler]


def test_a_seeded_run_resumes_where_it_stopped_and_private_runs_differ():
    whole = membership(sampler_of(300, 30, 20, seed=9))
    resumed = sampler_of(300, 30, 20, first_step=12, seed=9)
    assert len(resumed) == 8
    assert np.array_equal(membership(resumed), whole[12:])
    assert [step.index for step in resumed] == list(range(12, 20))
    assert not np.array_equal(*(membership(sampler_of(300, 30, 20)) for _ in range(2)))


def test_one_band_draws_those_whose_uniform_number_is_below_the_rate():
    for step in sampler_of(50, 20, 4, seed=9):
        uniforms = Randomness.seeded(9).uniforms("sampling", step.index, 50)
        assert torch.cat(step.chunks).tolist() == np.flatnonzero(uniforms < 0.4).tolist()
    (everyone,) = sampler_of(100, 100)
    assert torch.equal(torch.cat(everyone.chunks), torch.arange(100))


def test_tensors_in_memory_are_indexed_whole():
    images, labels = torch.arange(600).view(300, 2), torch.arange(300)
    sampler = sampler_of(300, 50, 5, physical_batch_size=16, seed=2)
    expected = [torch.cat(step.chunks) for step in sampler]
    for data in ((images, labels), TensorDataset(images, labels), {"x": images, "y": labels}):
        for step, indices in zip(sampler.load(data), expected, strict=True):
            chunks = [chunk.values() if isinstance(chunk, dict) else chunk for chunk in step.chunks]
            for part, found in zip((images, labels), zip(*chunks, strict=True), strict=True):
                assert torch.equal(torch.cat(found), part[indices])


@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_are_loaded_with_and_without_workers(workers):
    """Every step gets its own chunks, in order, across prefetching workers; empty steps stay empty."""
    sampler = sampler_of(50, 3, 40, physical_batch_size=2, seed=2)
    expected = [torch.cat(step.chunks) if step.chunks else torch.empty(0) for step in sampler]
    assert {len(indices) for indices in expected} >= {0, 3}
    for step, indices in zip(sampler.load(Squares(50), num_workers=workers), expected, strict=True):
        chunks = list(step.chunks)
        assert all(len(x) <= 2 for x, _ in chunks)
        assert [int(i) for x, _ in chunks for i in x] == indices.tolist()
        assert [int(i) for _, y in chunks for i in y] == [int(i) ** 2 for i in indices]


def test_chunks_that_were_not_consumed_neither_spill_into_the_next_step_nor_come_later():
    sampler = sampler_of(50, 20, 5, physical_batch_size=2, seed=2)
    expected = [step.chunks[0].tolist() for step in sampler]
    for step, first in zip(sampler.load(Squares(50)), expected, strict=True):
        assert next(iter(step.chunks))[0].tolist() == first
    passed, _ = sampler_of(50, 20, 2).load(Squares(50))
    with pytest.raises(InputError, match="step 0 is over"):
        list(passed.chunks)


def test_what_is_drawn_does_not_show_in_length_or_representation():
    """Two samplers that draw different batches look the same."""
    looks = set()
    for _ in range(2):
        sampler = sampler_of(1000, 100, 3, physical_batch_size=32)
        steps = list(sampler)
        looks.add((repr(sampler), len(sampler), tuple(map(repr, steps))))
    assert len(looks) == 1
    with pytest.raises(TypeError):
        len(steps[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"physical_batch_size": 0}, "physical_batch_size is 0"),
        ({"first_step": 11}, "first_step is 11"),
        ({"shard": range(5, 101)}, "shard is range"),
        ({"shard": range(0, 10, 2)}, "shard is range"),
        ({"shard": range(-1, 5)}, "shard is range"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        PoissonSampler(PrivacyPlan(100, 10, 1.0, 10, 1e-5), **arguments)


@pytest.mark.parametrize("data", [torch.zeros(99), Squares(101), (torch.zeros(100), torch.zeros(99))])
def test_data_that_is_not_the_dataset_accounted_for_is_refused(data):
    with pytest.raises(InputError, match="examples"):
        sampler_of(100, 10).load(data)


def test_samples_of_shards_are_together_one_poisson_sample():
    """χ² of the sizes of unions, and of how often each example is drawn; the shards' own sources are independent."""
    shards = [range(700), range(700, 700), range(700, 2000)]
    parts = [membership(sampler_of(2000, 200, 1000, shard=shard)) for shard in shards]
    for shard, part in zip(shards, parts, strict=True):
        assert part[:, : shard.start].sum() == part[:, shard.stop :].sum() == 0, "nothing outside the shard is drawn"
    drawn = sum(parts)
    assert_binomial(drawn.sum(axis=1), 2000, 0.1)
    assert_binomial(drawn.sum(axis=0), 1000, 0.1)


@pytest.mark.parametrize("edges", [(0, 3, 1000), (0, 65_536, 65_537, 200_000), (0, 70_000, 70_000, 200_000)])
def test_a_seeded_sample_does_not_depend_on_how_the_examples_are_divided(edges):
    size = edges[-1]
    (whole,) = sampler_of(size, size // 10, seed=2).draw(0)
    parts = [chunk for edge in pairwise(edges) for chunk in sampler_of(size, size // 10, shard=range(*edge), seed=2).draw(0)]
    assert torch.equal(torch.cat(parts), whole)


BANDS = 7


@pytest.fixture(scope="module")
def cyclic() -> np.ndarray:
    return membership(sampler_of(2000, 200, 1001, physical_batch_size=64, bands=BANDS))


def test_with_bands_each_example_is_only_ever_in_the_steps_of_its_own_group(cyclic):
    """By its number alone: example i in steps t with t ≡ i modulo the bands, so never twice within so many steps."""
    steps, members = np.nonzero(cyclic)
    assert len(steps) > 100_000
    assert (steps % BANDS == members % BANDS).all()


def test_with_bands_the_rate_within_a_group_is_that_many_times_as_large(cyclic):
    rate = BANDS * 200 / 2000
    for group in range(BANDS):
        drawn = cyclic[group::BANDS, group::BANDS]
        assert_binomial(drawn.sum(axis=0), len(drawn), rate, ALARM / BANDS)
        both = int((drawn[:-1] & drawn[1:]).sum())
        assert stats.binomtest(both, drawn[1:].size, rate**2).pvalue > ALARM / BANDS
    assert cyclic.sum() / len(cyclic) == pytest.approx(200, rel=0.01), "the expected batch is the plan's"


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_with_bands_groups_do_not_depend_on_shards(ranks):
    """With a fixed seed the union of what the shards draw is what one process draws; shards begin anywhere in a cycle."""
    options = {"bands": 4, "physical_batch_size": 3, "seed": 3}
    whole = membership(sampler_of(101, 20, 30, **options))
    edges = list(pairwise([101 * rank // ranks for rank in range(ranks + 1)]))
    parts = [membership(sampler_of(101, 20, 30, shard=range(*edge), **options)) for edge in edges]
    assert (sum(parts) == whole).all()
    for part, edge in zip(parts, edges, strict=True):
        assert part[:, : edge[0]].sum() == part[:, edge[1] :].sum() == 0
    assert whole.sum() > 400
