"""Mechanism checks against the real parts: every planted fault is caught by the check made for it, and honest parts pass.

Each statistical check accuses honest parts with a probability of at most 1e-8, an audit's together with less than 1e-6; planted
faults are missed with a probability below 1e-6 unless a test says otherwise. docs/audit.md has the table.
"""

import math

import numpy as np
import pytest
import torch

from dp_microadam.workbench.audit.accounting_checks import accounting_checks, gaussian_epsilon
from dp_microadam.workbench.audit.band_checks import banded_noise_checks, group_checks
from dp_microadam.workbench.audit.cap_checks import capped_epsilon_check, dropping_checks
from dp_microadam.workbench.audit.check import Check, count_range, mean_square_range, range_in_words, refused, together
from dp_microadam.workbench.audit.clipping_checks import family_check
from dp_microadam.workbench.audit.layer_families import FAMILIES
from dp_microadam.workbench.audit.mechanism_checks import CheckSizes, check_mechanisms
from dp_microadam.workbench.audit.noise_checks import DELTA, NOISE_MULTIPLIER, NoiseStatistics, published_noise, seed_check
from dp_microadam.workbench.audit.sampling_checks import drawing_checks, published_sample_checks, sampler_checks
from dp_microadam.workbench.audit.suite import PROFILES
from dp_microadam.workbench.audit.user_checks import contribution_checks, drawn_user_checks

FEW_STEPS = 12
"""Of runs whose noise is looked at: more than one in ten."""


def noise_checks(steps=FEW_STEPS):
    statistics, stated = published_noise(steps)
    return [*statistics.checks(), *accounting_checks(stated, NOISE_MULTIPLIER, DELTA)]


def failed(checks):
    return {check.name for check in checks if check.violated}


def family(name):
    return next(family for family in FAMILIES if family.name == name)


@pytest.fixture(scope="module")
def honest():
    """The small sizes that faults below are caught at."""
    return check_mechanisms(CheckSizes(sampler_steps=20, sampled_steps=40, noise_steps=FEW_STEPS, draws=3_000))


def test_honest_parts_pass_every_check(honest):
    assert failed(honest) == set()
    assert {check.part for check in honest} == {"sampling", "clipping", "noise", "accounting"}


def test_false_alarms_add_up_to_less_than_one_in_a_million(honest):
    assert 0 < together(honest) < 1e-6
    assert all(check.false_alarm <= 1e-8 for check in honest)


def test_every_family_of_layers_is_driven(honest):
    """What the issue of this page names, and what the engine has a rule for."""
    names = {check.name for check in honest if check.part == "clipping"}
    assert {family.name for family in FAMILIES} < names
    from dp_microadam.clipping.families import _RULES, rule_class

    used = {type(module) for family in FAMILIES for module in family.model().modules() if rule_class(module)}
    untried = {kind.__name__ for kind, rule in _RULES.items() if not {_RULES.get(one) for one in used} & {rule}}
    assert untried == set()


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["quick", "full"])
def test_honest_parts_pass_the_checks_of(profile):
    assert failed(check_mechanisms(PROFILES[profile].checks)) == set()


