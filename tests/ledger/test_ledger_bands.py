"""Ledger, statement and budget of runs with correlated noise."""

import json
import shutil
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples

from dp_microadam import PrivacyError, PrivacyPlan
from dp_microadam.accounting.costs import SubsampledGaussian, epsilon, group_epsilon
from dp_microadam.ledger.ledger import (
    LEDGER_NAME,
    PrivacyLedger,
    RecordedStep,
    RunSettings,
    most_of_one_example,
    read_ledger,
    spent_together,
    steps_together,
)
from dp_microadam.ledger.statement import privacy_report, statement_in_words, write_privacy_files
from dp_microadam.workbench.command_line.cli import main

SETTINGS = RunSettings(private=True, randomness="operating system's entropy", sensitivity=1.0)
BANDED = PrivacyPlan(10_000, 100, 1.5, 100, 1e-5, bands=8)
ONE_BAND = PrivacyPlan(10_000, 100, 1.5, 100, 1e-5)


def make(folder, plan=BANDED, steps=20):
    with PrivacyLedger.create(folder, plan, SETTINGS) as ledger:
        for _ in range(steps):
            ledger.record_step()
    return folder


def go_on(folder, steps, plan=BANDED):
    with PrivacyLedger.resume(folder, plan, SETTINGS, position=0) as ledger:
        for _ in range(steps):
            ledger.record_step()


def test_header_and_lines_say_bands_and_groups(tmp_path):
    header, *lines = (json.loads(line) for line in (make(tmp_path) / LEDGER_NAME).read_text().splitlines())
    assert (header["plan"]["bands"], header["plan"]["sample_rate"]) == (8, 0.08)
    assert [line["group"] for line in lines] == [step % 8 for step in range(20)]
    record = read_ledger(tmp_path)
    assert record.plan == BANDED
    assert record.steps == 20
    assert record.spent == (SubsampledGaussian(0.08, 1.5, 3, bands=8),)
    assert record.epsilon() == epsilon([SubsampledGaussian(0.08, 1.5, 3)], 1e-5) == BANDED.epsilon_after(20)


def test_steps_of_a_resumed_run_stay_in_the_cycle_and_a_torn_line_is_a_step_of_it(tmp_path):
    path = make(tmp_path, steps=5) / LEDGER_NAME
    path.write_bytes(path.read_bytes()[:-30])
    go_on(tmp_path, 4)
    record = read_ledger(tmp_path)
    assert record.steps == 9
    assert [json.loads(line)["group"] for line in path.read_text().splitlines()[6:]] == [5, 6, 7, 0]
    assert record.resumed_at == (4, 5), "a line that cannot be read may have been another session's"
    assert record.spent == (SubsampledGaussian(0.08, 1.5, 3, bands=8),)


@examples(100)
@given(bands=st.integers(1, 6), sessions=st.lists(st.integers(1, 9), min_size=1, max_size=5), more=st.integers(0, 20))
def test_no_orders_of_the_examples_in_the_sessions_sample_one_more_often_than_is_counted(bands, sessions, more):
    """Brute force over the number that the example has in each session."""
    starts = [sum(sessions[:number]) for number in range(len(sessions))]
    total = sum(sessions)
    plan = PrivacyPlan(1000, 10, 1.5, max(bands, total + more), 1e-5, bands=bands)
    most = 0
    for numbers in product(range(bands), repeat=len(sessions)):
        taken = [
            sum(step % bands == number for step in range(start, start + length))
            for start, length, number in zip(starts, sessions, numbers, strict=True)
        ]
        most = max(most, sum(taken))
    assert plan.participations(total, starts[1:]) == most >= plan.participations(total)
    steps = (
        RecordedStep("", str(start), step, (plan.sample_rate, 1.5))
        for start, n in zip(starts, sessions, strict=True)
        for step in range(start, start + n)
    )
    assert sum(part.steps for part in most_of_one_example(steps, bands)) == most
    end = plan.last_step(starts[1:])
    if end > starts[-1]:
        within = plan.participations(plan.steps)
        assert plan.participations(end, starts[1:]) <= within
        assert end == plan.steps or plan.participations(end + 1, starts[1:]) > within


