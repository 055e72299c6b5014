"""Benchmarks run at the smallest sizes and write files that can be sent."""

import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]

COMMANDS = (
    "benchmarks/clipping.py --models 'tanh cnn' --methods ours --batches 2 --rounds 1 --peak-repeats 1",
    "benchmarks/clipping.py --layers --batches 1 --rounds 1",
    "benchmarks/step.py --batches 2 --rounds 1",
    "benchmarks/independence_check.py",
    "benchmarks/optimizer.py --models wrn-16-4 --rounds 1 --optimizers 'AdamW foreach' 'AdamW fused' MicroAdam",
    "benchmarks/distributed.py --batch 2 --physical-batch 2 --steps 1 --rounds 1",
    "-m research.measurements.finetune_parts made-up --examples 64 16 --epsilons 8 --steps 2 --batch 8",
)
OF_RESULTS = {"opacus_adam", "leak", "measuring", "strategy_times"}
"""Scripts that measure no time of torch, or call another script that does."""


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_benchmark_runs_and_writes_a_file_that_can_be_sent(command, tmp_path):
    file = tmp_path / "measured.json"
    script, *arguments = shlex.split(command)
    script = script if script == "-m" else str(ROOT / script)
    done = subprocess.run(
        [sys.executable, script, *arguments, "--device", "cpu", "--out", str(file)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.strip(), "it must say what it measures while it does"
    text = file.read_text(encoding="utf-8")
    found = json.loads(text)
    assert found["device"] == "cpu"
    assert found["torch"] == torch.__version__
    assert found["results"]
    for private in (str(tmp_path), str(ROOT), str(Path.home()), platform.node()):
        assert len(private) <= 1 or private not in text


def test_every_benchmark_is_among_them_and_reads_clocks_by_functions_that_wait_for_the_device():
    scripts = {path.stem: path for path in (ROOT / "benchmarks").glob("*.py")}
    assert scripts.keys() - OF_RESULTS == {Path(one.split()[0]).stem for one in COMMANDS if one.startswith("benchmarks/")}
    for name in scripts.keys() - OF_RESULTS:
        assert "perf_counter" not in scripts[name].read_text(encoding="utf-8")
