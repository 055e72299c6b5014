"""A row of the table: one promise, and what was measured of it in each library that is installed."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from research.experiments.report import lines_of
from research.measuring import provenance

OPACUS, JAX_PRIVACY, FAST_DP, OURS = "Opacus", "JAX-Privacy", "fastDP", "dp-microadam"
_MODULES = {OPACUS: "opacus", JAX_PRIVACY: "jax_privacy", FAST_DP: "fastDP", OURS: "dp_microadam"}

HOLDS, FAILS, REFUSED, USER = "holds", "does not hold", "refused", "up to the user"
"""Verdicts: the promise was kept, was not, the model was refused with a message, or keeping it is a task of the user."""


@dataclass(frozen=True)
class Finding:
    """What came out for one library."""

    verdict: str
    measured: str


@dataclass(frozen=True)
class Row:
    """A check: what a user relies on, where it was first reported, and how each library is measured."""

    title: str
    promise: str
    source: str
    checks: Mapping[str, Callable[[], Finding]]

    def findings(self) -> dict[str, Finding]:
        """By library, for those that are installed."""
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            return {name: check() for name, check in self.checks.items() if find_spec(_MODULES[name])}
        finally:
            logging.disable(logging.NOTSET)

    def show(self) -> dict[str, Finding]:
        """Measure, and print what was promised and what was found."""
        print(f"{self.title}\n  promised: {self.promise}\n  reported: {self.source}")
        found = self.findings()
        for name, finding in found.items():
            print(f"  {name} {version(name)}: {finding.verdict}: {finding.measured}", flush=True)
        return found

    def write(self, path: Path) -> None:
        """Measure, print and keep; lines of libraries that are not installed here stay as they are."""
        known = {line["library"]: line for line in lines_of(path)}
        for name, finding in self.show().items():
            known[name] = {"library": name, "version": version(name), **asdict(finding), **provenance()}
        lines = [json.dumps(known[name], ensure_ascii=False) + "\n" for name in _MODULES if name in known]
        path.write_text("".join(lines), encoding="utf-8")


def version(library: str) -> str:
    """Of an installed library."""
    return str(import_module(_MODULES[library]).__version__)


def table(rows: Mapping[str, Row], folder: Path) -> str:
    """All rows as Markdown, and the versions that were measured."""
    lines = [f"| promised | {' | '.join(_MODULES)} |", "|:---" * (1 + len(_MODULES)) + "|"]
    facts = set()
    for name, row in rows.items():
        found = {line["library"]: line for line in lines_of(folder / f"{name}.jsonl")}
        facts |= {f"{line['library']} {line['version']} ({line['commit']}, {line['date']})" for line in found.values()}
        cells = [f"**{found[one]['verdict']}**: {found[one]['measured']}" if one in found else "–" for one in _MODULES]
        lines.append(f"| **{row.title}.** {row.promise} `python -m research.field.{name}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "; ".join(sorted(facts)) + "."])