@pytest.mark.parametrize(
    ("fault", "options", "caught"),
    [
        ("half the noise", {}, {"variance", "each step and tensor"}),
        pytest.param("half the sensitivity", {}, {"variance", "each step and tensor"}, marks=pytest.mark.slow),
        ("slightly less noise", {"factor": 0.99}, {"variance"}),
        pytest.param(
            "noise per chunk",
            {"deviation": NOISE_MULTIPLIER * 0.7, "chunks": 2},
            {"variance", "each step and tensor"},
            marks=pytest.mark.slow,
        ),
        pytest.param("no noise in every tenth step", {}, {"each step and tensor"}, marks=pytest.mark.slow),
        pytest.param("no noise on a bias", {}, {"each step and tensor"}, marks=pytest.mark.slow),
        pytest.param("noise repeated in blocks", {}, {"repeated numbers", "related noise"}, marks=pytest.mark.slow),
        pytest.param("noise repeated between tensors", {}, {"repeated numbers", "related noise"}, marks=pytest.mark.slow),
        pytest.param("noise repeated between tensors", {"factor": -1.0}, {"related noise"}, marks=pytest.mark.slow),
        pytest.param("noise used for two steps", {}, {"repeated numbers", "related noise"}, marks=pytest.mark.slow),
        pytest.param("same noise in every step", {}, {"repeated numbers", "related noise"}, marks=pytest.mark.slow),
        pytest.param("same seed in every run", {}, {"repeated numbers"}, marks=pytest.mark.slow),
        ("steps left out of the ledger", {}, {"steps", "stated ε"}),
        pytest.param("one step not accounted", {}, {"stated ε"}, marks=pytest.mark.slow),
    ],
)
def test_it_catches_in_what_a_run_without_gradients_publishes(plant, fault, options, caught):
    plant(fault, **options)
    assert caught <= failed(noise_checks())


@pytest.mark.slow
def test_it_catches_tails_that_a_generator_of_16_bits_cuts_off(plant):
    plant("coarse uniforms", bits=16)
    assert "tails" in failed(noise_checks(PROFILES["quick"].checks.noise_steps))


@pytest.mark.parametrize(
    ("fault", "options", "caught"),
    [
        ("the same examples of a user", {}, {"users: each example", "users: drawn anew"}),
        ("more examples of a user", {}, {"users: at most k"}),
        ("users drawn by their examples", {}, {"users: sample rate", "users: examples"}),
    ],
)
def test_it_catches_in_what_users_bring(plant, fault, options, caught):
    plant(fault, **options)
    assert caught <= failed(drawn_user_checks(20))


@pytest.mark.slow
@pytest.mark.parametrize("mean", [False, True])
def test_it_catches_examples_of_a_user_that_are_clipped_one_by_one(plant, mean):
    plant("clipping per example of a user", mean=mean)
    assert failed(contribution_checks(4)) == {"users: contributions"}


@pytest.mark.parametrize("name", ["linear with bias", pytest.param("per-layer clipping", marks=pytest.mark.slow)])
def test_it_catches_users_whose_examples_are_clipped_one_by_one_in_the_families(plant, name):
    plant("clipping per example of a user", mean=True)
    found = family_check(family(name))
    assert found.violated
    assert found.detail == "distance from the sum of users' clipped mean gradients"


@pytest.mark.parametrize("bits", [16, 20])
def test_it_catches_short_seeds(plant, bits):
    """By the birthday paradox: of 6,000 draws from 2²⁰ seeds no two are equal with probability exp(−17)."""
    plant("short seeds", bits=bits)
    assert seed_check(6_000).violated


@pytest.mark.slow
def test_the_quick_profile_catches_seeds_of_24_bits(plant):
    """No two equal: exp(−18.6)."""
    plant("short seeds", bits=24)
    assert seed_check(PROFILES["quick"].checks.draws).violated


@pytest.mark.parametrize(
    ("fault", "options", "caught"),
    [
        ("a larger rate", {"factor": 1.3}, {"sample rate"}),
        ("a larger rate", {"factor": 1.03}, {"sample rate"}),
        ("batches of fixed size", {}, {"batch sizes"}),
        ("shuffled epochs", {}, {"pairs of steps", "next step"}),
        ("shuffled batches", {}, {"sample rate"}),
        ("repeated samples", {}, {"pairs of steps", "next step", "examples"}),
        ("same seed in every run", {}, {"pairs of steps"}),
        ("noise repeated in blocks", {}, {"blocks"}),
        ("an example counted twice", {}, {"once"}),
    ],
)
def test_it_catches_in_who_is_drawn(plant, fault, options, caught):
    plant(fault, **options)
    assert {f"sampler: {name}" for name in caught} <= failed(sampler_checks(20))


