"""Every example is short, explained and runs."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted([*FOLDER.glob("*.py"), *FOLDER.glob("tasks/*.py")])
NOT_TRAINED = ("custom_layer",)
# What the last percentage that an example prints exceeds: 70 where chance is 10 or 50 %, and less where the task is harder.
FLOORS = {"recommender": 14, "gan": 40, "diffusion": 50, "regression": 55, "autoencoder": 60}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_under_60_lines_and_listed(example):
    text = example.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    assert ast.get_docstring(ast.parse(text))
    assert f"]({example.relative_to(FOLDER)})" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_the_list_has_no_example_that_is_not_there():
    listed = re.findall(r"\]\(([\w/]+\.py)\)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(str(example.relative_to(FOLDER)) for example in EXAMPLES)


def run(example, folder):
    done = subprocess.run(
        [sys.executable, example],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_rule_of_the_example_is_exact(tmp_path):
    printed = run(FOLDER / "custom_layer.py", tmp_path)
    assert float(re.search(r"one by one: (\S+)", printed)[1]) < 1e-5
    assert re.search(r"PReLU +keep", printed)


@pytest.mark.slow
@pytest.mark.parametrize("example", [path for path in EXAMPLES if path.stem not in NOT_TRAINED], ids=lambda path: path.stem)
def test_an_example_learns_within_its_budget(example, tmp_path):
    printed = run(example, tmp_path)
    accuracies = [float(found) for found in re.findall(r"([\d.]+) ?%", printed)]
    epsilons = [float(found) for found in re.findall(r"ε = ([\d.]+)", printed)]
    assert accuracies[-1] > FLOORS.get(example.stem, 70)
    assert epsilons
    assert max(epsilons) <= 8.01  # Opacus aims at ε = 8 within 0.01
