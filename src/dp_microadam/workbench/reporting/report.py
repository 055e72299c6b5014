"""Writes ``report.html``, a report about runs and audits, with its figures and tables as separate files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from dp_microadam import __version__
from dp_microadam.durable_files import write_text_durably
from dp_microadam.errors import InputError
from dp_microadam.ledger.ledger import LEDGER_NAME
from dp_microadam.ledger.statement import PRIVACY_NAME
from dp_microadam.workbench.reporting import run_tables
from dp_microadam.workbench.reporting.page import Section, document
from dp_microadam.workbench.reporting.run import AUDIT, Run
from dp_microadam.workbench.reporting.run_page import Part, audit_html, run_part
from dp_microadam.workbench.reporting.tables import file_name

REPORT = "report.html"
FIGURES, TABLES = "figures", "tables"


def write_report(folders: Sequence[str | Path], page: Path, *, files: bool = True, group_size: int = 1) -> list[Path]:
    """Write an HTML report about the runs and audits in ``folders``; returns the paths of the files, the page first.

    With ``files``, figures (PNG, PDF) and tables (CSV, LaTeX, Markdown) are also written, into folders beside the page.
    Privacy statements have ε for a group of ``group_size`` if that is above 1.

    Raises:
        InputError: if a folder is none of these or is named twice, or the page cannot be written.
        DPMicroAdamError: if matplotlib is not installed.
    """
    return write_parts(_parts(folders, group_size), page, files=files)


def write_parts(parts: Sequence[Part], page: Path, *, files: bool = True) -> list[Path]:
    """Write one page of these parts and, with ``files``, their figures and tables beside it; as :func:`write_report` says."""
    title = parts[0].title if len(parts) == 1 else "Report"
    lead = parts[0].lead if len(parts) == 1 else escape("; ".join(part.title for part in parts))
    sections = [section for part in parts for section in _with_part_title(part, len(parts))]
    footer = (
        f"Written by dp-microadam {escape(__version__)}. Nothing on this page was computed from metrics of the training data."
    )
    try:
        written = [_write(page, document(title, lead, sections, footer))]
        for part in parts if files else ():
            for figure in part.figures:
                written += figure.write(page.parent / FIGURES)
            for table in part.tables:
                forms = {"csv": table.csv(), "tex": table.latex() + "\n", "md": table.markdown() + "\n"}
                written += [_write(page.parent / TABLES / f"{table.name}.{form}", text) for form, text in forms.items()]
    except OSError as error:
        raise InputError(
            f"page is {str(page)!r}, which cannot be written ({error.strerror}); name another with --out"
        ) from None
    return written


def _parts(folders: Sequence[str | Path], group_size: int) -> list[Part]:
    """The parts of the page: all runs together, then each audit."""
    runs: list[Run] = []
    others: list[Part] = []
    seen: set[Path] = set()
    for folder in folders:
        path = Path(folder)
        if path.resolve() in seen:
            raise InputError(f"run {str(folder)!r} is named twice; each must be named once")
        seen.add(path.resolve())
        if (path / AUDIT).is_file() and not (path / LEDGER_NAME).is_file() and not (path / PRIVACY_NAME).is_file():
            others.append(_audit_part(path))
        else:
            runs.append(Run.read(path, group_size))
    parts = [*([run_part(runs)] if runs else []), *others]
    names = [table.name for part in parts for table in part.tables]
    if len(set(names)) < len(names):
        raise InputError("two audits have the same name, so their files would overwrite each other; report them separately")
    return parts


def _audit_part(path: Path) -> Part:
    name = f"audit-{file_name(path.resolve().name)}"
    try:
        content = json.loads((path / AUDIT).read_text(encoding="utf-8"))
        table = run_tables.audit(content, name=name)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path / AUDIT} does not describe an audit, run dp-microadam audit again: {type(error).__name__}: {error}"
        ) from None
    section = Section(name, "Audit", audit_html(content, table))
    return Part("Privacy audit", escape(str(path.resolve().name)), (section,), (), (table,))


def _with_part_title(part: Part, count: int) -> list[Section]:
    """Sections of a part; their headings include its title if there are several parts."""
    if count == 1:
        return list(part.sections)
    return [Section(one.name, f"{part.title}: {one.title}", one.body) for one in part.sections]


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_durably(path, text)
    return path
