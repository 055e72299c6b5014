"""What README, docs and research notes show of results is what is kept in ``results/``."""

import json
import re
import statistics
import subprocess
from pathlib import Path

import pytest
from research.commands.pages import ROOT, pages, refreshed
from research.experiments.report import Sweep
from research.experiments.study import load_study
from research.leaderboard.runs import DEFAULT, SEEDS
from research.leaderboard.tables import ORACLE, Difference, Leaderboard, columns
from scipy.stats import t

FOLDERS = sorted(path.parent for path in (ROOT / "results").glob("*/experiment.json"))
FILES = sorted(path for path in (ROOT / "results").glob("*/*.json*") if path.name != "experiment.json")


def test_the_pages_with_results_are_known():
    assert {page.name for page in pages()} >= {"results.md"}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_shows_the_numbers_of_the_results(page):
    assert refreshed(page) == page.read_text(encoding="utf-8"), "run python -m research pages"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(Path(file.parent.name, file.name)))
def test_every_result_names_a_committed_state_of_the_code_a_day_and_a_machine(file):
    text = file.read_text(encoding="utf-8")
    for line in map(json.loads, text.splitlines() if file.suffix == ".jsonl" else [text]):
        assert re.fullmatch(r"[0-9a-f]{7,}", line["commit"])
        assert line["date"]
        assert line["machine"]


def test_the_leaderboard_has_five_paired_seeds_wherever_it_says_a_mean_and_commits_that_are_in_the_history():
    assert SEEDS >= 5
    board = Leaderboard(ROOT / "results" / "leaderboard")
    for problem, epsilon in board.rows():
        for _, entrant, kind in columns():
            found, _ = board.rival(problem, epsilon, entrant, kind)
            assert len(found) in (0, SEEDS)
    if not (ROOT / ".git").exists():
        pytest.skip("no history here")
    for commit in {line["commit"] for line in board.lines.values()}:
        subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, check=True)


PARTS = {"head": "head, features", "biases": "biases and", "lora": "LoRA of", "all": "all weights"}


@pytest.mark.parametrize("task", ["CIFAR-10", "IMDB"])
def test_the_table_of_parts_has_the_accuracies_that_were_measured(task):
    page = (ROOT / "research" / "results.md").read_text("utf-8")
    rows = page.split(f"| {task}, trained |")[1].split("\n\n")[0].splitlines()
    runs = [
        run
        for file in (ROOT / "results" / "parts").glob(f"{task.replace('-', '').lower()}_*.json")
        if "distance_1.5" not in file.stem
        for run in json.loads(file.read_text("utf-8"))["results"]["runs"]
    ]
    for part, beginning in PARTS.items():
        [row] = [one.replace("*", "").split(" | ") for one in rows if one.startswith(f"| {beginning}")]
        own = sorted((one for one in runs if one["part"] == part), key=lambda one: one["epsilon"])
        assert row[1] == f"{own[0]['trained_parameters']:,}"
        assert row[2:5] == [f"{100 * one['accuracy']:.1f}" for one in own]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_results_of_a_study_are_of_its_cells(folder):
    kept = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
    study = load_study(folder.name, kept["scale"])
    assert kept == study.describe(kept["command"])
    assert {key for key, _ in Sweep.read(folder).outcomes} <= {frozenset(cell.labels.items()) for cell in study.cells}


def test_readme_says_of_digits_and_of_tuned_rivals_what_the_leaderboard_says():
    board = Leaderboard(ROOT / "results" / "leaderboard")
    page = (ROOT / "README.md").read_text("utf-8")
    ours, opacus = (statistics.mean(board.accuracies("digits", 3.0, name, None)) for name in (DEFAULT, "opacus"))
    assert f"| Digits, CNN, 195 steps, ε = 3 | {ours:.1f} % | {opacus:.1f} % (Adam) |" in page
    behind = [
        Difference.of(rival, board.default(*row)).mean
        for row in board.rows()
        for entrant in ("dp-sgd", "dp-adam")
        if (rival := board.rival(*row, entrant, ORACLE)[0])
    ]
    assert f"and up to {max(behind):.1f} points more" in page


def test_the_page_on_performance_has_the_times_of_lora_and_gpt_2_that_were_measured():
    page = (ROOT / "research" / "performance.md").read_text("utf-8")

    def measured(name, folder="lora"):
        lines = json.loads((ROOT / "results" / folder / f"{name}.json").read_text("utf-8"))["results"]
        return {line["method"]: line for line in lines}

    text, vit, fast, slow = map(measured, ("text", "vit", "text_avx512", "text_avx2"))
    titles = {"ours": "ours", "opacus hooks": "Opacus hooks"}
    for table, found in (("| | time | memory |", text), ("ViT-Tiny at 224×224, rank 8", vit)):
        rows = page.split("### LoRA")[1].split(table)[1]
        for method, title in titles.items():
            assert f"| {title} | {found[method]['processor_ratio']:.2f}× | {found[method]['peak_ratio']:.2f}× |" in rows
    ours, ordinary = ([f"{one[method]['processor_seconds']:.2f}" for one in (fast, slow)] for method in ("ours", "non-private"))
    assert (
        f"took {ours[0]}\ninstead of {ours[1]} seconds for a batch of 8, ordinary ones {' instead of '.join(ordinary)}" in page
    )
    ratio = measured("gpt-2", "clipping")["ours"]["processor_ratio"]
    assert f"takes {ratio:.2f}× the processor time of ordinary gradients" in page


def test_readme_says_of_leaks_what_was_measured():
    page = " ".join((ROOT / "README.md").read_text("utf-8").split())
    runs = json.loads((ROOT / "results" / "leak" / "leak.json").read_text("utf-8"))["results"]
    told = {}
    for name in ("without privacy", "with privacy"):
        own = [run for run in runs if run["model"] == name]
        found = [100 * run["found"][1] for run in own]
        half = statistics.stdev(found) / len(own) ** 0.5 * float(t.ppf(0.975, len(own) - 1))
        told[name] = f"{statistics.mean(found):.0f} ± {half:.0f}", f"{statistics.mean(run['accuracy'] for run in own):.1f}"
        assert len(own) == 10
    assert told["without privacy"][0] == "100 ± 0"
    assert f"With ε = 8 it gives away {told['with privacy'][0]} if every tenth innocent" in page
    assert f"from {told['without privacy'][1]} to {told['with privacy'][1]} %" in page


@pytest.mark.parametrize(
    ("title", "model", "batch"),
    [
        ("WRN-16-4, weight standardization, batch 64", "wrn-16-4 ws", 64),
        ("ViT-Tiny at 224×224, batch 32", "vit-tiny", 32),
        ("CNN of 26,010 parameters, batch 16", "tanh cnn", 16),
    ],
)
def test_readme_says_of_clipping_what_was_measured(title, model, batch):
    lines = json.loads((ROOT / "results" / "clipping" / "beside_opacus.json").read_text("utf-8"))["results"]
    rows = {line["method"]: line for line in lines if (line["model"], line["batch"]) == (model, batch)}
    rivals = [row for name, row in rows.items() if name.startswith("opacus")]
    assert len(rivals) == 3
    ours, theirs = (
        ", ".join(f"{min(row[kind] for row in part):.2f}×" for kind in ("processor_ratio", "peak_ratio"))
        for part in ([rows["ours"]], rivals)
    )
    assert f"| {title} | {ours} | {theirs} |" in (ROOT / "README.md").read_text("utf-8")
