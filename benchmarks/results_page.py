"""Put the tables of results/ into docs/results.md, and their pictures into docs/images.

    python benchmarks/results_page.py [--check]

Results append: after `python -m research reproduce NAME --scale cpu --seeds 2 --out results/NAME` this brings
the page up to date.
On the page a table stands between the comments `results NAME` and `end`; `results NAME range` is the table by that name that
the study has beside its main one. `--check` writes nothing and fails if the page is not up to date.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from research.experiments.page import write_sweep
from research.experiments.results import Sweep
from research.experiments.sweep_tables import NOT_RUN, sweep_tables

ROOT = Path(__file__).parents[1]
RESULTS, PAGE, IMAGES = ROOT / "results", ROOT / "docs" / "results.md", ROOT / "docs" / "images"
PICTURES = {
    "map/figures/map-lines.png": "accuracy_over_noise.png",
    "map/figures/map-difference-dp-adam.png": "results_map_dp_adam.png",
    "map/figures/map-difference-dp-sgd.png": "results_map_dp_sgd.png",
    "robustness/figures/robustness-range.png": "results_robustness.png",
    "bands/figures/bands-lines.png": "bands.png",
    "leaderboard/figures/leaderboard-lines.png": "as_it_comes.png",
    "heads/figures/heads-lines.png": "heads.png",
    "tuning/figures/tuning-lines.png": "tuning.png",
}

_PLACE = re.compile(r"(<!-- results (?P<name>[\w-]+)(?: (?P<table>[\w-]+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def refreshed(page: str) -> str:
    """The page with every table as the results are now."""
    return _PLACE.sub(lambda found: f"{found[1]}{_block(found['name'], found['table'])}{found[4]}", page)


def _block(name: str, wanted: str | None) -> str:
    sweep = Sweep.read(RESULTS / name)
    table = next(one for one in sweep_tables(sweep) if one.name == (f"{sweep.slug}-{wanted}" if wanted else sweep.slug))
    lines = [line for line in table.markdown().splitlines() if line.startswith("|") and not _empty(line, table.labels)]
    facts = "" if wanted else f"{_facts(sweep)}\n\n"
    return f"\n{facts}{chr(10).join(lines)}\n\n"


def _empty(row: str, labels: int) -> bool:
    """A row of which nothing has been run."""
    entries = row.strip("|").split("|")[labels:]
    return all(entry.split("<br>")[0].strip() in (NOT_RUN, "–") for entry in entries)


def _facts(sweep: Sweep) -> str:
    def distinct(attribute: str) -> str:
        return ", ".join(sorted({str(getattr(one, attribute)) for one in sweep.outcomes}))

    runs = f"{len(sweep.outcomes)} runs" if sweep.trained else "measured"
    return f"`{sweep.command}`; {runs} on {distinct('date')}, {distinct('machine')}, commits {distinct('commit')}."


def main() -> int:
    parser = argparse.ArgumentParser(description="Put the tables of results/ into docs/results.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not up to date")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    new = refreshed(page)
    if options.check:
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    for folder in sorted(path.parent for path in RESULTS.glob("*/results.jsonl")):
        write_sweep(folder)
    for source, target in PICTURES.items():
        if (RESULTS / source).exists():
            shutil.copy(RESULTS / source, IMAGES / target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
