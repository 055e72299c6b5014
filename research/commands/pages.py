"""``python -m research pages``: put the tables of ``results/`` into the pages that show them, and draw their pictures.

In a page a table stands between a comment that names it and ``<!-- end -->``: ``<!-- results NAME -->`` is the table of a
study; ``<!-- leaderboard -->``, ``<!-- verdicts -->`` and ``<!-- threshold -->`` are the leaderboard's, ``<!-- field -->``
that of the checks of other libraries.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS, PICTURE = ROOT / "results", ROOT / "docs" / "images" / "leaderboard.png"

_PLACE = re.compile(r"(<!-- (leaderboard|verdicts|threshold|field|results ([\w-]+)) -->\n).*?(<!-- end -->)", re.DOTALL)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "pages",
        help="put the tables of results/ into README, docs and research notes",
        description="Bring all tables and pictures of results up to date.",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not up to date")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from research.leaderboard.tables import Leaderboard, draw

    stale = [page for page in pages() if refreshed(page) != page.read_text("utf-8")]
    for page in stale:
        print(page.relative_to(ROOT))
    if options.check:
        return int(bool(stale))
    for page in stale:
        page.write_text(refreshed(page), encoding="utf-8")
    if (board := Leaderboard(RESULTS / "leaderboard")).rows():
        draw(board, PICTURE)
    return 0


def pages() -> list[Path]:
    """All pages with tables of results."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("research/*.md")]
    return [page for page in sorted(found) if _PLACE.search(page.read_text("utf-8"))]


def refreshed(page: Path) -> str:
    """The text of a page with every table as the results are now."""
    return _PLACE.sub(lambda found: f"{found[1]}\n{_table(found[2], found[3])}\n\n{found[4]}", page.read_text("utf-8"))


def _table(kind: str, study: str | None) -> str:
    from research.commands import field
    from research.experiments.report import Sweep, markdown
    from research.field import report
    from research.leaderboard import tables

    if kind == "field":
        return report.table({name: field.row(name) for name in field.NAMES}, RESULTS / "field")
    if study is None:
        board = tables.Leaderboard(RESULTS / "leaderboard")
        written = {"leaderboard": tables.table, "verdicts": tables.verdicts}
        written["threshold"] = tables.threshold_table
        return written[kind](board)
    sweep = Sweep.read(RESULTS / study)
    dates = ", ".join(sorted({str(one["date"]) for one in sweep.outcomes.values()}))
    return f"`{sweep.command}`, {len(sweep.outcomes)} runs on {dates}:\n\n{markdown(sweep)}"
