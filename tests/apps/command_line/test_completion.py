"""The Tab key: what it offers, in a real bash, and without torch."""

import shutil
import subprocess
import sys

import pytest

from dp_microadam.apps.command_line.cli import build_parser, main
from dp_microadam.apps.command_line.commands import COMMANDS
from dp_microadam.apps.command_line.commands.completion import candidates
from dp_microadam.apps.recipes import known_recipes
from dp_microadam.apps.recipes.vocabulary import DATA_SETS, METHODS


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], list(COMMANDS)),
        (["tr"], ["train"]),
        (["train", ""], known_recipes()),
        (["train", "fash"], ["fashion-mnist"]),
        (["train", "--set", "meth"], ["method="]),
        (["train", "--set", "optimizer.dens"], ["optimizer.density="]),
        (["train", "--set", "method="], [f"method={name}" for name in METHODS]),
        (["train", "--set", "method=dp-s"], ["method=dp-sgd"]),
        (["train", "demo", "--set", "steps=9", "--run"], ["--run-dir"]),
        (["plan", "--accountant", ""], ["rdp", "pld"]),
        (["data", ""], ["list", "get", "check"]),
        (["data", "get", ""], list(DATA_SETS)),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["resume", ""], []),
        (["train", "--run-dir", ""], []),
        (["no-such-command", "--se"], []),
    ],
    ids=" ".join,
)
def test_what_is_offered(words, expected):
    assert candidates(build_parser(), words) == expected


def test_every_option_of_a_command_is_offered():
    offered = candidates(build_parser(), ["train", "--"])
    assert {"--set", "--run-dir", "--json", "--quiet", "--help"} <= set(offered)


def test_answering_does_not_import_torch():
    code = (
        "import sys; from dp_microadam.apps.command_line.cli import main; "
        "main(['completion', 'words', 'dp-microadam train --set method=']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


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
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; "
        'COMP_WORDBREAKS=$\' \\t\\n"\\\'><=;|&(:\'; _dp_microadam; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_asks_the_command_itself(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "dp-microadam completion words" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_are_valid_where_the_shell_is_installed(shell, tmp_path, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    main(["completion", shell])
    (tmp_path / "script").write_text(capsys.readouterr().out)
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)
