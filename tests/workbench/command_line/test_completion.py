"""Shell completion: what Tab offers, in a real bash, and without torch."""

import os
import shutil
import subprocess
import sys

import pytest
from argcomplete.finders import CompletionFinder

from dp_microadam.workbench.command_line.cli import build_parser, main
from dp_microadam.workbench.recipes import known_recipes
from dp_microadam.workbench.recipes.keys import DATA_SETS, METHODS

ALL = (
    *("train", "resume", "evaluate", "tune", "export", "predict", "plan", "budget", "data", "report", "audit", "doctor"),
    "completion",
)


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
        ("", list(ALL)),
        ("tr", ["train"]),
        ("train ", known_recipes()),
        ("train fash", ["fashion-mnist"]),
        ("train --set meth", ["method="]),
        ("train --set optimizer.dens", ["optimizer.density="]),
        ("train --set method=", [f"method={name}" for name in METHODS]),
        ("train --set method=dp-s", ["method=dp-sgd"]),
        ("train demo --set steps=9 --run", ["--run-dir"]),
        ("train --set schedule=co", ["schedule=constant", "schedule=cosine"]),
        ("train --set bands=", ["bands=auto"]),
        ("plan --accountant ", ["rdp", "pld"]),
        ("data ", ["list", "get", "check", "clean"]),
        ("data get ", list(DATA_SETS)),
        ("completion ", ["bash", "zsh", "fish"]),
        ("no-such-command --se", []),
    ],
)
def test_what_is_offered(line, expected):
    assert candidates(line) == expected


def test_every_option_of_a_command_is_offered():
    assert {"--set", "--run-dir", "--json", "--quiet", "--help"} <= set(candidates("train --"))


def test_recipe_files_are_offered_where_no_recipe_has_the_name(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").touch()
    (tmp_path / "mine.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert candidates("train min") == ["mine.toml"]
    assert candidates("train ./") == ["./mine.toml"]
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


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "words", "expected"),
    [
        ("dp-microadam tra", ["dp-microadam", "tra"], ["train"]),
        ("dp-microadam train --set method=spa", ["dp-microadam", "train", "--set", "method", "=", "spa"], ["sparta"]),
        ("dp-microadam train --set bat", ["dp-microadam", "train", "--set", "bat"], ["batch_size="]),
    ],
    ids=["command", "value after =", "key"],
)
def test_a_real_bash_completes(line, words, expected, tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "dp-microadam").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dp_microadam "$@"\n')
    (tmp_path / "dp-microadam").chmod(0o755)
    quoted = " ".join(f'"{word}"' for word in words)
    program = (
        f'PATH="{tmp_path}:$PATH"; source "{tmp_path}/script"; COMP_LINE="{line}"; COMP_POINT={len(line)}; '
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMP_TYPE=9; "
        'COMP_WORDBREAKS=$\' \\t\\n"\\\'><=;|&(:\'; _python_argcomplete dp-microadam; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        ["bash", "-c", program], cwd=tmp_path, env={**os.environ, **paths}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_registers_the_command(shell, capsys):
    assert main(["completion", shell]) == 0
    assert any("complet" in line and "dp-microadam" in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_are_valid_where_the_shell_is_installed(shell, tmp_path, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    main(["completion", shell])
    (tmp_path / "script").write_text(capsys.readouterr().out)
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)
