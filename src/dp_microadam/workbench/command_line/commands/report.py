"""``dp-microadam report RUN…``: an HTML report about runs, sweeps and audits."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dp_microadam.workbench.command_line.arguments import add_group_size, add_json, add_run


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "report",
        help="write an HTML report about runs or a sweep, with figures and tables for papers",
        description="Write one self-contained HTML page about runs, sweeps and audits, and beside it figures (PNG, PDF) and "
        "tables (CSV, LaTeX, Markdown).",
        epilog="examples:\n  dp-microadam report runs/mine\n  dp-microadam report runs/mine runs/other --out compared.html",
    )
    add_run(parser, "runs", nargs="+", type=str, help="folder of a run, sweep or audit; several are compared")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="HTML file to write (default: report.html in RUN, or in the current folder for several)",
    )
    parser.add_argument(
        "--page-only", action="store_true", help="write the HTML file only, without the folders of figures and tables"
    )
    add_group_size(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dp_microadam.errors import InputError
    from dp_microadam.workbench.reporting.report import REPORT, write_report

    page: Path = options.out or (Path(options.runs[0]) / REPORT if len(options.runs) == 1 else Path(REPORT))
    if page.is_dir():
        raise InputError(f"out is {str(page)!r}, which is a folder; it must be the name of a file")
    written = write_report(options.runs, page, files=not options.page_only, group_size=options.group_size)
    if options.json:
        print(json.dumps({"page": str(page), "files": [str(path) for path in written[1:]]}, ensure_ascii=False))
        return 0
    print(f"page {page}")
    if len(written) > 1:
        folders = dict.fromkeys(str(path.parent) for path in written[1:])
        print(f"{len(written) - 1} figures and tables in {' and '.join(folders)}")
    return 0
