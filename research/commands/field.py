"""``python -m research field``: the same checks against this library and others, and a table of what came out."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from research.field.report import Row

NAMES = ("normalization", "sampling", "empty", "seeds", "mixing", "cancelling", "ghost", "lora")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "field",
        help="check this library and others for mistakes that others made",
        description="Run the checks of research/field.md against each library that is installed here, and keep what was found.",
    )
    parser.add_argument("--rows", nargs="+", default=NAMES, choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--out", type=Path, default=Path("results/field"), metavar="DIR")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.rows:
        row(name).write(options.out / f"{name}.jsonl")
    return 0


def row(name: str) -> Row:
    """The check of that name."""
    return import_module(f"research.field.{name}").ROW
