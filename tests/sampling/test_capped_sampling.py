"""A cap on the size of a sample: who is dropped, and that processes agree on it. False alarms of each test are below 1e-6."""

import math
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samplers import membership, sampler_of
from scipy import stats
from thoroughness import examples

from dp_microadam.sampling import poisson as sampling
from dp_microadam.sampling.poisson import keep_smallest

ALARM = 1e-7
SIZE, BATCH, CAP, STEPS = 300, 100, 104, 800


@pytest.fixture(scope="module")
def drawn() -> np.ndarray:
    return membership(sampler_of(SIZE, BATCH, STEPS, physical_batch_size=16, max_batch_size=CAP))


def spread_of_examples(drawn: np.ndarray) -> float:
    """χ² of how often each example was kept, given the sizes of the steps: N − 1 degrees of freedom if all are alike."""
    size = drawn.shape[1]
    shares = drawn.sum(axis=1) / size
    variance = float((shares * (1 - shares)).sum())
    statistic = ((drawn.sum(axis=0) - shares.sum()) ** 2).sum() / variance * (size - 1) / size
    return float(stats.chi2.sf(statistic, size - 1))


def test_no_step_is_larger_than_the_cap_and_full_ones_are_as_many_as_poisson_samples_reach_it(drawn):
    sizes = drawn.sum(axis=1)
    assert drawn.max() == 1
    assert sizes.max() == CAP
    full = stats.binom.sf(CAP - 1, SIZE, BATCH / SIZE)
    assert stats.binomtest(int((sizes == CAP).sum()), STEPS, full).pvalue > ALARM
    below = sizes[sizes < CAP]
    expected = stats.binom.pmf(np.arange(CAP), SIZE, BATCH / SIZE)
    assert stats.binomtest(int((below < 95).sum()), len(below), expected[:95].sum() / expected.sum()).pvalue > ALARM


def test_every_example_is_included_with_the_same_probability_and_dropped_with_the_same(drawn):
    """E[min(K, M)]/N for each, K binomial; and equal chances, as counts of all examples show."""
    counts = np.arange(SIZE + 1)
    probability = float((np.minimum(counts, CAP) * stats.binom.pmf(counts, SIZE, BATCH / SIZE)).sum()) / SIZE
    # An example's steps are independent: a binomial count each, and a Bonferroni bound over examples.
    counts = drawn.sum(axis=0)
    law = stats.binom(STEPS, probability)
    assert np.minimum(law.sf(counts - 1), law.cdf(counts)).min() > ALARM / SIZE / 2
    assert ALARM / 2 < spread_of_examples(drawn) < 1 - ALARM / 2


def test_a_cap_that_drops_the_last_ones_would_be_seen(monkeypatch):
    monkeypatch.setattr(sampling, "keep_smallest", lambda own, most, exchange: np.arange(len(own)) < most)
    wrong = membership(sampler_of(SIZE, BATCH, STEPS, max_batch_size=BATCH, seed=1))
    assert wrong.sum(axis=1).max() == BATCH
    assert spread_of_examples(wrong) < ALARM


def test_all_sets_of_the_allowed_size_are_equally_likely():
    sampler = sampler_of(5, 4, 1500, max_batch_size=4)
    found = Counter(tuple(torch.cat(step.chunks).tolist()) for step in sampler if sum(map(len, step.chunks)) == 4)
    assert len(found) == 5
    assert stats.chisquare(list(found.values())).pvalue > ALARM


def test_steps_are_independent_under_a_cap(drawn):
    """What one step kept says nothing of the next: coincidences given the sizes of both, of disjoint pairs of steps."""
    first, second = drawn[0::2], drawn[1::2]
    both = (first & second).sum(axis=1)
    a, b = first.sum(axis=1), second.sum(axis=1)
    law = stats.hypergeom(SIZE, a, b)
    score = float((both - law.mean()).sum() / math.sqrt(law.var().sum()))
    assert abs(score) < stats.norm.isf(ALARM / 2)


