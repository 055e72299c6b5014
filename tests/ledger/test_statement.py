"""What a run claims about privacy, as JSON and in words."""

import dataclasses
import json
import math
import re

import pytest

from dp_microadam import PrivacyPlan
from dp_microadam.accounting.costs import group_epsilon
from dp_microadam.accounting.meaning import replace_one_epsilon
from dp_microadam.accounting.trade_off import gaussian_bound, trade_off
from dp_microadam.ledger.ledger import PrivacyLedger, RunSettings, read_ledger
from dp_microadam.ledger.statement import privacy_report, round_up, statement_in_words, write_privacy_files
from dp_microadam.noise.randomness import Randomness

PLAN = PrivacyPlan.solve(dataset_size=60_000, batch_size=512, delta=1e-5, noise_multiplier=1.5, steps=50)


def run(folder, randomness: Randomness, steps: int):
    described = RunSettings(private=randomness.private, randomness=randomness.description, sensitivity=0.7)
    with PrivacyLedger.create(folder, PLAN, described) as ledger:
        for _ in range(steps):
            ledger.record_step()
    return read_ledger(folder)


def test_the_words_cover_everything_an_officer_asks(tmp_path):
    record = run(tmp_path, Randomness.from_entropy(secure=True), steps=30)
    report = write_privacy_files(tmp_path, record)
    assert json.loads((tmp_path / "privacy.json").read_text()) == report
    assert report["epsilon"] == PLAN.epsilon_after(30) < report["epsilon_planned"] == PLAN.epsilon
    assert (report["private"], report["run"], report["ledger_head"]) == (True, record.run, record.head)
    words = (tmp_path / "privacy.txt").read_text()
    assert words.startswith("PRIVATE. ")
    for asked in (
        f"{round_up(report['epsilon'])} at δ = 1e-05",
        record.run,
        record.head,
        "Unit of privacy:       one training example",
        "with one unit added or removed",
        "privacy loss distribution, discretised and rounded from above",
        "each of 60000 examples in each step with probability 0.00853333, independently; 512 expected",
        "one example changes the sum by at most 0.7",
        "Gaussian, 1.5 times that bound",
        "30 done of 50 planned",
        "operating system's entropy, AES-256 in counter mode",
        "dp-microadam 0",
        "torch 2",
        "normalization constants",
        "validation",
        "running time",
        "hyperparameters",
        "set a group size",
    ):
        assert asked in words, asked


def test_the_statement_says_what_attackers_reach_mu_and_replacing(tmp_path):
    record = run(tmp_path, Randomness.from_entropy(), steps=50)
    report = write_privacy_files(tmp_path, record)
    told, curve = report["meaning"], trade_off(record.spent)
    assert [row["false_positive_rate"] for row in told["attacks"]] == [0.1, 0.01, 0.001]
    assert [row["true_positive_rate"] for row in told["attacks"]] == [curve.true_positives(rate) for rate in (0.1, 0.01, 0.001)]
    assert (told["mu"], told["mu_smallest_rate"]) == (gaussian_bound(curve).mu, gaussian_bound(curve).smallest_rate)
    assert told["replace_one_epsilon"] == replace_one_epsilon(record.spent, 1e-5) > told["add_or_remove_epsilon"]
    assert told["add_or_remove_epsilon"] == record.epsilon(accountant="pld")
    words = (tmp_path / "privacy.txt").read_text()
    found = math.ceil(1e4 * curve.true_positives(0.01)) / 100
    for asked in (
        "accuses 1 in 10 of those who did not take part finds at most",
        f"1 in 100: {found:.2f} %",
        f"μ ≤ {told['mu']:.2f}, for attacks with error rates of at least {told['mu_smallest_rate']:g}",
        f"ε = {round_up(told['replace_one_epsilon'])} at δ = 1e-05 if one unit is exchanged for another",
    ):
        assert asked in words, asked


def test_what_attackers_reach_is_left_out_with_its_reason_where_it_cannot_be_computed(tmp_path):
    plan = PrivacyPlan(60_000, 512, 0.02, 50, 1e-5)
    described = RunSettings(private=True, randomness=Randomness.from_entropy().description, sensitivity=0.7)
    with PrivacyLedger.create(tmp_path, plan, described) as ledger:
        ledger.record_step()
    report = privacy_report(read_ledger(tmp_path))
    assert report["meaning"] == {"not_computed": report["meaning"]["not_computed"]}
    assert "not computed: noise_multiplier is 0.02" in statement_in_words(report)


