"""Every command's help has an example, and the examples are ones that the command takes."""

import argparse
import os
import re
import shlex
import sys

import pytest

from dp_microadam.workbench.command_line.cli import build_parser, main


def parsers(parser=None):
    """The program and all its commands and actions, by what one types."""
    parser = parser or build_parser()
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


@pytest.mark.parametrize(("prog", "parser"), list(parsers()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_help_has_an_example_that_works(prog, parser):
    shown = parser.format_help()
    assert re.search(r"^examples?:$", shown, flags=re.MULTILINE), f"{prog} --help has no example"
    lines = shown.partition("\nexample")[2].splitlines()[1:]
    commands = [found for line in lines for found in re.findall(r"dp-microadam [^>#)]*", line)]
    assert commands
    for command in commands:
        arguments = shlex.split(command)[1:]
        assert build_parser().parse_args(arguments).run is not None
        assert command.startswith(prog) or prog == "dp-microadam"


@pytest.mark.parametrize("buffering", [-1, 1], ids=["buffered", "by lines"])
def test_nothing_is_said_if_nobody_reads(buffering, monkeypatch, capfd):
    """As in ``dp-microadam data list --json | head -c 1``."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering, encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["data", "list", "--json"]) == 141
        monkeypatch.undo()
    assert capfd.readouterr().err == ""
