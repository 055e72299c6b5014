"""Poisson sampling. False-alarm rates of the statistical tests are below 1e-6."""

from itertools import pairwise

import numpy as np
import pytest
import torch
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


def membership(sampler: PoissonSampler) -> np.ndarray:
    """Which examples each step drew, as a matrix of zeros and ones."""
    drawn = np.zeros((len(sampler), sampler.dataset_size), dtype=np.int8)
    for row, step in zip(drawn, sampler, strict=True):
        for indices in step.chunks:
            row[indices.numpy()] += 1
    return drawn


@pytest.fixture(scope="module")
def drawn() -> np.ndarray:
    return membership(PoissonSampler(2000, 200, steps=1000, physical_batch_size=64))


def test_no_example_is_drawn_twice_in_a_step(drawn):
    assert drawn.max() == 1


def test_counts_per_step_are_binomial(drawn):
    """Batch sizes vary as Poisson sampling makes them vary: χ² over all steps, not just the mean."""
    sizes = drawn.sum(axis=1)
    variance = 2000 * 0.1 * 0.9
    statistic = ((sizes - 200) ** 2).sum() / variance
    assert ALARM / 2 < stats.chi2.cdf(statistic, df=len(sizes)) < 1 - ALARM / 2
    assert stats.binomtest(int(drawn.sum()), drawn.size, 0.1).pvalue > ALARM


def test_every_example_has_the_same_probability(drawn):
    per_example = drawn.sum(axis=0)
    statistic = ((per_example - 100) ** 2).sum() / (1000 * 0.1 * 0.9)
    assert ALARM / 2 < stats.chi2.cdf(statistic, df=len(per_example)) < 1 - ALARM / 2


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
    sampler = PoissonSampler(1000, 100, steps=4000, physical_batch_size=50)
    together, total = 0, 0
    for step in sampler:
        first = step.chunks[0]
        reach = int(first[-1])
        rest = torch.cat(step.chunks[1:]) if len(step.chunks) > 1 else torch.empty(0)
        together += len(rest)
        total += 999 - reach
    assert stats.binomtest(together, total, 0.1).pvalue > ALARM


def test_chunking_does_not_change_what_is_drawn():
    whole, cut = (
        PoissonSampler(5000, 500, steps=20, physical_batch_size=size, randomness=Randomness.seeded(4)) for size in (5000, 7)
    )
    assert np.array_equal(membership(whole), membership(cut))


def test_chunks_are_at_most_the_physical_size():
    sampler = PoissonSampler(1000, 300, steps=20, physical_batch_size=64)
    for step in sampler:
        sizes = [len(indices) for indices in step.chunks]
        assert max(sizes) == 64
        assert all(size == 64 for size in sizes[:-1])


def test_an_empty_batch_is_still_a_step():
    """With one example of 1000 expected, about a third of the steps are empty, and every step is yielded."""
    sampler = PoissonSampler(1000, 1, steps=200)
    for steps in (list(sampler), list(sampler.load(torch.arange(1000))), list(sampler.load(Squares(1000)))):
        assert [step.index for step in steps] == list(range(200))
    sizes = [sum(len(indices) for indices in step.chunks) for step in sampler]
    assert 0 in sizes


def test_a_full_batch_takes_everyone():
    step = next(iter(PoissonSampler(100, 100, steps=1)))
    assert torch.equal(torch.cat(step.chunks), torch.arange(100))


def test_a_seeded_run_resumes_where_it_stopped():
    whole = membership(PoissonSampler(300, 30, steps=20, randomness=Randomness.seeded(9)))
    resumed = PoissonSampler(300, 30, steps=20, first_step=12, randomness=Randomness.seeded(9))
    assert len(resumed) == 8
    assert np.array_equal(membership(resumed), whole[12:])
    assert [step.index for step in resumed] == list(range(12, 20))


def test_two_private_runs_draw_differently():
    assert not np.array_equal(*(membership(PoissonSampler(300, 30, steps=20)) for _ in range(2)))


