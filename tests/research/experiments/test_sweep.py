"""Sweeps as a person runs them: real processes on real digits."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from research.__main__ import main
from research.experiments.study import load_study
from research.experiments.sweep import SweepFolder, jobs_of

STUDY = """
title = "Digits"
question = "Does it run?"
rows = ["noise multiplier σ"]
columns = ["method"]
figures = [{ kind = "lines", x = "noise multiplier σ" }]

[recipe]
data = "digits"
model = "mlp"
epsilon = 8.0
batch_size = 64
ema_decay = 0.9
evaluate_every = 2
checkpoint_every = 2

[axes."noise multiplier σ"]
1 = { noise_multiplier = 1.0 }

[axes.method]
"DP-SGD" = { method = "dp-sgd" }
"Broken" = { method = "dp-adam", validation_size = 4999 }
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "digits.toml"
    path.write_text(STUDY)
    return path


@pytest.fixture(scope="module")
def swept(study, tmp_path_factory):
    """A sweep of two cells, one of which cannot work: the second has no training example left to speak of."""
    out = tmp_path_factory.mktemp("swept") / "out"
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(["reproduce", str(study), "--max-steps", "4", "--out", str(out), "--jobs", "2"])
    assert code == 1
    return out, said.getvalue()


def results(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_failed_run_is_named_and_the_others_finish(swept):
    out, said = swept
    assert [line["cell"]["method"] for line in results(out)] == ["DP-SGD"]
    assert "failed: noise multiplier σ 1, Broken, run 1: dp-microadam: " in said


@pytest.mark.slow
def test_the_same_command_tries_a_failed_run_again(swept, study, capsys):
    out, _ = swept
    before = results(out)
    assert main(["reproduce", str(study), "--max-steps", "4", "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert "1 of 2 runs are done already" in said
    assert "failed: noise multiplier σ 1, Broken, run 1: dp-microadam: " in said
    assert results(out) == before


@pytest.mark.slow
def test_a_result_says_how_private_by_what_and_how_it_came_about(swept):
    out, _ = swept
    [line] = results(out)
    assert line["private"] is True
    assert 0 < line["epsilon"] < 8
    assert line["steps"] == 4
    assert [point[0] for point in line["curve"]] == [2, 4]
    assert {"date", "machine", "commit", "seconds"} <= line.keys()
    assert (out / line["folder"] / "ledger.jsonl").exists()


@pytest.mark.slow
def test_a_result_has_the_accuracy_of_averaged_and_of_last_weights(swept, capsys):
    out, _ = swept
    [line] = results(out)[:1]
    assert main(["evaluate", str(out / line["folder"]), "--json"]) == 0
    assert line["value"] == 100 * json.loads(capsys.readouterr().out)["test_accuracy"]
    assert 0 < line["final_weights"] <= 100
    assert line["final_weights"] != line["value"]  # the average still has much of the weights it began with


@pytest.mark.slow
def test_tables_and_figures_are_written(swept):
    out, _ = swept
    suffixes = {path.suffix for path in out.rglob("*") if "runs" not in path.parts}
    assert {".csv", ".tex", ".md", ".png", ".pdf", ".html"} <= suffixes


@pytest.mark.slow
def test_more_seeds_add_runs_to_those_there(swept, study, capsys):
    out, _ = swept
    arguments = ["reproduce", str(study), "--max-steps", "4", "--only", "method=DP-SGD", "--out", str(out)]
    assert main([*arguments, "--seeds", "2", "--json"]) == 0
    assert "1 of 2 runs are done already" in capsys.readouterr().err
    both = [line for line in results(out) if line["cell"]["method"] == "DP-SGD"]
    assert [line["repeat"] for line in both] == [1, 2]
    assert both[0]["curve"] != both[1]["curve"]


@pytest.mark.slow
def test_a_torn_line_is_collected_again(swept, study):
    out, _ = swept
    before = (out / "results.jsonl").read_text()
    (out / "results.jsonl").write_text(before[: before.index("\n") - 20])
    assert main(["reproduce", str(study), "--max-steps", "4", "--only", "method=DP-SGD", "--out", str(out)]) == 0
    lines = (out / "results.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) | {"seconds": 0} == json.loads(before.splitlines()[0]) | {"seconds": 0}
    (out / "results.jsonl").write_text(before)


@pytest.mark.slow
def test_two_sweeps_in_one_folder_are_refused(swept, study, capsys):
    out, _ = swept
    with SweepFolder(out).locked():
        assert main(["reproduce", str(study), "--out", str(out)]) == 2
    assert "another sweep is at work" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_where_it_stopped(study, tmp_path):
    """Killed with SIGKILL while a run trains: the run's own steps are not lost, and nothing counts twice."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "research", "reproduce", str(study), "--max-steps", "300"]
    command += ["--only", "method=DP-SGD", "--set", "evaluate_every=20", "--set", "checkpoint_every=20", "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    [job] = jobs_of(load_study(str(study), None, ["max_steps=300"]).only(["method=DP-SGD"]), 1)
    run = SweepFolder(out).run_folder(job)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (run / "metrics.jsonl").exists():
        time.sleep(0.1)
    [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    os.kill(int(child), signal.SIGKILL)
    process.communicate()
    assert (run / "metrics.jsonl").exists()
    assert not (out / "results.jsonl").exists()
    assert main(command[3:]) == 0
    [line] = results(out)
    assert "resumed at step" in (run / "log.txt").read_text()
    assert line["steps"] <= 300
    assert json.loads((run / "privacy.json").read_text())["steps_done"] == 300


@pytest.mark.slow
def test_ctrl_c_stops_the_runs_at_a_step_and_the_same_command_goes_on(study, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "research", "reproduce", str(study), "--max-steps", "100000"]
    command += ["--only", "method=DP-SGD", "--set", "evaluate_every=20", "--set", "checkpoint_every=100000", "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(out.glob("runs/*/1/metrics.jsonl")):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "stopped; run the same command again to continue" in said
    [run] = out.glob("runs/*/1")
    spent = json.loads((run / "privacy.json").read_text())["steps_done"]
    assert (run / "log.txt").read_text().rstrip().endswith(f"interrupted at step {spent}")


def test_estimate_tells_hours_and_runs_nothing(study, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", str(study), "--only", "method=DP-SGD", "--estimate", "--seeds", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    [cell] = told["cells"]
    assert cell["hours"] == pytest.approx(cell["steps"] * cell["seconds_per_step"] / 3600)
    assert told["hours"] == pytest.approx(2 * cell["hours"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_estimate_takes_bands_as_they_come(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cell = ["--only", "data=digits", "--only", "ε=3", "--only", "B=64", "--only", "method=DP-SGD"]
    assert main(["reproduce", "bands", "--scale", "cpu", *cell, "--estimate", "--json"]) == 0
    one, auto = json.loads(capsys.readouterr().out)["cells"]
    assert (one["cell"]["bands"], auto["cell"]["bands"]) == ("1", "auto")
    assert one["seconds_per_step"] == auto["seconds_per_step"] > 0
    assert one["steps"] == auto["steps"] == load_study("bands", "cpu").cells[-1].recipe.steps


COST_STUDY = """
title = "Cost"
question = "How long?"
measure = "cost"
rows = ["run"]
columns = ["quantity"]

[recipe]
accountant = "rdp"
bands = 1
data = "cifar100"
model = "mlp"
method = "dp-sgd"
epsilon = 8.0
delta = 1e-5
batch_size = 4096
physical_batch_size = 32

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
    study.write_text(COST_STUDY)
    command = ["reproduce", str(study), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    said = capsys.readouterr().err
    assert said.count("measuring") == 1
    assert "cifar100 was not found; timing random images" in said
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    values = {(line["cell"]["run"], line["cell"]["quantity"]): line["value"] for line in lines}
    # The paper's step counts for 45,000 examples in batches of 4,096 at ε = 8.
    assert (values["σ = 3", "updates"], values["σ = 4", "updates"]) == (2480, 4556)
    assert values["σ = 4", "hours"] / values["σ = 3", "hours"] == pytest.approx(4556 / 2480)

    assert main(command) == 0
    assert "measuring" not in capsys.readouterr().err
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 4


def test_a_study_of_cost_that_is_interrupted_writes_no_measurement(tmp_path, capsys, monkeypatch):
    def interrupted_at_the_first_step():
        os.kill(os.getpid(), signal.SIGINT)  # the trainer takes it as a wish to end after this step
        return time.perf_counter()

    monkeypatch.setattr(
        "dp_microadam.workbench.command_line.estimate.time", SimpleNamespace(perf_counter=interrupted_at_the_first_step)
    )
    study = tmp_path / "cost.toml"
    study.write_text(COST_STUDY)
    assert main(["reproduce", str(study), "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err.rstrip().endswith("stopped; run the same command again to continue")
    assert not (tmp_path / "out" / "results.jsonl").exists()


def test_own_data_that_is_not_there_cannot_be_made_up(tmp_path, capsys):
    study = tmp_path / "cost.toml"
    study.write_text(COST_STUDY.replace('"cifar100"', '"table"'))
    assert main(["reproduce", str(study), "--estimate"]) == 2
    assert "table is your own data" in capsys.readouterr().err


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


def test_without_a_name_the_studies_are_listed(capsys):
    assert main(["reproduce", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {(one["name"], one["scale"]) for one in listed} >= {("sigma-sweep", "paper"), ("finetune", "cpu")}


HEADS = """
title = "Heads"
question = "Are the weights here?"
rows = ["data"]
columns = ["method"]

[recipe]
data = "digits"
model = "mlp"
epsilon = 8.0
steps = 4
batch_size = 64

[axes.data]
"digits" = {}
"photographs" = { data = "image-folder", data_folder = ".", model = "vit-tiny", model_options = { pretrained = "nowhere" } }

[axes.method]
"DP-SGD" = { method = "dp-sgd" }
"DP-Adam" = { method = "dp-adam" }
"""


def test_missing_weights_are_named_before_anything_runs_and_other_cells_are_left(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DP_MICROADAM_DATA", str(tmp_path / "data"))
    (tmp_path / "heads.toml").write_text(HEADS)
    assert main(["reproduce", "heads.toml", "--only", "data=photographs", "--out", "out"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("dp-microadam: pretrained is 'nowhere', which was not found: put its weights into ")
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()

    study = load_study("heads.toml")
    missing = study.missing_files()
    assert [len(cells) for cells in missing.values()] == [2]
    assert [cell.labels["data"] for cell in study.without(missing).cells] == ["digits", "digits"]
    (tmp_path / "data" / "nowhere").mkdir(parents=True)
    (tmp_path / "data" / "nowhere" / "weights.safetensors").touch()
    assert not study.missing_files()
