"""The ``dp-microadam`` command.

Each subcommand is a function that adds its own arguments and one that runs; heavy imports happen inside the one that
runs, so that ``--help`` answers at once. Exit codes: 0 done, 1 failure, 2 wrong input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dp_microadam import __version__
from dp_microadam.errors import DPMicroAdamError, InputError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dp-microadam",
        description="Train and fine-tune PyTorch models with differential privacy.",
    )
    parser.add_argument("--version", action="version", version=f"dp-microadam {__version__}")
    parser.set_defaults(run=None)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.run is None:
        parser.print_help()
        return 0
    try:
        return int(options.run(options) or 0)
    except InputError as error:
        print(f"dp-microadam: {error}", file=sys.stderr)
        return 2
    except DPMicroAdamError as error:
        print(f"dp-microadam: {error}", file=sys.stderr)
        return 1
