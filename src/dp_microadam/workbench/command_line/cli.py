"""The ``dp-microadam`` command; its subcommands live in :mod:`dp_microadam.workbench.command_line.commands`.

Exit codes: 0 done, 1 failure, 2 wrong input, 130 stopped by Ctrl-C, 141 nobody reads what is printed (``| head``).
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from dp_microadam import __version__
from dp_microadam.durable_files import refuse_links_out
from dp_microadam.errors import DPMicroAdamError, InputError, PrivacyWarning
from dp_microadam.workbench.command_line.commands import COMMANDS

_COMPLETION = {
    "bash": 'eval "$(dp-microadam completion bash)"  # in ~/.bashrc',
    "zsh": 'eval "$(dp-microadam completion zsh)"  # in ~/.zshrc, after compinit',
    "fish": "dp-microadam completion fish > ~/.config/fish/completions/dp-microadam.fish",
}


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
        add_completion_parser,
        prog="dp-microadam",
        description="Train and fine-tune PyTorch models with differential privacy.",
        epilog="example:\n  dp-microadam train  # a private model on real digits, in minutes",
    )


def parser_of(commands: Sequence[str], *more: Callable[[Any], None], **options: str) -> argparse.ArgumentParser:
    """A parser with the subcommands of these modules, for :func:`answer`; ``more`` functions add others."""
    parser = _Parser(**options)
    parser.add_argument("--version", action="version", version=f"dp-microadam {__version__}")
    parser.set_defaults(run=None)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add_parser in (*(importlib.import_module(name).add_parser for name in commands), *more):
        add_parser(subparsers)
    return parser


def add_completion_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command whose output makes Tab complete commands, options and their values."""
    parser = subparsers.add_parser(
        "completion",
        help="print the code that enables Tab completion in your shell",
        description="Print shell code that completes commands, options, recipes, data sets and recipe settings when you press "
        "Tab.",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in _COMPLETION.values()),
    )
    parser.add_argument("shell", choices=tuple(_COMPLETION), help="which shell")
    parser.set_defaults(run=_print_completion)


def _print_completion(options: argparse.Namespace) -> int:
    import argcomplete

    print(argcomplete.shellcode(["dp-microadam"], shell=options.shell), end="")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return answer(build_parser(), arguments)


def answer(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name and return its exit code."""
    if "_ARGCOMPLETE" in os.environ:  # set by the code that `dp-microadam completion` prints
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
        if not _nobody_reads():
            raise
        return 141
    except InputError as error:
        print(f"{_program_name()}: {error}", file=sys.stderr)
        return 2
    except DPMicroAdamError as error:
        print(f"{_program_name()}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{_program_name()}: stopped by Ctrl-C", file=sys.stderr)
        return 130


def _nobody_reads() -> bool:
    """Whether standard output is a pipe that was closed at its other end; if so, what is left to print goes nowhere."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    closed = any(event & (select.POLLERR | select.POLLHUP) for _, event in waiting.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return closed


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