def test_a_run_that_is_resumed_ends_before_its_sessions_exceed_the_epsilon_of_the_plan(tmp_path):
    make(tmp_path, steps=3)
    for session in range(12):
        with PrivacyLedger.resume(tmp_path, BANDED, SETTINGS, position=0) as ledger:
            assert ledger.remaining == min(97 - session, (12 - session) * 8)
            ledger.record_step()
    record = read_ledger(tmp_path)
    assert record.resumed_at == tuple(range(3, 15))
    assert record.epsilon() == BANDED.epsilon_after(15, record.resumed_at) == BANDED.epsilon > BANDED.epsilon_after(15)
    with (
        PrivacyLedger.resume(tmp_path, BANDED, SETTINGS, position=0) as ledger,
        pytest.raises(
            PrivacyError, match="15 steps of a run that was resumed 13 times are spent; one more would exceed its eps"
        ),
    ):
        ledger.record_step()
    report = write_privacy_files(tmp_path, record)
    assert report["composition"] == {"steps": 13, "sample_rate": 0.08, "noise_multiplier": 1.5, "sessions": 13}
    words = (tmp_path / "privacy.txt").read_text()
    assert "no example is in two steps closer than 8 within one of its 13 sessions, which count each by itself" in words


def test_one_band_is_not_shortened_by_resuming(tmp_path):
    make(tmp_path, ONE_BAND, steps=1)
    for _ in range(3):
        go_on(tmp_path, 33, ONE_BAND)
    assert read_ledger(tmp_path).epsilon() == ONE_BAND.epsilon


def test_continuations_of_copies_count_in_the_group_that_was_in_both(tmp_path):
    """20 steps, then the copies take 1 and 3 more: an example can be in 3 of the former and in one of each session."""
    make(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    go_on(tmp_path / "one", 1)
    go_on(tmp_path / "two", 3)
    records = [read_ledger(tmp_path / name) for name in ("one", "two")]
    assert [record.spent[0].steps for record in records] == [4, 4]
    assert spent_together(records) == (SubsampledGaussian(0.08, 1.5, 5, bands=8),)
    assert steps_together(records) == 24


def test_budget_composes_runs_of_both_kinds(tmp_path, capsys):
    runs = [make(tmp_path / "banded"), make(tmp_path / "again"), make(tmp_path / "independent", ONE_BAND, steps=50)]
    assert main(["budget", *map(str, runs), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    spent = [SubsampledGaussian(0.08, 1.5, 6), SubsampledGaussian(0.01, 1.5, 50)]
    assert printed["epsilon"] == epsilon(spent, 1e-5)
    assert printed["accountants"]["pld"]["epsilon"] == epsilon(spent, 1e-5, "pld")
    assert printed["steps_done"] == 90
    assert [run["bands"] for run in printed["runs"]] == [8, 8, 1]
    assert main(["budget", *map(str, runs), "--group-size", "2"]) == 0
    shown = capsys.readouterr().out
    assert "bands" in shown
    assert "by general group privacy" in shown


def test_the_statement_says_bands_groups_and_the_composition(tmp_path):
    record = read_ledger(make(tmp_path))
    report = write_privacy_files(tmp_path, record)
    assert report["epsilon"] == BANDED.epsilon_after(20)
    assert (report["steps_done"], report["steps_planned"]) == (20, 100)
    assert (report["sampling"]["groups"], report["noise"]["bands"]) == (8, 8)
    assert report["composition"] == {"steps": 3, "sample_rate": 0.08, "noise_multiplier": 1.5, "sessions": 1}
    assert report["noise"]["deviation_of_the_mean"] == BANDED.noise_deviation(1.0) > 1.5 / 100
    words = (tmp_path / "privacy.txt").read_text()
    for said in (
        "10000 examples in 8 groups by their number alone; step t takes each example of group t modulo 8 with probability 0.08",
        "8 bands, banded square root: the noise of a step partly takes back that of the last 7",
        "no example is in two steps closer than 8, so ε is that of 3 steps with probability 0.08 and independent noise of 1.5",
        "while all others keep their numbers and so their groups",
    ):
        assert said in words


def test_several_examples_per_person_get_general_group_privacy_by_name(tmp_path):
    record = read_ledger(make(tmp_path))
    report = privacy_report(record, group_size=3)
    assert report["group_epsilon"] == group_epsilon(record.spent, 1e-5, 3) > 3 * record.epsilon()
    assert "by general group privacy" in statement_in_words(report)
