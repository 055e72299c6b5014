"""The tables in docs/results.md are those of the results kept in results/, which later runs add to."""

from pathlib import Path

import pytest

from dp_microadam.experiments.study import load_study
from dp_microadam.reporting.sweep import Sweep
from dp_microadam.reporting.sweep_tables import sweep_tables

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(path.parent for path in (ROOT / "results").glob("*/results.jsonl"))


def test_there_are_results():
    assert {folder.name for folder in FOLDERS} >= {"sigma-sweep", "variants", "map"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_page_shows_the_table_of_the_results(folder):
    table = sweep_tables(Sweep.read(folder))[0].markdown()
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for line in table.splitlines():
        if line.startswith("|") and "not run | not run | not run" not in line:
            assert line in page, f"{folder.name}: the page lacks {line}"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_results_are_of_cells_that_the_study_has_and_say_where_they_come_from(folder):
    sweep = Sweep.read(folder)
    cells = [cell.labels for cell in load_study(folder.name, "cpu").cells]
    assert list(map(dict, sweep.cells)) == cells
    for outcome in sweep.outcomes:
        assert dict(outcome.cell) in cells
        assert outcome.date
        assert outcome.machine
        assert outcome.commit
