"""Benchmarks run at the smallest sizes and write files that can be sent."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

COMMANDS = {
    "clipping": ["--models", "tanh cnn", "--methods", "ours", "--batches", "2", "--rounds", "1", "--peak-repeats", "1"],
    "clipping --layers": ["--layers", "--batches", "1", "--rounds", "1"],
    "training_step": ["--batch", "8", "--physical-batch", "4", "--steps", "1"],
    "privacy_overhead": [],
    "small_step": ["--batches", "2", "--rounds", "1"],
    "advise": ["--data", "digits", "--batches", "64", "--examples", "256"],
    "bands": ["--batch", "2", "--physical-batch", "1", "--bands", "2", "--rounds", "1"],
    "independence_check": [],
    "augmentation": ["--batch", "2", "--rounds", "1"],
    "diagnostics": ["--model", "mlp", "--every", "2", "--rounds", "1", "--batch-size", "2"],
    "method_cost": [
        "--physical-batch",
        "2",
        "--batch",
        "4",
        "--rounds",
        "1",
        "--methods",
        "AdamW, not private",
        "DP-MicroAdam",
    ],
    "book_crossing": ["--readers", "40", "--batch", "8", "--steps", "2", "--epsilons", "1", "--seeds", "1", "--most", "4"],
    "methods": ["--state", "--methods", "dp-microadam"],
    "users": ["--models", "mlp", "--users", "4", "--most", "2", "--physical-batch", "4", "--rounds", "1"],
    "optimizer": ["--models", "wrn-16-4", "--rounds", "1", "--optimizers", "AdamW foreach", "AdamW fused", "MicroAdam"],
    "frozen_features": ["made-up", "--examples", "128", "16"],
    "finetune_parts": ["made-up", "--examples", "64", "16", "--epsilons", "8", "--steps", "2", "--batch", "8"],
    "distributed": ["--batch", "2", "--physical-batch", "2", "--steps", "1", "--rounds", "1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_runs_and_writes_a_file_that_can_be_sent(name, tmp_path):
    file = tmp_path / "measured.json"
    script = BENCHMARKS / f"{name.split()[0]}.py"
    command = [sys.executable, str(script), *COMMANDS[name], "--device", "cpu", "--out", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.strip(), "it must say what it measures while it does"
    text = file.read_text(encoding="utf-8")
    found = json.loads(text)
    assert found["device"] == "cpu"
    assert found["torch"] == torch.__version__
    assert found["results"]
    for private in (str(tmp_path), str(BENCHMARKS.parent), str(Path.home()), platform.node()):
        assert len(private) <= 1 or private not in text


def test_every_benchmark_that_times_torch_is_among_them():
    """Clocks are read by the shared functions, which wait for the device."""
    without_device = {"pld_error", "against_commit", "kernel_resources", "opacus_adam", "leak"}
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")}
    assert scripts - without_device == {name.split()[0] for name in COMMANDS}
    for name in scripts - without_device:
        assert "perf_counter" not in (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8")
