"""docs/results.md shows what is kept in results/, which later runs add to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from research.experiments.results import Sweep
from research.experiments.study import load_study

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(path.parent for path in (ROOT / "results").glob("*/results.jsonl"))


def test_there_are_results():
    assert {folder.name for folder in FOLDERS} >= {"sigma-sweep", "variants", "map"}


def test_the_page_shows_the_tables_of_the_results():
    script = ROOT / "benchmarks" / "results_page.py"
    assert subprocess.run([sys.executable, str(script), "--check"]).returncode == 0, "run python benchmarks/results_page.py"


def test_results_that_are_kept_count_as_done():
    """Keys that recipes are given later must not make a study run again what it has run."""
    for folder in FOLDERS:
        if folder.name in ("finetune", "runtime"):  # weights of one's own are part of the recipe; times have no recipe
            continue
        keys = {cell.key for cell in load_study(folder.name, "cpu").cells}
        lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
        assert {json.loads(line)["run"] for line in lines} <= keys


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_results_are_on_the_page_and_say_where_they_come_from(folder):
    assert f"<!-- results {folder.name} -->" in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    sweep = Sweep.read(folder)
    scale = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))["scale"]
    cells = [cell.labels for cell in load_study(folder.name, scale).cells]
    assert list(map(dict, sweep.cells)) == cells
    for outcome in sweep.outcomes:
        assert dict(outcome.cell) in cells
        assert outcome.date
        assert outcome.machine
        assert outcome.commit
