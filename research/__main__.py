"""``python -m research``: the paper's experiments and its theorem, from a clone of the repository."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dp_microadam.workbench.command_line.cli import answer, parser_of

COMMANDS = ("reproduce", "leaderboard", "field", "pages", "theory")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = parser_of(
        [f"research.commands.{name}" for name in COMMANDS],
        prog="python -m research",
        description="Rerun the experiments of the paper, and evaluate its theorem.",
        epilog="example:\n  python -m research reproduce  # list the studies",
    )
    return answer(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
