"""Studies of searches: each can be made, and what they publish is collected."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from research.__main__ import main
from research.experiments.study import load_study

from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.plan.selection_plan import SelectionPlan
from dp_microadam.workbench.recipes.tuning import refuse_unsearchable


def test_every_search_of_the_study_of_tuning_can_be_made():
    cells = load_study("tuning", "cpu").cells
    searches = [cell for cell in cells if cell.labels["hyperparameters"] == "tuned"]
    assert len(cells) == 48
    for cell in searches:
        refuse_unsearchable(cell.recipe)
        assert len({cell.key, replace(cell, recipe=replace(cell.recipe, tune={})).key}) == 2
    assert not any(cell.recipe.tune for cell in cells if cell not in searches)


@pytest.mark.slow
def test_a_study_runs_searches_and_collects_what_they_publish(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study = tmp_path / "digits.toml"
    study.write_text(
        'title = "t"\nquestion = "q"\nrows = ["hyperparameters"]\ncolumns = ["method"]\n[recipe]\ndata = "digits"\n'
        'model = "mlp"\n'
        'epsilon = 8.0\nsteps = 3\nbatch_size = 32\n[axes.method]\n"DP-SGD" = { method = "dp-sgd" }\n[axes.hyperparameters]\n'
        '"tuned" = { tune = { expected_runs = 2, learning_rate = [1.0, 4.0] } }\n"defaults" = {}\n'
    )
    assert main(["reproduce", str(study), "--out", "out"]) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in Path("out/results.jsonl").read_text().splitlines()]
    tuned, single = sorted(lines, key=lambda line: line["cell"]["hyperparameters"], reverse=True)
    plans = [read_ledger(Path("out") / line["folder"]).plan for line in (tuned, single)]
    assert [isinstance(plan, SelectionPlan) for plan in plans] == [True, False]
    assert plans[0].noise_multiplier > plans[1].noise_multiplier
    assert all(line["private"] and line["epsilon"] <= 8.0 for line in lines)