@pytest.mark.parametrize(
    ("fault", "options", "caught"),
    [
        ("a larger rate", {"factor": 1.3}, "trainer: sample rate"),
        ("batches of fixed size", {}, "trainer: batch sizes"),
        pytest.param("repeated samples", {}, "trainer: pairs of steps", marks=pytest.mark.slow),
        pytest.param("an example counted twice", {}, "trainer: once", marks=pytest.mark.slow),
        ("division by the realised batch", {}, "trainer: contributions"),
        ("half the sensitivity", {}, "trainer: beside examples"),
    ],
)
def test_it_catches_in_what_the_trainer_publishes_of_its_examples(plant, fault, options, caught):
    plant(fault, **options)
    assert caught in failed(published_sample_checks(60))


@pytest.mark.parametrize(
    ("fault", "options", "caught"),
    [
        ("groups that do not match bands", {"groups": 1}, {"bands: groups"}),
        ("groups that do not match bands", {"groups": 2}, {"bands: groups"}),
        ("groups that do not match bands", {"groups": 8}, {"bands: pairs of steps"}),
        ("groups that change", {}, {"bands: groups"}),
        ("groups ignored", {}, {"bands: groups", "bands: once"}),
        ("a larger rate", {"factor": 5}, {"bands: sample rate"}),
    ],
)
def test_it_catches_in_the_groups_of_bands(plant, fault, options, caught):
    plant(fault, **options)
    assert caught <= failed(group_checks(20))


@pytest.mark.parametrize(
    ("fault", "options", "caught"),
    [
        ("the last ones dropped", {}, {"cap: who is dropped"}),
        ("the cap ignored", {}, {"cap: largest batch"}),
        ("a larger rate", {"factor": 1.3}, {"cap: full steps"}),
    ],
)
def test_it_catches_in_who_is_dropped_under_a_cap(plant, fault, options, caught):
    plant(fault, **options)
    assert caught <= failed(dropping_checks(500))


@pytest.mark.slow
def test_it_catches_a_cap_that_is_not_accounted(plant):
    plant("a cap that is not accounted")
    assert capped_epsilon_check().violated


@pytest.mark.parametrize(
    ("fault", "options", "caught"),
    [
        ("a chain restarted every step", {}, {"bands: variance", "bands: related noise"}),
        ("noise that is not correlated", {}, {"bands: related noise"}),
        ("slightly less noise", {"factor": 0.99}, {"bands: variance"}),
        ("no noise in every tenth step", {}, {"bands: each step and tensor"}),
        ("steps left out of the ledger", {}, {"bands: steps"}),
        ("one step not accounted", {}, {"bands: stated ε"}),
    ],
)
def test_it_catches_in_correlated_noise(plant, fault, options, caught):
    plant(fault, **options)
    assert caught <= failed(banded_noise_checks(FEW_STEPS))


CLIPPING_FAULTS = [
    ("no clipping", "linear with bias"),
    ("clipping per chunk", "linear with bias"),
    ("embeddings not clipped", "embedding"),
    ("biases not clipped", "convolution"),
]


@pytest.mark.parametrize(("fault", "layers"), CLIPPING_FAULTS)
def test_it_catches_in_the_clipped_sums(plant, fault, layers):
    plant("a blind start-up check")
    plant(fault)
    check = family_check(family(layers))
    assert check.violated
    assert check.value > 0.1


@pytest.mark.parametrize(("fault", "layers"), [*CLIPPING_FAULTS, ("norms without embeddings", "embedding")])
def test_what_the_start_up_check_refuses_is_a_failed_check_too(plant, fault, layers):
    plant(fault)
    check = family_check(family(layers))
    assert check.violated
    assert check.statistic == "the pipeline refused to run"
    assert check.detail


def test_it_catches_an_example_that_is_not_finite_and_poisons_the_others(plant):
    plant("non-finite examples kept")
    check = family_check(family("linear with bias"))
    assert check.violated
    assert check.detail == "what an example whose loss is no number adds"