def test_a_seeded_run_is_stamped_not_private_in_json_and_words(tmp_path):
    report = privacy_report(run(tmp_path, Randomness.seeded(3), steps=5))
    assert report["private"] is False
    words = statement_in_words(report)
    assert words.startswith("NOT PRIVATE. ")
    assert "fixed seed 3" in words
    assert "nothing is guaranteed" in words


def test_several_examples_per_person_are_offered_group_privacy(tmp_path):
    record = run(tmp_path, Randomness.from_entropy(), steps=50)
    report = privacy_report(record, group_size=2)
    assert report["group_epsilon"] == group_epsilon(record.spent, 1e-5, 2) > record.epsilon(accountant="pld")
    assert f"a person with up to 2 examples: ε = {round_up(report['group_epsilon'])}" in statement_in_words(report)


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [(7.9911, "8.00"), (7.9900, "7.99"), (0.29, "0.29"), (1e-9, "0.01"), (0.0, "0.00"), (2.0, "2.00"), (math.inf, "inf")],
)
def test_epsilon_is_never_rounded_down(epsilon, shown):
    assert round_up(epsilon) == shown


USERS = PrivacyPlan.solve(dataset_size=3_000, batch_size=100, delta=1e-5, noise_multiplier=1.5, steps=50, examples_per_user=4)


@pytest.mark.parametrize("bands", [1, 4])
def test_for_users_every_line_says_users(tmp_path, bands):
    plan = dataclasses.replace(USERS, bands=bands)
    settings = RunSettings(True, "entropy", 1.0, clipping="the mean gradient of each user's examples")
    with PrivacyLedger.create(tmp_path, plan, settings) as ledger:
        for _ in range(50):
            ledger.record_step(processes=2)
    report = privacy_report(read_ledger(tmp_path), group_size=3)
    words = statement_in_words(report)
    assert report["sampling"]["examples_per_user"] == 4
    assert report["group_epsilon"] == group_epsilon(read_ledger(tmp_path).spent, 1e-5, 3)
    for said in (
        f"{round_up(plan.epsilon)} at δ = 1e-05, for a user, for the steps done",
        "with one user added or removed, with all their examples, however many",
        f"up to 3 users together: ε = {round_up(report['group_epsilon'])}",
        "one user changes the sum by at most 1",
        "of each, at most 4 examples, drawn anew in every step, enter as their mean",
        "each with its share of the users and of the noise",
        "the number of users, which is taken as public",
        "each of 3000 users in each step" if bands == 1 else "3000 users in 4 groups",
    ):
        assert said in words, said
    for item in re.findall(r"[^;.\n]*\bexamples?\b[^;.\n]*", words):
        assert re.search(r"user|their examples|at most 4 examples", item), item


SPECIAL = {
    "bands": (
        PrivacyPlan(10_000, 100, 1.5, 100, 1e-5, bands=8),
        "10000 examples in 8 groups by their number alone; step t takes each example of group t modulo 8 with probability 0.08",
        "8 bands, banded square root: the noise of a step partly takes back that of the last 7",
        "no example is in two steps closer than 8, so ε is that of 1 steps with probability 0.08 and independent noise of 1.5",
        "while all others keep their numbers and so their groups",
        "by general group privacy",
    ),
    "a cap": (
        PrivacyPlan(1000, 50, 2.0, 100, 1e-5, max_batch_size=60),
        "50 expected per step and 60 at most: of more, so many are kept at random, and ε accounts for it",
        "the larger of the two has the 1000 units of the plan",
    ),
}


@pytest.mark.parametrize("special", SPECIAL)
def test_the_statement_says_what_only_some_runs_have(tmp_path, special):
    plan, *said = SPECIAL[special]
    described = RunSettings(private=True, randomness=Randomness.from_entropy().description, sensitivity=0.7)
    with PrivacyLedger.create(tmp_path, plan, described) as ledger:
        for processes in (2, 2, 3, 1):
            ledger.record_step(processes=processes)
    record = read_ledger(tmp_path)
    report = privacy_report(record, group_size=2)
    assert report["epsilon"] == plan.epsilon_after(4) < report["group_epsilon"] == group_epsilon(record.spent, 1e-5, 2)
    assert report["noise"]["deviation_of_the_mean"] == plan.noise_deviation(0.7)
    words = statement_in_words(report)
    processes = "1 steps by 1; 2 steps by 2; 1 steps by 3, each with its share of the examples and of the noise; they trust"
    for each in (*said, processes):
        assert each in words
