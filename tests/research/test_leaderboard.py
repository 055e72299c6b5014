"""The leaderboard: which runs it takes, that they are paired and of committed code, and what its tables say of them."""

import json

import pytest
import torch
from research.__main__ import main
from research.leaderboard import runs, tables
from research.leaderboard.problems import PROBLEMS, Problem
from research.leaderboard.runs import Entrant, Run, runs_of
from scipy import stats

from dp_microadam.errors import InputError

SEEDS = range(1, 6)


def test_a_difference_has_the_interval_of_the_paired_t_test_and_is_certain_where_it_excludes_zero():
    ours, theirs = [84.0, 85.0, 83.5, 84.4, 84.1], [83.0, 84.6, 83.6, 83.5, 83.9]
    found = tables.Difference.of(ours, theirs)
    low, high = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))
    assert found.certain == (low > 0 or high < 0)
    assert tables.Difference.of([2.0, 3.0], [1.0, 2.0]).certain


def test_a_grid_is_run_with_one_seed_and_only_the_papers_and_the_best_rate_with_all(monkeypatch):
    monkeypatch.setitem(runs.ENTRANTS, "rival", Entrant("Rival", None, (4.0, 1.0, 8.0)))
    known = {}
    taken = []
    for run in runs_of("adult", 3.0, "rival", known):
        taken.append((run.rate, run.seed))
        known[run] = 70 - abs(run.rate - 15)  # 8 is the best of the grid, and 16 is better
    assert taken[:5] == [(4.0, 1), (1.0, 1), (8.0, 1), (16.0, 1), (32.0, 1)]
    assert taken[5:] == [(rate, seed) for rate in (4.0, 16.0) for seed in SEEDS if seed > 1]
    assert not list(runs_of("adult", 3.0, "rival", known))


def board(monkeypatch, tmp_path):
    """Ours at 84, a rival one point behind at its paper's rate and two ahead at the best, level in no row."""
    monkeypatch.setattr(runs, "ENTRANTS", chosen := {
        "default": Entrant("default", None), "rival": Entrant("Rival", None, (4.0, 1.0, 0.25)),
    })  # fmt: skip
    monkeypatch.setattr(tables, "ENTRANTS", chosen)
    lines = []
    for seed in SEEDS:
        rates = [("default", None, 84.0), ("rival", 4.0, 83.0 + 0.1 * seed), ("rival", 1.0, 86.0), ("rival", 0.25, 70.0)]
        for entrant, rate, accuracy in rates[: 3 if seed > 1 else None]:
            lines.append({**vars(Run("adult", 3.0, entrant, rate, seed)), "accuracy": accuracy, "date": "d", "machine": "m"})
    (tmp_path / "adult.jsonl").write_text("".join(json.dumps(line | {"commit": "abc1234"}) + "\n" for line in lines))
    return tables.Leaderboard(tmp_path)


def test_the_table_has_the_rate_of_the_paper_and_that_of_the_oracle_and_says_where_ours_is_behind(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    shown = board(monkeypatch, tmp_path)
    row = tables.table(shown).splitlines()[2]
    assert row == "| Adult census, 195 steps | 3 | 84.0 | 83.3<br>**+0.7 ± 0.2** | 86.0 at 1<br>**−2.00 ± 0.00** |  |"
    paper, oracle = tables.verdicts(shown).splitlines()[2:]
    assert paper == "| Rival, paper | 1 | 0 | 0 | +0.7 |  |"
    assert oracle == "| Rival, oracle | 0 | 0 | 1 | −2.0 | Adult census, 195 steps, ε = 3: −2.00 ± 0.00 |"
    tables.draw(shown, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.fixture
def tiny(monkeypatch):
    inputs = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    parts = ((inputs, (inputs[:, 0] > 0).long()),) * 2
    problem = Problem("Tiny", lambda: parts, lambda _: torch.nn.Linear(4, 2), 3, 20, (3.0,))
    monkeypatch.setitem(PROBLEMS, "adult", problem)


def test_runs_of_equal_seeds_begin_alike_and_draw_the_same_batches(tiny):
    run = Run("adult", 3.0, "dp-sgd", 4.0, 1)
    assert runs.trained(run) == runs.trained(run)
    still = [runs.trained(Run("adult", 3.0, name, 1e-9, 1))[1]["last_weights"] for name in ("dp-sgd", "dp-adam")]
    assert still[0] == still[1], "the initial weights"


@pytest.mark.slow
def test_opacus_runs_on_the_same_problem(tiny):
    pytest.importorskip("opacus")
    assert 0 <= runs.trained(Run("adult", 3.0, "opacus", None, 1))[0] <= 100


def test_what_was_run_is_not_run_again_and_lines_say_where_they_come_from(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "clean_commit", lambda: "abc1234")
    command = ["leaderboard", "--problems", "adult", "--entrants", "dp-walk", "--epsilons", "3", "--out", str(tmp_path)]
    assert main(command) == 0
    lines = [json.loads(line) for line in (tmp_path / "adult.jsonl").read_text().splitlines()]
    assert {(line["rate"], line["seed"]) for line in lines} == {(rate, seed) for rate in (0.75, 1.5, 3.0) for seed in SEEDS}
    assert all(line["commit"] == "abc1234" and line["machine"] and line["command"] for line in lines)
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().out == ""


def test_uncommitted_code_is_refused(monkeypatch):
    monkeypatch.setattr(runs, "_git", lambda folder, *words: " M noise.py" if words[0] == "status" else "abc1234")
    with pytest.raises(InputError, match="has changes that are not committed"):
        runs.clean_commit()


def test_an_unknown_method_is_refused(capsys):
    assert main(["leaderboard", "--entrants", "sgd"]) == 2
    assert "entrants is 'sgd'" in capsys.readouterr().err
