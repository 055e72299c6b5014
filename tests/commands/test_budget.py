"""``dp-microadam budget`` as a user runs it."""

import json

import pytest

from dp_microadam import PrivacyLedger, PrivacyPlan
from dp_microadam.cli import main
from dp_microadam.privacy.accounting import epsilon, group_epsilon
from dp_microadam.privacy.ledger import LEDGER_NAME, RunSettings, read_ledger


def make(folder, *, batch_size=100, noise_multiplier=2.0, steps=30, delta=1e-5, private=True, dataset_size=10_000):
    plan = PrivacyPlan(dataset_size, batch_size, noise_multiplier, 100, delta)
    described = RunSettings(private=private, randomness="entropy" if private else "fixed seed 1", sensitivity=1.0)
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
    assert printed["epsilon"] == printed["accountants"]["rdp"]["epsilon"] == epsilon(spent, 1e-5)
    assert printed["accountants"]["pld"]["epsilon"] == epsilon(spent, 1e-5, "pld")
    assert printed["group_epsilon"] == group_epsilon(spent, 1e-5, 3)
    assert printed["steps_done"] == 100
    alone = [run["epsilon"] for run in printed["runs"]]
    assert max(alone) < printed["epsilon"] < sum(alone)


def test_one_run_alone_is_what_it_says_itself(tmp_path, capsys):
    run = make(tmp_path / "run")
    assert main(["budget", run, "--accountant", "pld", "--delta", "1e-6"]) == 0
    assert f"{read_ledger(run).epsilon(1e-6, 'pld'):.2f}" in capsys.readouterr().out


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


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_bad_input_gets_one_sentence_and_exit_code_2(tmp_path, capsys, accountant):
    run, other = make(tmp_path / "run"), make(tmp_path / "other", delta=1e-6)
    for arguments, named in (
        ([str(tmp_path / "missing")], "run is"),
        ([run, run], "named twice"),
        ([run, other], "different deltas (1e-06, 1e-05); give --delta"),
        ([run, "--delta", "1"], "delta is 1.0"),
        ([run, "--group-size", "0"], "group_size is 0"),
    ):
        assert main(["budget", *arguments, "--accountant", accountant]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert named in shown.err
        assert shown.err.count("\n") == 1


def test_different_deltas_compose_at_the_one_given(tmp_path, capsys):
    runs = [make(tmp_path / "run"), make(tmp_path / "other", delta=1e-6)]
    assert main(["budget", *runs, "--delta", "1e-5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["delta"] == 1e-5


def test_a_run_without_clipping_and_noise_is_refused_as_such(tmp_path, capsys):
    (tmp_path / "privacy.json").write_text('{"private": false}')
    assert main(["budget", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "is not private: it was trained without clipping and noise" in error
    assert "leave it out" in error
