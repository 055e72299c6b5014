"""Users as the unit of privacy: who is drawn, what they bring, and what the plan says. Alarm rates are below 1e-6."""

import copy
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samplers import sampler_of
from scipy import optimize, stats
from thoroughness import THOROUGH, examples

from dp_microadam import InputError, PrivacyError, PrivacyPlan
from dp_microadam.noise.randomness import Randomness
from dp_microadam.sampling.poisson import PoissonSampler
from dp_microadam.sampling.users import Units, widths

ALARM = 1e-8
STEPS = 3000 if THOROUGH else 1000


def ids_of(sizes, seed=0):
    """Ids of users with so many examples, shuffled over the data."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)) * 7 + 3, sizes))


def brought(sampler, ids):
    """For each step the examples of weight above zero, by the number of their user, and the weights."""
    numbers = {one: number for number, one in enumerate(dict.fromkeys(np.asarray(ids).tolist()))}
    for step in sampler:
        found = {}
        for rows, weights in step.chunks:
            for own, weight in zip(rows.view_as(weights).tolist(), weights.tolist(), strict=True):
                present = [row for row, value in zip(own, weight, strict=True) if value]
                (user,) = {numbers[ids[row]] for row in own}  # rows that fill up are the user's own too
                assert user not in found
                assert own[len(present) :] == own[:1] * (len(own) - len(present))
                assert weight[: len(present)] == [1 / len(present)] * len(present)
                found[user] = present
        yield found


def test_users_are_numbered_in_the_order_of_their_first_example():
    units = Units(["z", "b", "z", "a", "b"], 9)
    rows, counts = units.draw(np.arange(3), 0, Randomness.from_entropy())
    assert rows.tolist() == [0, 2, 1, 4, 3]
    assert counts.tolist() == [2, 2, 1]


@pytest.mark.parametrize(
    "ids", [[4, 4, 1], ("x", "x", "y"), np.array([2**40, 2**40, 3], dtype=np.uint64), torch.tensor([1, 1, 0], dtype=torch.int8)]
)
def test_ids_may_be_integers_or_strings_in_a_list_an_array_or_a_tensor(ids):
    rows, counts = Units(ids, 2).draw(np.array([0]), 0, Randomness.from_entropy())
    assert (rows.tolist(), counts.tolist(), len(Units(ids, 2))) == ([0, 1], [2], 2)


@pytest.mark.parametrize(
    "ids",
    [[], "abc", [1.5, 2.0], [1.0, float("nan")], ["a", None], [1, "1"], [True, False], np.zeros((3, 2), int), 5, {"a": 1}],
    ids=str,
)
def test_other_ids_are_refused(ids):
    with pytest.raises(InputError, match=r"^users (is|holds)"):
        Units(ids, 2)


@pytest.mark.parametrize(
    "ids",
    [
        np.ma.masked_array([1, 2, 2], mask=[False, True, False]),
        np.ma.masked_array(["a", "b"], mask=[False, True]),
        np.array(["a", np.nan]),
        np.array(["a", None]).astype(str),
        np.array(["a", float("nan")], object),
        ["a", ""],
        ["a", "NULL"],
        np.array(["a", " "], object),
        ["a", "a\0"],
        np.array(["a", "a\0"], object),
        [b"a", b"a\0"],
    ],
    ids=repr,
)
def test_two_users_are_never_taken_for_one_because_their_ids_are_missing_or_cut(ids):
    with pytest.raises(InputError, match=r"^users (is|holds)"):
        Units(ids, 2)


@examples(200, quick=30)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    most=st.integers(1, 12),
    room=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_each_user_brings_at_most_k_of_their_examples_in_batches_that_fit(sizes, most, room, seed):
    ids = ids_of(sizes, seed)
    batch, units = max(1, len(sizes) * 2 // 3), Units(ids, most)
    sampler = sampler_of(len(sizes), batch, 2, physical_batch_size=most + room, units=units, seed=seed)
    for step in sampler:
        assert all(weights.numel() == len(rows) <= most + room for rows, weights in step.chunks)
        assert all(weights.shape[1] in widths(most) for _, weights in step.chunks)
    numbered = [sizes[(one - 3) // 7] for one in dict.fromkeys(ids.tolist())]
    for found in brought(sampler, ids):
        for user, rows in found.items():
            assert len(set(rows)) == len(rows) == min(most, numbered[user])


@pytest.fixture(scope="module")
def drawn():
    """Which examples each step drew: 60 users with 1, 3 or 8 examples, of which at most 3 enter a step."""
    sizes = [1, 3, 8] * 20
    ids = ids_of(sizes)
    sampler = sampler_of(60, 15, STEPS, physical_batch_size=32, units=Units(ids, 3))
    found = np.zeros((STEPS, len(ids)), dtype=np.int8)
    for row, step in zip(found, brought(sampler, ids), strict=True):
        for rows in step.values():
            row[rows] += 1
    return ids, found


def of_users(ids, found):
    order = list(dict.fromkeys(ids.tolist()))
    return np.stack([found[:, ids == one].sum(1) for one in order], 1)


def test_every_user_is_drawn_with_the_plans_rate_however_many_examples_they_have(drawn):
    """χ² over users, and for each number of examples by itself."""
    ids, found = drawn
    present = of_users(ids, found) > 0
    statistic = ((present.sum(0) - STEPS / 4) ** 2).sum() / (STEPS * 0.25 * 0.75)
    assert ALARM / 2 < stats.chi2.cdf(statistic, df=60) < 1 - ALARM / 2
    sizes = np.array([int((ids == one).sum()) for one in dict.fromkeys(ids.tolist())])
    for size in (1, 3, 8):
        assert stats.binomtest(int(present[:, sizes == size].sum()), STEPS * 20, 0.25).pvalue > ALARM


def test_users_are_drawn_independently_of_each_other_and_of_other_steps(drawn):
    present = of_users(*drawn) > 0
    for both in (present[:, :-1] & present[:, 1:], present[:-1] & present[1:]):
        assert stats.binomtest(int(both.sum()), both.size, 0.0625).pvalue > ALARM


def test_a_users_examples_are_drawn_anew_each_step_all_with_the_same_probability(drawn):
    """Of eight examples three: each with 3/8, each pair of successive steps independent."""
    ids, found = drawn
    for one in dict.fromkeys(ids.tolist()):
        own = found[:, ids == one]
        own = own[own.sum(1) > 0]
        if own.shape[1] < 8:
            assert own.all()
            continue
        # Sums over examples have the covariance of draws without replacement, which χ² over 7 degrees of freedom takes out.
        variance = len(own) * (3 / 8) * (5 / 8) * 8 / 7
        statistic = ((own.sum(0) - len(own) * 3 / 8) ** 2).sum() / variance
        assert ALARM / 2 < stats.chi2.cdf(statistic, df=7) < 1 - ALARM / 2
        again = (own[:-1] & own[1:]).sum(1)  # hypergeometric: mean 9/8, variance 3·(3/8)(5/8)(5/7)
        error = (again.mean() - 9 / 8) / math.sqrt(3 * (3 / 8) * (5 / 8) * (5 / 7) / len(again))
        assert abs(error) < stats.norm.isf(ALARM / 2)


def test_a_fixed_seed_draws_the_same_however_users_are_divided():
    """Two shards together are the whole, example by example."""
    ids = ids_of([1, 9, 2, 7, 5, 5, 30, 1])

    def all_of(**options):
        sampler = sampler_of(8, 6, 5, physical_batch_size=9, units=Units(ids, 4), seed=1, **options)
        return [dict(sorted(found.items())) for found in brought(sampler, ids)]

    whole = all_of()
    parts = [all_of(shard=range(3)), all_of(shard=range(3, 8))]
    assert whole == [{**one, **other} for one, other in zip(*parts, strict=True)]


def test_how_many_examples_anyone_has_is_not_shown():
    some, others = Units([1, 1, 1, 2], 3), Units([1, 2, 2, 2], 3)
    assert repr(some) == repr(others) == "Units(2 users, at most 3 examples of each in a step)"
    shown = [repr(sampler_of(2, 1, physical_batch_size=4, units=units)) for units in (some, others)]
    assert shown[0] == shown[1]
    for save in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(PrivacyError, match="which examples belong to which user is private"):
            save(some)
    sampler = sampler_of(2, 1, physical_batch_size=4, units=some)
    with pytest.raises(InputError) as refused:
        sampler.load(torch.zeros(9))
    assert not any(character.isdigit() for character in str(refused.value))


@pytest.mark.parametrize(
    ("size", "room", "sentence"),
    [
        (3, 9, "users has 2 different ids, but dataset_size is 3"),
        (2, 4, "examples_per_user is 5, more than physical_batch_size, which is 4"),
    ],
)
def test_units_that_do_not_fit_are_refused(size, room, sentence):
    with pytest.raises(InputError, match=sentence):
        sampler_of(size, 1, physical_batch_size=room, units=Units([1, 1, 2], 5))


PLAN = PrivacyPlan(500, 50, 1.2, 30, 1e-4, examples_per_user=8)


def test_a_sampler_of_a_plan_of_users_needs_users_and_one_of_examples_has_none():
    with pytest.raises(InputError, match="unit is 'user'"):
        PoissonSampler(PLAN)
    with pytest.raises(InputError, match="unit is 'example'"):
        PoissonSampler(replace(PLAN, examples_per_user=None), units=Units([1], 2))


def test_epsilon_of_all_users_in_every_step_is_that_of_the_gaussian_mechanism():
    """The exact ε of Balle and Wang (2018), Theorem 8, for T steps of noise multiplier σ, however many examples users have."""
    sigma, steps, delta = 6.0, 4, 1e-4
    s = sigma / math.sqrt(steps)

    def excess(epsilon):
        return stats.norm.cdf(0.5 / s - epsilon * s) - math.exp(epsilon) * stats.norm.cdf(-0.5 / s - epsilon * s) - delta

    exact = optimize.brentq(excess, 1e-3, 20)
    for k in (1, 8, 1000):
        plan = PrivacyPlan(300, 300, sigma, steps, delta, accountant="pld", examples_per_user=k)
        assert exact <= plan.epsilon <= exact * 1.001


def test_epsilon_of_users_is_that_of_as_many_examples_whatever_k():
    assert {replace(PLAN, examples_per_user=k).epsilon for k in (1, 8, 500)} == {replace(PLAN, examples_per_user=None).epsilon}
