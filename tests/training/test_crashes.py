"""A real training process is killed at random moments, and resumed."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from dp_microadam.privacy.ledger import read_ledger
from dp_microadam.training.checkpoint import CheckpointFolder

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
    for _ in range(kills):
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
        process = start(["resume", str(run)])
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return run, output


def check_end_state(run, output):
    record = read_ledger(run)
    assert record.steps == STEPS
    summary = json.loads((run / "privacy.json").read_text())
    assert summary["steps_done"] == STEPS
    assert summary["epsilon"] == pytest.approx(record.plan.epsilon)
    position, content, _ = CheckpointFolder(run / "checkpoints").newest()
    assert position == STEPS
    assert 0 < content["updates"] <= STEPS
    assert "test accuracy" in output
    assert "ε = " in output.splitlines()[-1]


def test_a_run_killed_three_times_resumes_and_counts_every_step(tmp_path):
    run, output = kill_and_resume(tmp_path, kills=3, seed=os.getpid())
    check_end_state(run, output)


@pytest.mark.slow
def test_a_run_killed_twenty_times_resumes_and_counts_every_step(tmp_path):
    for batch in range(4):
        folder = tmp_path / str(batch)
        folder.mkdir()
        run, output = kill_and_resume(folder, kills=5, seed=1000 + batch)
        check_end_state(run, output)


def test_ctrl_c_writes_a_checkpoint_and_says_how_to_resume(tmp_path):
    recipe, run = tmp_path / "crash.toml", tmp_path / "run"
    recipe.write_text(
        RECIPE.replace("checkpoint_every = 7", "checkpoint_every = 1000").replace(f"steps = {STEPS}", "steps = 100000")
    )
    process = start(["train", str(recipe), "--run-dir", str(run)])
    wait_for_step(process, run, 9)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"stopped after {read_ledger(run).steps} steps; go on with: dp-microadam resume {run}" in output
    position, _, _ = CheckpointFolder(run / "checkpoints").newest()
    assert position == read_ledger(run).steps >= 9


def test_a_second_process_on_the_same_run_is_refused(tmp_path):
    recipe, run = tmp_path / "crash.toml", tmp_path / "run"
    recipe.write_text(RECIPE.replace(f"steps = {STEPS}", "steps = 100000"))
    process = start(["train", str(recipe), "--run-dir", str(run)])
    try:
        wait_for_step(process, run, 3)
        second = start(["resume", str(run)])
        _, errors = second.communicate(timeout=60)
        assert second.returncode == 1
        assert "in use by another process" in errors
        assert "Traceback" not in errors
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
