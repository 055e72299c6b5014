"""Ledger, statement and budget of runs with correlated noise."""

import json
import shutil
from pathlib import Path

import pytest

from dp_microadam import PrivacyError, PrivacyLedger, PrivacyPlan
from dp_microadam.apps.command_line.cli import main
from dp_microadam.privacy.accounting import SubsampledGaussian, epsilon, group_epsilon
from dp_microadam.privacy.ledger import LEDGER_NAME, RunSettings, read_ledger, spent_together, steps_together
from dp_microadam.privacy.ledger_lines import NO_HEAD, chained_line
from dp_microadam.privacy.statement import privacy_report, statement_in_words, write_privacy_files

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


def test_a_ledger_of_one_band_is_written_as_before_there_were_bands(tmp_path):
    header, line, *_ = (make(tmp_path, ONE_BAND) / LEDGER_NAME).read_text().splitlines()
    assert "bands" not in header
    assert "coefficients" not in header
    assert list(json.loads(line)) == ["step", "sample_rate", "noise_multiplier", "opened", "chain"]


@pytest.mark.parametrize(("before", "after"), [(BANDED, ONE_BAND), (ONE_BAND, BANDED)])
def test_a_ledger_of_one_kind_does_not_go_on_as_the_other(tmp_path, before, after):
    make(tmp_path, before)
    with pytest.raises(PrivacyError, match=f"began with plan bands = {before.bands} and cannot continue with {after.bands}"):
        go_on(tmp_path, 1, after)


def test_other_coefficients_are_another_plan(tmp_path):
    make(tmp_path)
    other = PrivacyPlan(10_000, 100, 1.5, 100, 1e-5, bands=8, coefficients=(0.9, *[0.1] * 7))
    with pytest.raises(PrivacyError, match="began with plan coefficients"):
        go_on(tmp_path, 1, other)


def test_steps_of_a_resumed_run_stay_in_the_cycle_and_a_torn_line_is_a_step_of_it(tmp_path):
    path = make(tmp_path, steps=5) / LEDGER_NAME
    path.write_bytes(path.read_bytes()[:-30])
    go_on(tmp_path, 4)
    record = read_ledger(tmp_path)
    assert record.steps == 9
    assert record.torn_lines == 1
    assert [json.loads(line)["group"] for line in path.read_text().splitlines()[6:]] == [5, 6, 7, 0]
    assert record.spent == (SubsampledGaussian(0.08, 1.5, 2, bands=8),)


def rewritten(path: Path, change):
    """The ledger with ``change`` applied to every object, and all hashes recomputed, as a forger could."""
    lines, head = [], NO_HEAD
    for number, line in enumerate(path.read_text().splitlines()):
        values = json.loads(line)
        del values["chain"]
        change(number, values)
        new, head = chained_line(values, head)
        lines.append(new)
    path.write_bytes(b"".join(lines))


def test_groups_that_contradict_the_steps_are_refused_even_with_new_hashes(tmp_path):
    path = make(tmp_path) / LEDGER_NAME
    rewritten(path, lambda number, values: values.update(group=0) if number == 7 else None)
    with pytest.raises(PrivacyError, match="has group 0 in step 6, whose group is 6"):
        read_ledger(tmp_path)


def test_bands_written_into_the_header_of_another_run_are_refused_even_with_new_hashes(tmp_path):
    """More bands mean fewer steps to account for; the sample rate in header and lines contradicts that."""
    path = make(tmp_path, ONE_BAND) / LEDGER_NAME
    rewritten(path, lambda number, values: values["plan"].update(bands=8) if number == 0 else None)
    with pytest.raises(PrivacyError, match=r"has a plan with sample rate 0\.01 instead of 0\.08"):
        read_ledger(tmp_path)


def test_continuations_of_copies_count_in_the_group_that_was_in_both(tmp_path):
    """20 steps, then the copies take 1 and 3 more: the example of group 4 was in steps 4 and 12 and in step 20 of each."""
    make(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    go_on(tmp_path / "one", 1)
    go_on(tmp_path / "two", 3)
    records = [read_ledger(tmp_path / name) for name in ("one", "two")]
    assert [record.spent[0].steps for record in records] == [3, 3]
    assert spent_together(records) == (SubsampledGaussian(0.08, 1.5, 4, bands=8),)
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
    assert report["composition"] == {"steps": 3, "sample_rate": 0.08, "noise_multiplier": 1.5}
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


def test_the_statement_of_one_band_is_as_before_there_were_bands(tmp_path):
    report = privacy_report(read_ledger(make(tmp_path, ONE_BAND)))
    assert set(report["noise"]) == {"kind", "noise_multiplier", "deviation_of_the_sum", "deviation_of_the_mean"}
    assert set(report["sampling"]) == {"kind", "sample_rate", "dataset_size", "expected_batch_size"}
    assert "composition" not in report
    assert "Correlation" not in statement_in_words(report)
