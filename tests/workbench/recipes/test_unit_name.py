"""The unit of a run has a name, such as patient: statement, card, report and the last line of a run use it."""

import json

import pytest

from dp_microadam.workbench.command_line.cli import main


@pytest.fixture
def recipe(tmp_path):
    """A recipe for a table with one row of each patient."""
    (tmp_path / "patients.csv").write_text("x,patient,label\n" + "".join(f"{n % 7 / 7},p{n},{n % 2}\n" for n in range(60)))
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f'data = "table"\ndata_folder = "{tmp_path}/patients.csv"\nmodel = "mlp"\nepsilon = 7.0\nsteps = 3\nbatch_size = 8\n'
        'delta = 0.01\nunit_name = "patient"\n[data_options]\nclasses = 2\nuser_column = "patient"\n'
    )
    return recipe


def test_statement_card_and_report_say_what_the_unit_is_called(recipe, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", str(recipe), "--set", "model_options.hidden=2000", "--quiet", "--run-dir", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "ε = 7.00 for a patient at δ = 0.01" in shown
    assert "parameters hardly learn then: more patients, a larger ε" in shown
    statement = (run / "privacy.txt").read_text()
    for words in (
        "differentially private for one patient (one training example each):",
        "7.00 at δ = 0.01, for a patient, for the steps done",
    ):
        assert words in statement, words
    assert main(["export", str(run), "--output", str(tmp_path / "exported"), "--group-size", "2"]) == 0
    card = next((tmp_path / "exported").glob("*.md")).read_text()
    assert "one patient (one training example each)" in card
    assert "up to 2 patients together: ε = " in card
    assert json.loads((tmp_path / "exported" / "privacy.json").read_text())["group_size"] == 2
    assert main(["report", str(run), "--page-only", "--group-size", "2"]) == 0
    page = (run / "report.html").read_text()
    assert "for a patient, at δ = 0.01" in page
    assert "43 patients" in page
    assert "up to 2 patients together: ε = " in page
    assert main(["export", str(run), "--output", str(tmp_path / "other"), "--group-size", "0"]) == 2
    assert not (tmp_path / "other").exists()


def test_a_name_is_refused_for_examples_of_which_somebody_has_several(recipe, tmp_path, capsys):
    (tmp_path / "patients.csv").write_text("x,patient,label\n" + "".join(f"{n % 7 / 7},p{n // 2},{n % 2}\n" for n in range(60)))
    assert main(["train", str(recipe), "--run-dir", str(tmp_path / "run")]) == 2
    assert "some have several examples; set unit = 'user' and examples_per_user" in capsys.readouterr().err
    users = ["--set", "unit=user", "--set", "examples_per_user=2", "--quiet"]
    assert main(["train", str(recipe), *users, "--run-dir", str(tmp_path / "run")]) == 0
    assert "for a patient with all their examples at δ" in capsys.readouterr().out
    statement = (tmp_path / "run" / "privacy.txt").read_text()
    assert "one patient with all their training examples" in statement
    assert "user" not in statement