def test_tensors_in_memory_are_indexed_whole():
    images, labels = torch.arange(600).view(300, 2), torch.arange(300)
    sampler = PoissonSampler(300, 50, steps=5, physical_batch_size=16, randomness=Randomness.seeded(2))
    expected = [torch.cat(step.chunks) for step in sampler]
    for data in ((images, labels), TensorDataset(images, labels)):
        for step, indices in zip(sampler.load(data), expected, strict=True):
            chunks = list(step.chunks)
            assert torch.equal(torch.cat([x for x, _ in chunks]), images[indices])
            assert torch.equal(torch.cat([y for _, y in chunks]), labels[indices])
    for step, indices in zip(sampler.load({"x": images}), expected, strict=True):
        assert torch.equal(torch.cat([chunk["x"] for chunk in step.chunks]), images[indices])


@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_are_loaded_with_and_without_workers(workers):
    """Every step gets its own chunks, in order, across prefetching workers; empty steps stay empty."""
    sampler = PoissonSampler(50, 3, steps=40, physical_batch_size=2, randomness=Randomness.seeded(2))
    expected = [torch.cat(step.chunks) if step.chunks else torch.empty(0) for step in sampler]
    assert any(len(indices) == 0 for indices in expected)
    assert any(len(indices) > 2 for indices in expected)
    for step, indices in zip(sampler.load(Squares(50), num_workers=workers), expected, strict=True):
        chunks = list(step.chunks)
        assert all(len(x) <= 2 for x, _ in chunks)
        assert [int(i) for x, _ in chunks for i in x] == indices.tolist()
        assert [int(i) for _, y in chunks for i in y] == [int(i) ** 2 for i in indices]


def test_a_step_whose_chunks_were_not_consumed_does_not_spill_into_the_next():
    sampler = PoissonSampler(50, 20, steps=5, physical_batch_size=2, randomness=Randomness.seeded(2))
    expected = [step.chunks[0].tolist() for step in sampler]
    for step, first in zip(sampler.load(Squares(50)), expected, strict=True):
        assert next(iter(step.chunks))[0].tolist() == first


def test_the_chunks_of_a_step_that_has_passed_are_refused_not_empty():
    passed, _ = PoissonSampler(50, 20, steps=2).load(Squares(50))
    with pytest.raises(InputError, match="step 0 is over"):
        list(passed.chunks)


def test_a_list_is_a_dataset_of_examples():
    examples = [torch.full((2,), float(i)) for i in range(30)]
    step = next(PoissonSampler(30, 30, steps=1).load(examples))
    (batch,) = step.chunks
    assert torch.equal(batch, torch.stack(examples))


def test_what_is_drawn_does_not_show_in_length_or_representation():
    """Two samplers that draw different batches look the same."""
    looks = set()
    for _ in range(2):
        sampler = PoissonSampler(1000, 100, steps=3, physical_batch_size=32)
        steps = list(sampler)
        looks.add((repr(sampler), len(sampler), tuple(map(repr, steps))))
    assert len(looks) == 1
    with pytest.raises(TypeError):
        len(steps[0])