def test_below_the_cap_the_sample_is_to_the_bit_that_without_one():
    free, capped = (membership(sampler_of(SIZE, BATCH, 60, seed=3, max_batch_size=cap)) for cap in (None, CAP))
    within = free.sum(axis=1) <= CAP
    assert 0 < within.sum() < 60
    assert (capped[within] == free[within]).all()
    assert (capped <= free).all()
    assert (capped[~within].sum(axis=1) == CAP).all()


@examples(100)
@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4), most=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_processes_keep_together_what_one_process_would_keep(sizes, most, seed):
    priorities = np.random.default_rng(seed).random((sum(sizes), 2))
    parts = np.split(priorities, np.cumsum(sizes)[:-1])
    whole = keep_smallest(priorities, most)
    assert whole.sum() == min(most, sum(sizes))
    sent = []  # what each process gives to the others
    for part in parts:
        keep_smallest(part, most, lambda own: (sent.append(own), ([own], 0))[1])
    assert all(len(own) <= most for own in sent)
    kept = [keep_smallest(part, most, lambda own, number=number: (sent, number)) for number, part in enumerate(parts)]
    assert (np.concatenate(kept) == whole).all()


class Meeting:
    """Processes as threads: everyone leaves their priorities and takes those of all."""

    def __init__(self, ranks: int) -> None:
        self.left, self.barrier = [np.empty((0, 2))] * ranks, threading.Barrier(ranks)

    def of(self, rank: int):
        def exchange(own):
            self.left[rank] = own
            self.barrier.wait()
            all_of_them = list(self.left)
            self.barrier.wait()
            return all_of_them, rank

        return exchange


def drawn_by_ranks(ranks: int, size: int, batch: int, steps: int, cap: int, seed: int | None, bands: int = 1) -> np.ndarray:
    edges = list(pairwise([size * rank // ranks for rank in range(ranks + 1)]))
    meeting = Meeting(ranks)

    def run(rank: int) -> np.ndarray:
        own = {"exchange": meeting.of(rank), "shard": range(*edges[rank]), "seed": seed}
        return membership(sampler_of(size, batch, steps, max_batch_size=cap, bands=bands, **own))

    with ThreadPoolExecutor(ranks) as pool:
        return sum(pool.map(run, range(ranks)))


@pytest.mark.parametrize(("ranks", "bands"), [(2, 1), (3, 4), (5, 7)])
def test_a_seeded_sample_under_a_cap_does_not_depend_on_how_the_examples_are_divided(ranks, bands):
    together = drawn_by_ranks(ranks, 101, 12, 40, 13, 3, bands)
    one = sampler_of(101, 12, 40, bands=bands, max_batch_size=13, seed=3)
    assert (together == membership(one)).all()
    assert together.sum(axis=1).max() == 13


def test_with_bands_every_group_counts_as_equally_large():
    """103 examples in 4 groups: one of 25, with an empty place. All places are taken at rate 1, and 25 of 26 are kept."""
    drawn = membership(sampler_of(103, 25, 400, bands=4, max_batch_size=25))
    sizes = drawn[3::4].sum(axis=1)  # of the group with 25 members
    assert set(sizes.tolist()) <= set(range(26))
    # All 26 places are drawn with probability q²⁶, and then one of the 25 members is dropped 25 times in 26.
    short = stats.binom.pmf(np.arange(26), 25, 100 / 103)
    all_there = short[25] * (1 - 100 / 103 * 25 / 26)
    assert stats.binomtest(int((sizes == 25).sum()), len(sizes), all_there).pvalue > ALARM


def test_priorities_have_106_bits():
    """Equal first numbers are decided by the second; a sampler draws both from its own source."""
    assert keep_smallest(np.array([[0.5, 0.2], [0.5, 0.1], [0.5, 0.3]]), 1).tolist() == [False, True, False]
