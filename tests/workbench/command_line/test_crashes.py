"""A real training process is killed at random moments, and resumed."""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.training.checkpoint import CheckpointFolder
from dp_microadam.workbench.command_line.cli import main

STEPS = 60
COMMAND = [sys.executable, "-m", "dp_microadam"]
RECIPE = f"""
name = "crash"
data = "digits"
model = "mlp"
noise_multiplier = 1.0
steps = {STEPS}
batch_size = 64
checkpoint_every = 7
evaluate_every = 50
"""


def start(arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def recorded_steps(run):
    ledger = run / "ledger.jsonl"
    return max(0, len(ledger.read_bytes().splitlines()) - 1) if ledger.exists() else -1


def wait_for_step(process, run, step):
    while recorded_steps(run) < step and process.poll() is None:
        time.sleep(0.002)


def kill_and_resume(tmp_path, kills, seed):
    """Kill a run ``kills`` times at random moments and finish it; returns its folder and the last output."""
    chance = random.Random(seed)
    recipe, run = tmp_path / "crash.toml", tmp_path / "run"
    recipe.write_text(RECIPE)
    process = start(["train", str(recipe), "--run-dir", str(run)])
    spent = 0
    for kill in range(1, kills + 1):
        wait_for_step(process, run, min(STEPS - 1, spent + chance.randrange(1, 12)))
        time.sleep(chance.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        after = read_ledger(run).steps
        checkpoints = CheckpointFolder(run / "checkpoints")
        position, _, damaged = checkpoints.newest()
        assert not damaged, "a killed process must never leave a damaged checkpoint under its final name"
        assert position <= after, "a checkpoint must never be ahead of the ledger"
        # A process that resumed at ``spent`` may die before its first checkpoint; what the one before it lost stays lost.
        assert after - max(position, spent) <= 8, "nothing is lost but the steps since the last checkpoint"
        assert after >= spent, "spent budget must never shrink"
        spent = after
        if kill < kills:
            process = start(["resume", str(run)])
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["resume", str(run)]) == 0
    return run, output.getvalue()


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_run_resumes_and_counts_every_step(tmp_path, kills):
    run, output = kill_and_resume(tmp_path, kills, seed=os.getpid())
    record = read_ledger(run)
    assert record.steps == STEPS
    summary = json.loads((run / "privacy.json").read_text())
    assert summary["steps_done"] == STEPS
    assert summary["epsilon"] == pytest.approx(record.plan.epsilon)
    position, content, _ = CheckpointFolder(run / "checkpoints").newest()
    assert position == STEPS
    assert 0 < content["updates"] <= STEPS
    assert "test accuracy" in output
    assert "ε = " in output


def test_ctrl_c_writes_a_checkpoint_and_says_how_to_resume(tmp_path):
    recipe, run = tmp_path / "crash.toml", tmp_path / "run"
    recipe.write_text(
        RECIPE.replace("checkpoint_every = 7", "checkpoint_every = 1000").replace(f"steps = {STEPS}", "steps = 100000")
    )
    process = start(["train", str(recipe), "--run-dir", str(run)])
    wait_for_step(process, run, 9)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "evaluating these weights on the test part; press Ctrl-C to leave that out" in errors
    assert f"stopped after {read_ledger(run).steps} steps; go on with: dp-microadam resume {run}" in output
    position, _, _ = CheckpointFolder(run / "checkpoints").newest()
    assert position == read_ledger(run).steps >= 9


@pytest.mark.slow
def test_a_second_process_on_the_same_run_is_refused(tmp_path, capsys):
    recipe, run = tmp_path / "crash.toml", tmp_path / "run"
    recipe.write_text(RECIPE.replace(f"steps = {STEPS}", "steps = 100000"))
    process = start(["train", str(recipe), "--run-dir", str(run)])
    try:
        wait_for_step(process, run, 3)
        assert main(["resume", str(run)]) == 1
        errors = capsys.readouterr().err
        assert "in use by another process" in errors
        assert "Traceback" not in errors
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


# Trains, and is killed by the system when it is about to write a file of the run's folder that has this name.
KILLED_AT = """
import os, signal, sys
from dp_microadam.workbench.command_line.cli import main
from dp_microadam import durable_files
from dp_microadam.training import checkpoint

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def write(path, real=durable_files.write_durably, **options):
    return die() if path.name == sys.argv[1] else real(path, **options)

durable_files.write_durably = write
if sys.argv[1] == "the first checkpoint":
    checkpoint.CheckpointFolder.write = die
if sys.argv[1] == "the ledger":
    os.link = die
main(sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["config.toml", "the first checkpoint", "the ledger", "privacy.json", "run.json"])
def test_a_run_killed_before_its_first_checkpoint_is_begun_again_in_its_folder(tmp_path, capsys, moment):
    recipe, run = tmp_path / "crash.toml", tmp_path / "run"
    recipe.write_text(RECIPE.replace(f"steps = {STEPS}", "steps = 3"))
    train = ["train", str(recipe), "--run-dir", str(run)]
    killed = subprocess.run([sys.executable, "-c", KILLED_AT, moment, *train], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert any(run.iterdir())
    configured = moment not in ("the ledger", "config.toml")
    assert (run / "config.toml").is_file() == configured
    if not configured:
        assert main(["resume", str(run)]) == 2
        errors = capsys.readouterr().err
        assert (
            "killed before its configuration was written; nothing was trained and no privacy was spent: start it again"
            in errors
        )
        assert f"dp-microadam train RECIPE --run-dir {run}" in errors
    assert main(["resume", str(run)] if configured else train) == 0
    assert "test accuracy" in capsys.readouterr().out
    assert read_ledger(run).steps == 3
    assert CheckpointFolder(run / "checkpoints").newest()[0] == 3


def test_a_folder_with_a_spent_step_is_not_begun_again(tmp_path, capsys):
    """Its checkpoints may be gone, and what it spent is still spent."""
    recipe, run = tmp_path / "crash.toml", tmp_path / "run"
    recipe.write_text(RECIPE.replace(f"steps = {STEPS}", "steps = 3"))
    train = ["train", str(recipe), "--run-dir", str(run)]
    assert main(train) == 0
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink(missing_ok=True)
    (run / "config.toml").unlink()
    content = (run / "ledger.jsonl").read_bytes()
    for arguments in (train, ["resume", str(run)]):
        assert main(arguments) == 2
        assert "no privacy was spent" not in capsys.readouterr().err
    assert (run / "ledger.jsonl").read_bytes() == content


def test_a_checkpoint_of_another_copy_of_the_run_is_refused(tmp_path, capsys):
    """The same run, copied, resumed twice and mixed up: weights beside a ledger that does not have their steps."""
    recipe, run, copy = tmp_path / "crash.toml", tmp_path / "run", tmp_path / "copy"
    recipe.write_text(RECIPE.replace(f"steps = {STEPS}", "steps = 12") + "max_steps = 5\n")
    assert main(["train", str(recipe), "--run-dir", str(run)]) == 0
    config = run / "config.toml"
    config.write_text(config.read_text().replace("max_steps = 5", "max_steps = 8"))
    shutil.copytree(run, copy)
    for folder in (run, copy):
        assert main(["resume", str(folder)]) == 0
    shutil.rmtree(copy / "checkpoints")
    shutil.copytree(run / "checkpoints", copy / "checkpoints")
    assert main(["resume", str(copy)]) == 1
    assert "stored in the checkpoint: it was rolled back, or belongs to another copy of the run" in capsys.readouterr().err
