"""The ``dp-microadam`` command; its subcommands live in :mod:`dp_microadam.workbench.command_line.commands`.

Exit codes: 0 done, 1 failure, 2 wrong input, 130 stopped by Ctrl-C, 141 nobody reads what is printed (``| head``).
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from dp_microadam import __version__
from dp_microadam.durable_files import refuse_links_out
from dp_microadam.errors import DPMicroAdamError, InputError, PrivacyWarning
from dp_microadam.workbench.command_line.commands import COMMANDS


class _Formatter(argparse.HelpFormatter):
    """Help formatter that wraps descriptions but leaves examples as they are, so that they can be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("example") else super()._fill_text(text, width, indent)


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in one sentence, like the rest of the command line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The argument parser of ``dp-microadam`` with all its subcommands."""
    return parser_of(
        [f"dp_microadam.workbench.command_line.commands.{name}" for name in COMMANDS],
        prog="dp-microadam",
        description="Train and fine-tune PyTorch models with differential privacy.",
        epilog="example:\n  dp-microadam train  # a private model on real digits, in minutes",
    )


def parser_of(commands: Sequence[str], **options: str) -> argparse.ArgumentParser:
    """A parser with the subcommands of these modules, for :func:`answer`."""
    parser = _Parser(**options)
    parser.add_argument("--version", action="version", version=f"dp-microadam {__version__}")
    parser.set_defaults(run=None)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in commands:
        importlib.import_module(name).add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return answer(build_parser(), arguments)


def answer(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name and return its exit code."""
    if "_ARGCOMPLETE" in os.environ:  # set by the shell code of `register-python-argcomplete dp-microadam`
        import argcomplete

        argcomplete.autocomplete(parser, always_complete_options=False)  # prints candidates and exits
    options = parser.parse_args(arguments)
    if options.run is None:
        parser.print_help()
        return 0
    try:
        with _privacy_warnings_as_sentences():
            for name in ("run_dir", "runs", "model"):
                given = getattr(options, name, None) or ()
                for run in [given] if isinstance(given, str | Path) else given:
                    refuse_links_out(Path(run))
            code = int(options.run(options) or 0)
            sys.stdout.flush()  # here, where it can be handled that nobody reads
            return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still flushes when it exits
        return 141
    except InputError as error:
        print(f"{_program_name()}: {error}", file=sys.stderr)
        return 2
    except (NotADirectoryError, FileExistsError, PermissionError) as error:
        if error.filename is None:
            raise
        print(f"{_program_name()}: {error.filename} cannot be used ({error.strerror}); name another path", file=sys.stderr)
        return 2
    except DPMicroAdamError as error:
        print(f"{_program_name()}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{_program_name()}: stopped by Ctrl-C", file=sys.stderr)
        return 130


def _program_name() -> str:
    """Name in front of a message; it includes the rank in all but the first of the processes that torchrun started."""
    rank = os.environ.get("RANK", "0")
    return "dp-microadam" if rank == "0" else f"dp-microadam (rank {rank})"


@contextmanager
def _privacy_warnings_as_sentences() -> Iterator[None]:
    """Print this library's privacy warnings as one line on stderr, without the source line that Python adds."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", PrivacyWarning)
        original = warnings.showwarning

        def show(message, category, *details, **more):  # type: ignore[no-untyped-def]
            if issubclass(category, PrivacyWarning):
                if _program_name() == "dp-microadam":  # the other ranks would repeat it
                    print(f"dp-microadam: warning: {message}", file=sys.stderr)
            else:
                original(message, category, *details, **more)

        warnings.showwarning = show
        yield