def test_the_plan_reaches_the_sampler():
    plan = PrivacyPlan.solve(dataset_size=45_000, batch_size=4096, delta=1e-5, epsilon=1.0, steps=500)
    sampler = PoissonSampler.from_plan(plan, physical_batch_size=128)
    assert sampler.sample_rate == plan.sample_rate
    assert len(sampler) == plan.steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 101}, "batch_size is 101, more than the 100 examples"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"dataset_size": 0}, "dataset_size is 0"),
        ({"physical_batch_size": 0}, "physical_batch_size is 0"),
        ({"first_step": 11}, "first_step is 11"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        PoissonSampler(**{"dataset_size": 100, "batch_size": 10, "steps": 10, **arguments})


@pytest.mark.parametrize("data", [torch.zeros(99), Squares(101), (torch.zeros(100), torch.zeros(99))])
def test_data_that_is_not_the_dataset_accounted_for_is_refused(data):
    with pytest.raises(InputError, match="examples"):
        PoissonSampler(100, 10, steps=1).load(data)


def test_samples_of_shards_are_together_one_poisson_sample():
    """χ² of the sizes of unions, and of how often each example is drawn; the shards' own sources are independent."""
    shards = [range(700), range(700, 700), range(700, 2000)]
    parts = [membership(PoissonSampler(2000, 200, steps=1000, shard=shard)) for shard in shards]
    drawn = sum(parts)
    for shard, part in zip(shards, parts, strict=True):
        assert part[:, : shard.start].sum() == part[:, shard.stop :].sum() == 0, "nothing outside the shard is drawn"
    variance = 2000 * 0.1 * 0.9
    statistic = ((drawn.sum(axis=1) - 200) ** 2 / variance).sum()
    assert ALARM / 2 < stats.chi2.sf(statistic, 1000) < 1 - ALARM / 2
    statistic = ((drawn.sum(axis=0) - 100) ** 2 / (1000 * 0.1 * 0.9)).sum()
    assert ALARM / 2 < stats.chi2.sf(statistic, 2000) < 1 - ALARM / 2


@pytest.mark.parametrize("edges", [(0, 3, 1000), (0, 65_536, 65_537, 200_000), (0, 70_000, 70_000, 200_000)])
def test_a_seeded_sample_does_not_depend_on_how_the_examples_are_divided(edges):
    size = edges[-1]
    (whole,) = PoissonSampler(size, size // 10, steps=1, randomness=Randomness.seeded(2)).draw(0)
    parts = []
    for start, stop in pairwise(edges):
        sampler = PoissonSampler(size, size // 10, steps=1, shard=range(start, stop), randomness=Randomness.seeded(2))
        parts += sampler.draw(0)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("shard", [range(5, 11), range(0, 10, 2), range(-1, 5)])
def test_a_shard_that_is_no_part_of_the_data_is_refused(shard):
    with pytest.raises(InputError, match="shard is range"):
        PoissonSampler(10, 5, steps=1, shard=shard)


BANDS = 7


@pytest.fixture(scope="module")
def cyclic() -> np.ndarray:
    return membership(PoissonSampler(2000, 200, steps=1001, physical_batch_size=64, bands=BANDS))


def test_with_bands_each_example_is_only_ever_in_the_steps_of_its_own_group(cyclic):
    """By its number alone: example i in steps t with t ≡ i modulo the bands, so never twice within so many steps."""
    steps, members = np.nonzero(cyclic)
    assert len(steps) > 100_000
    assert (steps % BANDS == members % BANDS).all()


def test_with_bands_the_rate_within_a_group_is_that_many_times_as_large(cyclic):
    rate = BANDS * 200 / 2000
    for group in range(BANDS):
        drawn = cyclic[group::BANDS, group::BANDS]
        assert stats.binomtest(int(drawn.sum()), drawn.size, rate).pvalue > ALARM / BANDS
        per_example = drawn.sum(axis=0)
        statistic = ((per_example - len(drawn) * rate) ** 2).sum() / (len(drawn) * rate * (1 - rate))
        assert ALARM / BANDS < stats.chi2.cdf(statistic, df=len(per_example)) < 1 - ALARM / BANDS
        both = int((drawn[:-1] & drawn[1:]).sum())
        assert stats.binomtest(both, drawn[1:].size, rate**2).pvalue > ALARM / BANDS
    assert cyclic.sum() / len(cyclic) == pytest.approx(200, rel=0.01), "the expected batch is the plan's"


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_with_bands_groups_do_not_depend_on_shards(ranks):
    """With a fixed seed the union of what the shards draw is what one process draws; shards begin anywhere in a cycle."""
    options = {"steps": 30, "bands": 4, "physical_batch_size": 3}
    whole = membership(PoissonSampler(101, 20, randomness=Randomness.seeded(3), **options))
    edges = [101 * rank // ranks for rank in range(ranks + 1)]
    parts = [
        membership(PoissonSampler(101, 20, shard=range(*edge), randomness=Randomness.seeded(3), **options))
        for edge in pairwise(edges)
    ]
    assert (sum(parts) == whole).all()
    for part, edge in zip(parts, pairwise(edges), strict=True):
        assert part[:, : edge[0]].sum() == part[:, edge[1] :].sum() == 0
    assert whole.sum() > 400


def test_one_band_draws_to_the_bit_what_was_drawn_before_there_were_bands():
    sampler = PoissonSampler(50, 20, steps=4, randomness=Randomness.seeded(9))
    for step in sampler:
        uniforms = Randomness.seeded(9).uniforms("sampling", step.index, 50)
        assert torch.cat(step.chunks).tolist() == np.flatnonzero(uniforms < 0.4).tolist()


def test_a_group_too_small_for_the_batch_is_refused():
    with pytest.raises(InputError, match="bands is 6, but a group of 100/6 examples cannot give an expected batch of 20"):
        PoissonSampler(100, 20, steps=3, bands=6)
    assert membership(PoissonSampler(100, 20, steps=5, bands=5)).sum() == 100, "at probability 1 all of a group are taken"
