"""The Adult census data as it comes: one command, on the published files and on ones made like them."""

import json
import os
import random

import pytest

from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.data.adult import HEADER
from dp_microadam.workbench.recipes import load_recipe
from dp_microadam.workbench.recipes.assemble import load_data

REAL = os.environ.get("DP_MICROADAM_DATA", "")
EDUCATION = ("Preschool", "1st-4th", "5th-6th", "9th", "10th", "12th", "HS-grad", "Some-college", "Assoc-voc", "Bachelors")


def person(draw, columns):
    """A line as in adult.data. Who learned long or had gains has a high income."""
    cells = {}
    for name in HEADER[:-1]:
        declared = columns[name]
        if declared["kind"] == "category":
            cells[name] = "?" if "missing" in declared and draw.random() < 0.05 else draw.choice(declared["values"])
    cells["age"], cells["education-num"] = draw.randint(17, 90), draw.randint(1, 10)
    cells["education"], cells["fnlwgt"] = EDUCATION[cells["education-num"] - 1], draw.randint(12_285, 1_484_705)
    cells["capital-gain"], cells["capital-loss"] = draw.choice([0] * 9 + [99_999]), draw.choice([0] * 20 + [1902])
    cells["hours-per-week"] = draw.randint(1, 99)
    earns = cells["education-num"] > 6 or cells["capital-gain"] > 0
    return ", ".join(str(cells[name]) for name in HEADER[:-1]) + (", >50K" if earns else ", <=50K")


@pytest.fixture
def files(tmp_path):
    """adult.data and adult.test with their quirks: no header, spaces, ?, a remark, full stops, an empty last line."""
    draw, columns = random.Random(0), load_recipe("adult").columns
    people = [person(draw, columns) for _ in range(1500)]
    (tmp_path / "adult.data").write_text("\n".join(people[:1000]) + "\n\n")
    (tmp_path / "adult.test").write_text("|1x3 Cross validator\n" + "".join(f"{line}.\n" for line in people[1000:]) + "\n")
    return tmp_path


def test_one_command_trains_on_adult_as_it_comes(files, capsys):
    settings = [f"data_folder={files}", "verify_data=false", "epsilon=100", "batch_size=500", "steps=60"]
    settings += ["learning_rate=0.02", "method=dp-adam"]
    overrides = [part for setting in settings for part in ("--set", setting)]
    assert main(["train", "adult", *overrides, "--quiet", "--json", "--run-dir", str(files / "run")]) == 0
    result = json.loads(capsys.readouterr().out)
    majority = sum(line.endswith("<=50K.") for line in (files / "adult.test").read_text().splitlines()) / 500
    assert majority < 0.6
    assert result["test_accuracy"] > 0.75
    assert result["epsilon"] == pytest.approx(100, rel=0.01)
    assert "kinds, ranges and values of the columns" in (files / "run" / "privacy.txt").read_text()
    # Deployed without the training files: rows of text, encoded by the declaration that the export carries.
    assert main(["export", str(files / "run"), "--output", str(files / "model")]) == 0
    rows = (files / "adult.test").read_text().splitlines()[1:21]
    (files / "new.csv").write_text("\n".join(rows))
    (files / "adult.data").unlink()
    capsys.readouterr()
    assert main(["predict", str(files / "model"), str(files / "new.csv"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    right = sum(line["class"] == row.rpartition(", ")[2].rstrip(".") for line, row in zip(found, rows, strict=True))
    assert right >= 12  # of 20, where naming one class gets about half


def test_files_that_are_not_the_published_ones_are_refused_and_check_agrees(files, capsys):
    assert main(["train", "adult", "--set", f"data_folder={files}"]) == 2
    assert "is not the published adult.data of adult" in capsys.readouterr().err
    assert main(["data", "check", "adult", "--folder", str(files)]) == 1
    assert "is not the published adult.data of adult" in capsys.readouterr().out
    own = files / "own.toml"
    own.write_text(load_recipe("adult", [f"data_folder={files}", "verify_data=false"]).to_toml())
    assert main(["data", "check", str(own)]) == 0
    assert "adult is in order" in capsys.readouterr().out
    text = (files / "adult.test").read_text()
    (files / "adult.test").write_text(text.replace("Husband", "Spouse", 1))
    assert main(["data", "check", str(own)]) == 1
    assert "a cell in column 'relationship' that is not among the declared values" in capsys.readouterr().out


@pytest.mark.skipif(not os.path.isdir(f"{REAL}/adult"), reason="the real Adult data are not in $DP_MICROADAM_DATA/adult")
def test_the_recipe_declares_all_values_of_the_real_files(capsys):
    loaded = load_data(load_recipe("adult"))
    assert [len(part[1]) for part in (loaded.train, loaded.validation, loaded.test)] == [29_305, 3_256, 16_281]
    assert loaded.example_shape == (91,)
    assert main(["data", "check", "adult", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["problems"], found["notes"]) == ("verified", [], [])
