"""Proposals for batch size, steps and bands: what they promise, and what they follow from."""

import math

import pytest

from dp_microadam import InputError, PrivacyPlan
from dp_microadam.plan.advice import MOST_STEPS, advise, best

BUDGET = {"dataset_size": 20_000, "epsilon": 3.0, "delta": 1e-5}
SETTING = {**BUDGET, "parameters": 26_010, "bands": False}


def for_examples(count):
    return lambda batch_size: count / batch_size


def test_a_proposal_can_be_afforded_and_its_noise_is_that_of_the_plan():
    for one in advise(**SETTING, steps_for=for_examples(200_000)):
        assert one.examples <= 200_000
        assert one.steps <= MOST_STEPS
        plan = PrivacyPlan.solve(**BUDGET, batch_size=one.batch_size, steps=one.steps)
        assert (one.bands, plan.bands) == (1, 1)
        assert plan.noise_multiplier <= one.noise_multiplier <= 1.01 * plan.noise_multiplier
        assert one.noise == pytest.approx(one.noise_multiplier / (one.batch_size * math.sqrt(one.steps)))


def test_the_proposal_is_better_than_its_neighbours_and_stops_after_them():
    proposals = advise(**SETTING, steps_for=for_examples(200_000), fixed_rate=True)
    sizes = [one.batch_size for one in proposals]
    assert sizes == [64 << number for number in range(len(sizes))]
    assert sizes[-1] < BUDGET["dataset_size"] / 2, "no time is spent on batches that only become worse"
    chosen = best(proposals)
    assert all(chosen.score <= one.score + 0.03 for one in proposals)


def test_more_computing_is_spent_on_larger_batches_once_there_are_steps_enough():
    options = {**SETTING, "fixed_rate": True}
    little, much = (best(advise(**options, steps_for=for_examples(count))) for count in (50_000, 5_000_000))
    assert little.batch_size == 64
    assert much.batch_size > little.batch_size
    assert much.steps > little.steps


def test_bands_are_proposed_where_the_size_of_the_model_is_known_and_fits():
    options = {**BUDGET, "steps_for": for_examples(100_000)}
    without, several = (advise(**options, parameters=26_010, bands=bands) for bands in (False, True))
    assert {one.bands for one in (*without, *advise(**options, parameters=10**10))} == {1}
    assert several[0].bands > 1
    assert several[0].noise < without[0].noise


def test_what_cannot_be_afforded_is_refused_in_one_sentence():
    with pytest.raises(InputError, match="not one step of 64 examples can be afforded") as refused:
        advise(**SETTING, steps_for=for_examples(10))
    assert "\n" not in str(refused.value)