def test_a_clipping_fault_of_one_family_does_not_accuse_the_others(plant):
    plant("a blind start-up check")
    plant("embeddings not clipped")
    names = ("linear with bias", "attention", "embedding", "embedding bag", "row norms")
    assert failed(family_check(family(name)) for name in names) == {"embedding", "embedding bag"}


def test_a_pipeline_that_refuses_to_run_fails_its_checks_and_the_rest_goes_on(plant):
    plant("no clipping")
    checks = check_mechanisms(CheckSizes(sampler_steps=2, sampled_steps=2, noise_steps=2, draws=10))
    refusals = {check.name for check in checks if check.part == "pipeline" and check.violated}
    assert refusals == {"published samples", "published noise", "bands", "cap", "users"}
    assert {"sampler: sample rate", "seeds"} <= {check.name for check in checks} - failed(checks)


@pytest.mark.slow
def test_not_caught(plant):
    """What is too small to be seen, all at once. If this fails the audit has become better, and docs/audit.md must say so.

    Honest parts fail with a probability below 1e-6; faults of this size raise that to about 1e-5.
    """
    plant("slightly less noise", factor=0.9999)
    plant("a larger rate", factor=1.0003)
    plant("coarse uniforms", bits=32)
    plant("no noise in every tenth step", every=1000)
    assert failed([*noise_checks(), *sampler_checks(20), *published_sample_checks(60)]) == set()


def test_counts_are_compared_with_the_binomial_distribution_itself():
    """Small enough to add up by hand: outside of the range is less than 1e-8, and not a hundred times less."""
    low, high = count_range(40, 0.5)
    probability = sum(math.comb(40, k) for k in range(41) if not low <= k <= high) / 2**40
    assert 1e-10 < probability <= 1e-8


def test_ranges_of_mean_squares_shrink_with_their_number():
    assert mean_square_range(10)[1] > mean_square_range(1000)[1] > 1 > mean_square_range(1000)[0] > mean_square_range(10)[0]


def test_noise_of_known_properties_is_described_as_such():
    """White noise passes; without variance in one tensor of one step, it says which."""
    statistics = NoiseStatistics()
    generator = np.random.default_rng(0)
    for step in range(20):
        noise = {name: generator.standard_normal(500).astype(np.float32) for name in ("a", "b")}
        if step == 6:
            noise["b"] *= 0.5
        statistics.observe(noise)
    checks = {check.name: check for check in statistics.checks()}
    assert checks["each step and tensor"].violated
    assert checks["each step and tensor"].detail == "step 7, b"
    assert failed(checks.values()) == {"each step and tensor"} | failed([checks["variance"], checks["tails"]])


def test_windows_that_repeat_at_any_offset_are_found():
    noise = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).numpy()
    noise[11_003:11_503] = noise[77:577]
    statistics = NoiseStatistics()
    statistics.observe({"weight": noise})
    (check,) = [check for check in statistics.checks() if check.name == "repeated numbers"]
    # Of 497 windows about every sixteenth is looked at.
    assert check.violated
    assert 10 < check.value < 60


def test_the_closed_form_of_several_steps_is_that_of_one_with_less_noise():
    assert gaussian_epsilon(16, 4.0, 1e-5) == pytest.approx(gaussian_epsilon(1, 1.0, 1e-5), rel=1e-9)


def test_a_value_that_is_no_number_fails_a_check():
    assert Check("noise", "a", "", "", math.nan, 0, 1, 0.0, "1").violated
    assert refused("noise", "a", "", ValueError("why")).to_dict()["value"] is None
    assert range_in_words(0.0, 2e-5) == "at most 2e-05"
    assert range_in_words(1.0, math.inf) == "at least 1"


def test_uneven_rates_are_seen_in_the_counts_of_examples():
    """Half of the examples with a rate a tenth higher and half a tenth lower: the totals are right, the examples are not."""
    generator = np.random.default_rng(0)
    rates = np.where(np.arange(4000) % 2, 0.11, 0.09)
    drawn = (generator.random((500, 4000)) < rates).astype(np.uint8)
    assert failed(drawing_checks("x", drawn, 0.1)) == {"x: examples"}
