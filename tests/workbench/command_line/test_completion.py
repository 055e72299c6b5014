"""Shell completion: what Tab offers, in a real bash, and without torch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "words", "expected"),
    [
        ("dp-microadam tra", ["dp-microadam", "tra"], ["train"]),
        ("dp-microadam train --set method=spa", ["dp-microadam", "train", "--set", "method", "=", "spa"], ["sparta"]),
    ],
    ids=["command", "value after ="],
)
def test_a_real_bash_completes_without_importing_torch(line, words, expected, tmp_path):
    """A module named torch that cannot be imported stands before the real one."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "dp-microadam").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dp_microadam "$@"\n')
    (tmp_path / "dp-microadam").chmod(0o755)
    quoted = " ".join(f'"{word}"' for word in words)
    script = Path(sys.executable).with_name("register-python-argcomplete")
    program = (
        f'PATH="{tmp_path}:$PATH"; eval "$("{script}" dp-microadam)"; COMP_LINE="{line}"; COMP_POINT={len(line)}; '
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMP_TYPE=9; "
        'COMP_WORDBREAKS=$\' \\t\\n"\\\'><=;|&(:\'; _python_argcomplete dp-microadam; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        ["bash", "-c", program], cwd=tmp_path, env={**os.environ, **paths}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == expected
