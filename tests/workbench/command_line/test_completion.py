"""Shell completion: what Tab offers, without torch."""

import os
import subprocess
import sys

import pytest
from argcomplete.finders import CompletionFinder

from dp_microadam.workbench.command_line.cli import build_parser
from dp_microadam.workbench.recipes import known_recipes
from dp_microadam.workbench.recipes.keys import DATA_SETS, METHODS

ALL = ["train", "resume", "evaluate", "tune", "export", "predict", "plan", "budget", "data", "report", "audit", "doctor"]


def candidates(line):
    """What the last word of the line may become, without the words before it."""
    finder = CompletionFinder(build_parser(), always_complete_options=False)
    found = []
    while (completed := finder.rl_complete(line, len(found))) is not None:
        found.append(completed)
    before = line.rpartition(" ")[0]
    return [completed.removeprefix(before).strip() for completed in found]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", ALL),
        ("train ", known_recipes()),
        ("train fash", ["fashion-mnist"]),
        ("train --set meth", ["method="]),
        ("train --set optimizer.dens", ["optimizer.density="]),
        ("train --set method=", [f"method={name}" for name in METHODS]),
        ("train --set bands=", ["bands=auto"]),
        ("train demo --set steps=9 --run", ["--run-dir"]),
        ("plan --accountant ", ["rdp", "pld"]),
        ("data get ", list(DATA_SETS)),
        ("no-such-command --se", []),
    ],
)
def test_what_is_offered(line, expected):
    assert candidates(line) == expected


def test_recipe_files_are_offered_where_no_recipe_has_the_name(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").touch()
    (tmp_path / "mine.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert candidates("train min") == ["mine.toml"]
    assert "mine.txt" in candidates("evaluate min")


def test_completing_does_not_import_torch(tmp_path):
    """A module named torch that cannot be imported stands before the real one."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    line = "dp-microadam train --set method=spa"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    subprocess.run([sys.executable, "-m", "dp_microadam"], env=environment, capture_output=True, check=True)
    assert (tmp_path / "answer").read_text().strip() == "method=sparta"
