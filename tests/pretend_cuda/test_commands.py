"""The commands that research/gpu.md gives to people with a GPU, run unchanged on a machine that pretends to have two."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from pretend_cuda import build
from pretend_cuda.start import SOURCES, TESTS, environment_of

BENCHMARKS = TESTS.parent / "benchmarks"
GPU = "pretend GPU"

SMALLEST = {
    "clipping": ["--models", "tanh cnn", "--methods", "ours", "--batches", "2", "--rounds", "1", "--peak-repeats", "1"],
    "clipping --layers": ["--layers", "--batches", "1", "--rounds", "1"],
    "diagnostics": ["--model", "mlp", "--every", "2", "--rounds", "1", "--batch-size", "2"],
    "optimizer": ["--models", "wrn-16-4", "--rounds", "1", "--optimizers", "AdamW foreach", "MicroAdam"],
}
"""Benchmarks, and what makes them short. ``distributed`` needs NCCL; the others time parts of these, or larger networks."""


def on_two_gpus(*command: str, folder: Path, **settings: str) -> str:
    """What a command prints that finds the pretend device, in its own process and in those it starts."""
    try:
        build.library()
    except build.CannotBuild as reason:
        pytest.skip(str(reason))
    environment = environment_of(TESTS / "pretend_cuda" / "everywhere", SOURCES) | settings
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def sent(file: Path) -> dict:
    """The content of a file that can be sent: it names no host, user or folder."""
    text = file.read_text("utf-8")
    for private in (str(file.parent), str(TESTS.parent), str(Path.home()), platform.node()):
        assert len(private) <= 1 or private not in text
    return json.loads(text)


@pytest.mark.slow
def test_doctor_says_which_strategy_is_the_fastest_on_each_gpu(tmp_path):
    command = ("-m", "dp_microadam", "doctor", "--seconds", "1", "--batch", "1", "--out", "doctor.json")
    said = on_two_gpus(*command, folder=tmp_path)
    found = sent(tmp_path / "doctor.json")
    assert found["gpu"]["name"] == GPU
    results = found["results"]
    assert [check["device"] for check in results["self_check"]] == ["cpu", "cuda:0", "cuda:1"]
    assert results["exact"]
    assert results["strategies"].keys() == {"cuda:0", "cuda:1"}
    for device, measured in results["strategies"].items():
        assert f"{device}: the chosen strategy is the fastest for" in said
        for layer in measured["layers"]:
            assert layer["fastest"] in layer["allowed"]
            assert all(taken > 0 for taken in layer["milliseconds"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs_on_a_gpu_and_writes_a_file_that_can_be_sent(name, tmp_path):
    script = str(BENCHMARKS / f"{name.split()[0]}.py")
    on_two_gpus(script, *SMALLEST[name], "--out", "measured.json", folder=tmp_path)
    found = sent(tmp_path / "measured.json")
    assert found["device"] == "cuda", "the default where there is a GPU"
    assert found["gpu"]["name"] == GPU
    assert found["results"]


@pytest.mark.slow
def test_the_battery_runs_on_the_device_that_is_named(tmp_path):
    """The path for a real device: no pretend device of its own, its random numbers are not the CPU's, TF32 is turned off."""
    cases = {"clipping": ("transformer",), "training": ("tensors", "views", "resumed")}
    for group, names in cases.items():
        said = on_two_gpus("-m", "pretend_cuda.run", group, *names, folder=TESTS, DP_MICROADAM_DEVICE="cuda:1")
        found = [json.loads(line) for line in said.splitlines() if line.startswith('{"case"')]
        assert [one["case"] for one in found] == list(names)
        assert not any(one["error"] for one in found)
    battery = str(TESTS / "pretend_cuda" / "test_battery.py")
    chosen = ("-p", "no:cacheprovider", "-m", "", "-k", "privacy")
    said = on_two_gpus("-m", "pytest", "-q", *chosen, battery, folder=TESTS.parent, DP_MICROADAM_DEVICE="cuda")
    assert "1 passed" in said
