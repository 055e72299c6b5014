"""Everything runs on a CUDA device as on the CPU; with ``DP_MICROADAM_DEVICE=cuda`` on a real one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pretend_cuda import build

TESTS = Path(__file__).parents[1]
CANNOT_BUILD = 77


def battery(*names):
    """The cases that failed with their tracebacks, by name, of a process that has the device."""
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pretend_cuda.battery", *names],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        cwd=TESTS,
        timeout=1500,
    )
    if done.returncode == CANNOT_BUILD:
        pytest.skip(done.stderr.strip())
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert found, done.stderr[-3000:]
    failed = {one["case"]: one["error"] for one in found if one["error"]}
    assert bool(failed) == bool(done.returncode), done.stderr[-3000:]
    return failed


def test_the_device_refuses_and_counts_as_a_gpu_would_and_noise_on_it_is_the_cpus():
    assert battery("watch", "mechanism: torch.float32, 1 bands") == {}


@pytest.mark.slow
def test_it_runs_on_the_device_as_on_the_cpu_and_a_step_waits_for_it_as_seldom_as_planned():
    assert battery() == {}


def test_without_a_compiler_there_is_a_sentence(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.CannotBuild, match="C\\+\\+ compiler"):
        build.library()
