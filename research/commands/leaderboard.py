"""``python -m research leaderboard``: run what is missing of the comparison with other methods."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

NAMES = ("adult", "head", "digits", "fashion-195", "cifar10", "lora", "fashion-1000")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "leaderboard",
        help="compare the defaults with other methods, seed by seed",
        description="Run what is missing of the leaderboard. Every run appends a line to a file of its problem.",
    )
    parser.add_argument("--problems", nargs="+", default=NAMES, choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--entrants", nargs="+", metavar="NAME", help="methods to run (default: all)")
    parser.add_argument("--epsilons", nargs="+", type=float, default=[], metavar="E", help="default: those of the problem")
    parser.add_argument("--minutes", type=float, default=1e6, metavar="M", help="start no run after so many minutes")
    parser.add_argument("--out", type=Path, default=Path("results/leaderboard"), metavar="DIR")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dp_microadam.validation import require_one_of
    from research.leaderboard.runs import ENTRANTS, run_all

    entrants = [require_one_of("entrants", name, tuple(ENTRANTS)) for name in options.entrants or ENTRANTS]
    command = "python -m research " + shlex.join(sys.argv[1:])
    run_all(options.out, options.problems, entrants, options.epsilons, command, options.minutes)
    return 0
