"""``dp-microadam budget`` as a user runs it."""

import json
import os
import shutil

import pytest

from dp_microadam import PrivacyPlan
from dp_microadam.accounting.costs import SubsampledGaussian, epsilon, group_epsilon
from dp_microadam.ledger.ledger import LEDGER_NAME, PrivacyLedger, RunSettings, read_ledger
from dp_microadam.ledger.statement import write_privacy_files
from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.reporting.run import Run


def make(
    folder,
    *,
    batch_size=100,
    noise_multiplier=2.0,
    steps=30,
    delta=1e-5,
    private=True,
    dataset_size=10_000,
    unit=("example", ""),
):
    whose = {"examples_per_user": 3} if unit[0] == "user" else {}
    plan = PrivacyPlan(dataset_size, batch_size, noise_multiplier, 100, delta, **whose)
    randomness = "entropy" if private else "fixed seed 1"
    described = RunSettings(private=private, randomness=randomness, sensitivity=1.0, unit_name=unit[1])
    with PrivacyLedger.create(folder, plan, described) as ledger:
        for _ in range(steps):
            ledger.record_step()
    return str(folder)


def test_runs_with_different_sampling_and_noise_compose_to_one_epsilon(tmp_path, capsys):
    first = make(tmp_path / "first")
    second = make(tmp_path / "second", batch_size=500, noise_multiplier=4.0, steps=70)
    assert main(["budget", first, f"{second}/{LEDGER_NAME}", "--json", "--group-size", "3"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    printed = json.loads(shown.out)
    spent = [*read_ledger(first).spent, *read_ledger(second).spent]
    assert printed["private"] is True
    assert printed["epsilon"] == epsilon(spent, 1e-5)
    assert printed["group_epsilon"] == group_epsilon(spent, 1e-5, 3)
    assert printed["steps_done"] == 100
    alone = [run["epsilon"] for run in printed["runs"]]
    assert max(alone) < printed["epsilon"] < sum(alone)


def test_an_output_folder_of_hugging_face_stands_for_the_run_inside_it(tmp_path, capsys):
    inside = make(tmp_path / "out" / "privacy")
    write_privacy_files(tmp_path / "out", read_ledger(inside))  # as save_model leaves it
    printed = []
    for folder in (inside, str(tmp_path / "out")):
        assert main(["budget", folder, "--json"]) == 0
        printed.append(json.loads(capsys.readouterr().out)["epsilon"])
    assert printed[0] == printed[1]
    assert main(["report", str(tmp_path / "out"), "--page-only"]) == 0
    assert (tmp_path / "out" / "report.html").is_file()
    assert Run.read(tmp_path / "out").name == "out"


def test_a_run_that_is_not_private_makes_the_whole_not_private(tmp_path, capsys):
    runs = [make(tmp_path / "private"), make(tmp_path / "seeded", private=False)]
    assert main(["budget", *runs, "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["private"] is False
    assert "not private" in shown.err
    assert main(["budget", *runs]) == 0
    assert "not private: all runs together" in capsys.readouterr().out


def test_datasets_of_different_sizes_are_a_warning(tmp_path, capsys):
    assert main(["budget", make(tmp_path / "a"), make(tmp_path / "b", dataset_size=20_000)]) == 0
    assert "different sizes [10000, 20000]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("one", "other", "adds_up"),
    [
        (("user", "patient"), ("user", "hospital"), False),
        (("user", "patient"), ("user", ""), False),
        (("user", "patient"), ("example", "patient"), False),
        (("example", "patient"), ("example", "hospital"), False),
        (("example", "patient"), ("example", ""), True),
        (("user", "patient"), ("user", "patient"), True),
    ],
    ids=str,
)
def test_runs_of_different_units_do_not_add_up(tmp_path, capsys, one, other, adds_up):
    runs = [make(tmp_path / "first", unit=one), make(tmp_path / "second", unit=other)]
    assert main(["budget", *runs]) == (0 if adds_up else 2)
    shown = capsys.readouterr()
    if adds_up:
        assert f"for a {one[1]}" in shown.out if one == other else "for a" not in shown.out, "the unit that holds for both"
    else:
        assert "which do not add up; name runs of one unit at a time" in shown.err
        assert "second' protects one" in shown.err


def test_bad_input_gets_one_sentence_and_exit_code_2(tmp_path, capsys):
    run, other, unprotected = make(tmp_path / "run"), make(tmp_path / "other", delta=1e-6), tmp_path / "unprotected"
    unprotected.mkdir()
    (unprotected / "privacy.json").write_text('{"private": false}')
    for arguments, named in (
        ([str(tmp_path / "missing")], "run is"),
        ([run, run], "named twice"),
        ([run, other], "different deltas (1e-06, 1e-05); give --delta"),
        ([run, "--delta", "1"], "delta is 1.0"),
        ([run, "--delta", "1e-50"], "delta is 1e-50; it must be at least 3e-39"),
        ([run, "--group-size", "0"], "group_size is 0"),
        ([run, "--anchor", "12ab"], "anchor is '12ab'; it must be 32 hexadecimal digits"),
        ([str(unprotected)], "is not private: it was trained without clipping and noise"),
    ):
        assert main(["budget", *arguments]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert named in shown.err
        assert shown.err.count("\n") == 1


def test_different_deltas_compose_at_the_one_given(tmp_path, capsys):
    runs = [make(tmp_path / "run"), make(tmp_path / "other", delta=1e-6)]
    assert main(["budget", *runs, "--delta", "1e-5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["delta"] == 1e-5


def go_on(folder, steps):
    record = read_ledger(folder)
    with PrivacyLedger.resume(folder, record.plan, record.settings, position=record.steps) as ledger:
        for _ in range(steps):
            ledger.record_step()


def test_a_copied_run_that_was_resumed_twice_counts_both_continuations(tmp_path, capsys):
    """Each copy says what it spent itself; together they spent the steps they share, and both continuations."""
    one, two = make(tmp_path / "one", steps=10), str(tmp_path / "two")
    shutil.copytree(one, two)
    go_on(one, 20)
    go_on(two, 15)
    assert main(["budget", one, two, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["steps_done"] == 45
    assert printed["epsilon"] == epsilon([SubsampledGaussian(0.01, 2.0, 45)], 1e-5)
    assert [run["epsilon"] for run in printed["runs"]] == [epsilon([SubsampledGaussian(0.01, 2.0, n)], 1e-5) for n in (30, 25)]
    assert printed["copies"] == [{"id": read_ledger(one).run, "runs": [one, two], "shared_steps": 10, "steps_together": 45}]
    assert main(["budget", one, two]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "are copies of the same run: the 10 steps that they share count once, 45 in total" in words


@pytest.mark.parametrize("more", [0, 6], ids=["identical", "a backup"])
def test_a_copy_that_adds_nothing_counts_once(tmp_path, capsys, more):
    run, copy = make(tmp_path / "run", steps=12), str(tmp_path / "copy")
    shutil.copytree(run, copy)
    go_on(run, more)
    assert main(["budget", copy, run, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["steps_done"] == 12 + more
    assert printed["epsilon"] == read_ledger(run).epsilon()


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_a_link_to_a_run_is_that_run(tmp_path, capsys, link):
    run = make(tmp_path / "run")
    link(f"{run}/{LEDGER_NAME}", tmp_path / "linked.jsonl")
    assert main(["budget", run, str(tmp_path / "linked.jsonl")]) == 2
    assert "named twice" in capsys.readouterr().err


def test_a_rollback_behind_a_published_anchor_is_refused(tmp_path, capsys):
    run = make(tmp_path / "run", steps=10)
    backup = (tmp_path / "run" / LEDGER_NAME).read_bytes()
    earlier = read_ledger(run).head
    go_on(run, 5)
    anchor = read_ledger(run).head
    assert main(["budget", run, "--anchor", anchor, "--anchor", earlier]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert f"anchor {anchor} is in {run}, after 15 steps" in words
    assert f"anchor {earlier} is in {run}, after 10 steps" in words
    (tmp_path / "run" / LEDGER_NAME).write_bytes(backup)
    go_on(run, 5)  # as many steps as before, and others
    assert main(["budget", run, "--anchor", earlier, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["anchors"] == [{"anchor": earlier, "run": run, "steps": 10}]
    assert main(["budget", run, "--anchor", anchor]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"no ledger named here contains the hash {anchor}" in shown.err


def test_an_export_is_not_mistaken_for_a_run_without_privacy(tmp_path, capsys):
    run = make(tmp_path / "run")
    (tmp_path / "export").mkdir()
    write_privacy_files(tmp_path / "export", read_ledger(run))
    assert main(["budget", str(tmp_path / "export")]) == 2
    assert "has a privacy statement and no ledger.jsonl, as exports do; name the run's own folder" in capsys.readouterr().err
