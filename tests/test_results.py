"""What README, docs and research notes show of results is what is kept in ``results/``."""

import json
import re
from pathlib import Path

import pytest
from research.commands.pages import ROOT, pages, refreshed
from research.experiments.report import Sweep
from research.experiments.study import load_study

FOLDERS = sorted(path.parent for path in (ROOT / "results").glob("*/experiment.json"))
LINES = sorted((ROOT / "results").glob("*/*.jsonl"))


def test_the_pages_with_results_are_known():
    assert {page.name for page in pages()} >= {"results.md"}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_shows_the_numbers_of_the_results(page):
    assert refreshed(page) == page.read_text(encoding="utf-8"), "run python -m research pages"


@pytest.mark.parametrize("file", LINES, ids=lambda file: str(Path(file.parent.name, file.stem)))
def test_every_result_names_a_committed_state_of_the_code_a_day_and_a_machine(file):
    for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        assert re.fullmatch(r"[0-9a-f]{7,}", line["commit"])
        assert line["date"]
        assert line["machine"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_results_of_a_study_are_of_its_cells(folder):
    kept = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
    study = load_study(folder.name, kept["scale"])
    assert kept == study.describe(kept["command"])
    assert {key for key, _ in Sweep.read(folder).outcomes} <= {frozenset(cell.labels.items()) for cell in study.cells}
