"""Studies as a person runs them: real processes on real digits, and what becomes of their results."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from research.__main__ import main
from research.experiments.report import Sweep, markdown, write_report
from research.experiments.study import load_study
from research.experiments.sweep import SweepFolder

from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.plan.selection_plan import SelectionPlan

STUDY = """
title = "Digits"
question = "Does it run?"
rows = ["noise multiplier σ"]
columns = ["method"]
figures = [{ kind = "lines", x = "noise multiplier σ" }, { kind = "curves", panel = "noise multiplier σ" }]

[recipe]
data = "digits"
model = "mlp"
epsilon = 8.0
batch_size = 64
evaluate_every = 2
checkpoint_every = 2

[axes."noise multiplier σ"]
1 = { noise_multiplier = 1.0 }

[axes.method]
"DP-SGD" = { method = "dp-sgd" }
"Broken" = { method = "dp-adam", validation_size = 4999 }

[paper.values]
1 = { "DP-SGD" = 70.6 }
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "digits.toml"
    path.write_text(STUDY)
    return path


def results(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_study_runs_names_what_failed_and_adds_seeds(study, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["reproduce", str(study), "--max-steps", "4", "--out", str(out)]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert main([*command, "--jobs", "2"]) == 1
    assert "failed: noise multiplier σ 1, Broken, run 1: dp-microadam: " in said.getvalue()
    [line] = results(out)
    assert line["private"] is True
    assert (0 < line["epsilon"] < 8, line["steps"]) == (True, 4)
    assert [point[0] for point in line["curve"]] == [2, 4]
    assert {"date", "machine", "commit", "seconds"} <= line.keys()
    assert (out / line["folder"] / "ledger.jsonl").exists()
    assert {path.suffix for path in out.iterdir()} >= {".md", ".png", ".pdf"}

    (out / "results.jsonl").write_text(json.dumps(line)[:-20])  # torn by a crash
    assert main([*command, "--only", "method=DP-SGD", "--seeds", "2"]) == 0
    assert [one["repeat"] for one in map(json.loads, (out / "results.jsonl").read_text().splitlines()[1:])] == [1, 2]
    with SweepFolder(out).locked():
        assert main(command) == 2
    assert "another sweep is at work" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_study_goes_on_where_it_stopped(study, tmp_path):
    """Killed with SIGKILL while a run trains: the run's own steps are not lost, and nothing counts twice."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "research", "reproduce", str(study), "--max-steps", "300"]
    command += ["--only", "method=DP-SGD", "--set", "evaluate_every=20", "--set", "checkpoint_every=20", "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(out.glob("runs/*/1/metrics.jsonl")):
        time.sleep(0.1)
    [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    os.kill(int(child), signal.SIGKILL)
    process.communicate()
    assert not (out / "results.jsonl").exists()
    assert main(command[3:]) == 0
    [run] = out.glob("runs/*/1")
    assert "resumed at step" in (run / "log.txt").read_text()
    assert json.loads((run / "privacy.json").read_text())["steps_done"] == 300
    assert len(results(out)) == 1


SEARCH = """
title = "Search"
question = "Is it run as one?"
rows = ["hyperparameters"]
columns = ["method"]
recipe = { data = "digits", model = "mlp", epsilon = 8.0, steps = 3, batch_size = 32 }
axes.method."DP-SGD" = { method = "dp-sgd" }
axes.hyperparameters.tuned = { tune = { expected_runs = 2, learning_rate = [1.0, 4.0] } }
"""


@pytest.mark.slow
def test_a_search_is_run_as_one(tmp_path):
    study, out = tmp_path / "search.toml", tmp_path / "out"
    study.write_text(SEARCH)
    assert main(["reproduce", str(study), "--out", str(out)]) == 0
    [line] = results(out)
    assert line["private"]
    assert line["epsilon"] <= 8.0
    assert isinstance(read_ledger(out / line["folder"]).plan, SelectionPlan)


COST = """
title = "Cost"
question = "How long?"
measure = "cost"
rows = ["run"]
columns = ["quantity"]
recipe = { accountant = "rdp", bands = 1, data = "cifar100", model = "mlp", method = "dp-sgd", epsilon = 8.0, delta = 1e-5, \
batch_size = 4096, physical_batch_size = 32 }

[axes.run]
"σ = 3" = { noise_multiplier = 3.0 }
"σ = 4" = { noise_multiplier = 4.0 }

[axes.quantity]
updates = {}
hours = {}
"""


def test_a_study_of_cost_needs_no_data_and_measures_what_is_alike_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DP_MICROADAM_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "none"))
    study = tmp_path / "cost.toml"
    study.write_text(COST)
    assert main(["reproduce", str(study), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert said.count("measuring") == 1
    assert "cifar100 was not found; timing random images" in said
    values = {(line["cell"]["run"], line["cell"]["quantity"]): line["value"] for line in results(tmp_path / "out")}
    # The paper's step counts for 45,000 examples in batches of 4,096 at ε = 8.
    assert (values["σ = 3", "updates"], values["σ = 4", "updates"]) == (2480, 4556)
    assert values["σ = 4", "hours"] / values["σ = 3", "hours"] == pytest.approx(4556 / 2480)


def test_estimate_tells_hours_and_runs_nothing(study, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", str(study), "--only", "method=DP-SGD", "--estimate", "--seeds", "2"]) == 0
    cell, total = capsys.readouterr().out.splitlines()
    assert re.search(r"steps of [\d.e-]+ s, [\d.]+ hours per run", cell)
    assert "hours with 2 of each cell" in total
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "message"), [
    (["nothing"], "there is no study 'nothing'"),
    (["sigma-sweep", "--seeds", "0"], "seeds is 0"),
    (["sigma-sweep", "--jobs", "0"], "jobs is 0"),
    (["sigma-sweep", "--max-steps", "-1"], "max_steps is -1"),
    (["sigma-sweep", "--set", "learning=1"], "learning = 1 is unknown"),
])  # fmt: skip
def test_bad_input_is_refused_in_one_sentence_and_nothing_is_written(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_table_has_middles_ranges_the_papers_values_and_what_was_not_run(study, tmp_path):
    folder = tmp_path / "sweep"
    SweepFolder(folder).begin(load_study(str(study)), "python -m research reproduce digits")
    cell = {"noise multiplier σ": 1, "method": "DP-SGD"}
    values = [(1, 71.2), (2, 70.0), (3, 99.9), (3, 70.9)]  # of the same run the later line counts
    lines = [{"cell": cell, "repeat": n, "value": value, "commit": "abc", "curve": [[2, 1.0]]} for n, value in values]
    (folder / "results.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"cell": {"noise')
    sweep = Sweep.read(folder)
    assert markdown(sweep).splitlines()[-1] == "| 1 | 70.9 (70.0–71.2, 3 seeds); paper 70.6 | not run |"
    assert sweep.curve(cell) == [(2, 1.0)]
    assert {path.name for path in write_report(folder)} >= {"table.md", "digits-lines.png", "digits-curves.pdf"}
