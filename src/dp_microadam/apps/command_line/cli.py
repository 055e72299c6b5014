"""The ``dp-microadam`` command; its subcommands live in :mod:`dp_microadam.apps.command_line.commands`.

Exit codes: 0 done, 1 failure, 2 wrong input, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from dp_microadam import __version__
from dp_microadam.apps.command_line.commands import COMMANDS
from dp_microadam.errors import DPMicroAdamError, InputError, PrivacyWarning


class _Formatter(argparse.HelpFormatter):
    """Wraps descriptions, but not examples: those are to be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("example") else super()._fill_text(text, width, indent)


class _Parser(argparse.ArgumentParser):
    """Refuses with one sentence, as every other part of the command line does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dp-microadam",
        description="Train and fine-tune PyTorch models with differential privacy.",
        epilog="example:\n  dp-microadam train  # a private model on real digits, in minutes",
    )
    parser.add_argument("--version", action="version", version=f"dp-microadam {__version__}")
    parser.set_defaults(run=None)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"dp_microadam.apps.command_line.commands.{name}").add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # set by the code that `dp-microadam completion` prints
        import argcomplete

        argcomplete.autocomplete(parser, always_complete_options=False)  # prints candidates and exits
    options = parser.parse_args(arguments)
    if options.run is None:
        parser.print_help()
        return 0
    try:
        with _privacy_warnings_as_sentences():
            return int(options.run(options) or 0)
    except InputError as error:
        print(f"{_speaker()}: {error}", file=sys.stderr)
        return 2
    except DPMicroAdamError as error:
        print(f"{_speaker()}: {error}", file=sys.stderr)
        return 1


def _speaker() -> str:
    """Who says it, of several processes that torchrun started."""
    rank = os.environ.get("RANK", "0")
    return "dp-microadam" if rank == "0" else f"dp-microadam (rank {rank})"


@contextmanager
def _privacy_warnings_as_sentences() -> Iterator[None]:
    """Show this library's warnings on stderr without the line of source they came from."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", PrivacyWarning)
        original = warnings.showwarning

        def show(message, category, *details, **more):  # type: ignore[no-untyped-def]
            if issubclass(category, PrivacyWarning):
                if _speaker() == "dp-microadam":  # others would repeat it
                    print(f"dp-microadam: warning: {message}", file=sys.stderr)
            else:
                original(message, category, *details, **more)

        warnings.showwarning = show
        yield
