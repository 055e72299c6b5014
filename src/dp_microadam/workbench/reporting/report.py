"""Writes ``report.html``, a report about runs and audits, with its figures and tables as separate files.

The page is one file without scripts, with a light, a dark and a print theme; its templates escape all text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dp_microadam import __version__
from dp_microadam.durable_files import write_text_durably
from dp_microadam.errors import DPMicroAdamError, InputError
from dp_microadam.ledger.ledger import LEDGER_NAME
from dp_microadam.ledger.statement import PRIVACY_NAME, round_up, statement_parts
from dp_microadam.workbench.reporting.figures import Figure, css_variables, labels_of, run_figures
from dp_microadam.workbench.reporting.run import AUDIT, Run
from dp_microadam.workbench.reporting.tables import Cell, Table, cell, confidence_in_words, duration, in_bytes, is_number

REPORT = "report.html"
FIGURES, TABLES = "figures", "tables"
_FOOTER = f"Written by dp-microadam {__version__}. Nothing on this page was computed from metrics of the training data."

_COLOURS = (
    ("--ink", "#1d2433", "#e7eaf0"),
    ("--faint", "#5b6474", "#a3adbd"),
    ("--page", "#f7f8fa", "#12161d"),
    ("--good", "#17734a", "#4cc38a"),
    ("--bad", "#b00020", "#ff7d8c"),
    ("--tint", "#eef3f9", "#232b38"),
)
"""Name of a CSS variable, its value on light and on dark pages."""


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("dp_microadam.workbench"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )


def _template(name: str) -> Any:
    """The macros of a template, as functions that return HTML."""
    return _environment().get_template(name).module


@dataclass(frozen=True)
class Section:
    """A section of a page: ``name`` is its anchor, ``title`` its heading, ``body`` its HTML."""

    name: str
    title: str
    body: Any


@dataclass(frozen=True)
class Page:
    """What a page says, with its figures and tables, which are also written as files."""

    title: str
    lead: str
    sections: list[Section]
    figures: list[Figure]
    tables: list[Table]


def write_report(folders: Sequence[str | Path], path: Path, *, files: bool = True, group_size: int = 1) -> list[Path]:
    """Write an HTML report about the runs and audits in ``folders``; returns the paths of the files, the page first.

    With ``files``, figures (PNG, PDF) and tables (CSV) are also written, into folders beside the page.
    Privacy statements have ε for a group of ``group_size`` if that is above 1.

    Raises:
        InputError: if a folder is none of these or is named twice, or the page cannot be written.
    """
    paths = [Path(folder) for folder in folders]
    for number, folder in enumerate(paths):
        if folder.resolve() in (other.resolve() for other in paths[:number]):
            raise InputError(f"run {str(folder)!r} is named twice; each must be named once")
    audits = [
        folder
        for folder in paths
        if (folder / AUDIT).is_file() and not any((folder / name).is_file() for name in (LEDGER_NAME, PRIVACY_NAME))
    ]
    runs = [Run.read(folder, group_size) for folder in paths if folder not in audits]
    page = _about(runs) if runs else Page("Privacy audit", ", ".join(one.resolve().name for one in audits), [], [], [])
    for number, folder in enumerate(audits, start=1):
        _add_audit(page, folder, f"audited-{number}")
    whole = _environment().get_template("page.html")
    variables = [*_COLOURS, *css_variables().values()]
    html = whole.render(title=page.title, lead=page.lead, sections=page.sections, footer=_FOOTER, variables=variables)
    try:
        written = [_write(path, html)]
        for figure in page.figures if files else ():
            written += figure.write(path.parent / FIGURES)
        for table in page.tables if files else ():
            written.append(_write(path.parent / TABLES / f"{table.name}.csv", table.csv()))
    except OSError as error:
        raise InputError(
            f"page is {str(path)!r}, which cannot be written ({error.strerror}); name another with --out"
        ) from None
    return written


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_durably(path, text)
    return path


def _add_audit(page: Page, folder: Path, name: str) -> None:
    try:
        content = json.loads((folder / AUDIT).read_text(encoding="utf-8"))
        table = _audit(content, name)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder / AUDIT} does not describe an audit, run dp-microadam audit again: {type(error).__name__}: {error}"
        ) from None
    page.sections.append(Section(name, f"Audit: {folder.resolve().name}", _template("parts.html").audit(content, table)))
    page.tables.append(table)


def _about(runs: Sequence[Run]) -> Page:
    labels, figures, missing = labels_of(runs), dict[str, list[Figure]](), ""
    try:
        figures = run_figures(runs)
    except DPMicroAdamError as error:  # without matplotlib the page says so in their places
        missing = str(error)
    numbered = list(enumerate(zip(runs, labels, strict=True), start=1))
    tables: dict[str, list[Table]] = {
        "summary": [_summary(runs, labels)],
        "accuracy": _known([_recall(runs, labels)]),
        "learning": _known([_evaluations(run, number, label) for number, (run, label) in numbered]),
        "memory": _known([_memory(runs, labels)]),
        "audit": [_audit(run.audit, f"audit-{number}") for number, (run, _) in numbered if run.audit],
        "settings": _known([_settings(runs, labels)]),
    }
    views, parts = [_view(run, label) for run, label in zip(runs, labels, strict=True)], _template("run.html")
    sections = {
        "privacy": ("Privacy statement", parts.privacy(views)),
        "accuracy": ("Accuracy", parts.accuracy(views, tables["accuracy"])),
        "summary": ("The run" if len(runs) == 1 else "Runs", parts.listed(tables["summary"])),
        "learning": (
            "Validation loss and accuracy",
            parts.learning(views, figures.get("learning"), tables["learning"], missing),
        ),
        "budget": ("Privacy budget", parts.budget(views, figures.get("budget"), missing)),
        "course": ("Learning rate and throughput", parts.course(figures.get("course"), missing)),
        "memory": ("Memory", parts.listed(tables["memory"])),
        "audit": ("Audit", parts.audits([run.audit for run in runs if run.audit], tables["audit"])),
        "settings": ("Settings", parts.listed(tables["settings"])),
    }
    # The first reader is responsible for the data. Of several runs, the summary says which of them are private.
    order = ["summary", *(name for name in sections if name != "summary")] if len(runs) > 1 else list(sections)
    shown = [Section(name, *sections[name]) for name in order if sections[name][1].strip()]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    lead = _lead(runs[0]) if len(runs) == 1 else "; ".join(dict.fromkeys(run.method for run in runs))
    drawn = [one for several in figures.values() for one in several]
    return Page(title, lead, shown, drawn, [one for several in tables.values() for one in several])


def _known(tables: Sequence[Table | None]) -> list[Table]:
    return [table for table in tables if table is not None]


def _lead(run: Run) -> str:
    on = f" on {run.last_activity:%Y-%m-%d}" if run.state == "finished" and run.last_activity is not None else ""
    what = " on ".join(str(run.settings[key]) for key in ("model", "data") if key in run.settings)
    return ", ".join(part for part in (run.method, what, _trained_on(run), f"{run.state}{on}") if part)


def _view(run: Run, label: str) -> dict[str, Any]:
    """What the templates say of a run."""
    unprotected = run.words or f"NOT PRIVATE: {run.stamp}. No guarantee of any kind holds for this model."
    words, terms, outside = (unprotected, [], []) if run.ledger is None else statement_parts(dict(run.privacy))
    count = run.test.get("test_examples")
    classes = f"{len(run.recall)} classes" if run.recall else ""
    examples = f"{count:,} test examples" if is_number(count) else ""
    return {
        "run": run,
        "label": label,
        "promise": _promise(run),
        "statement": " ".join(words.split()),
        "terms": dict(terms),
        "outside": outside,
        "accuracies": _accuracies(run),
        "measured": {"Measured on": ", ".join(filter(None, (examples, classes))), "Weights": str(run.test.get("weights", ""))},
    }


def _promise(run: Run) -> tuple[str, str]:
    if run.epsilon is None:
        return "no ε", "trained without clipping and noise"
    spent, delta = round_up(run.epsilon), f"at δ = {run.privacy['delta']:g}"
    if not run.private:
        return "no ε", f"fixed seed; {spent} {delta} without it"
    return f"ε = {spent}", delta if run.unit == "example" else f"for a {run.unit}, {delta}"


def _accuracies(run: Run) -> list[tuple[str, str]]:
    """The accuracy of the run, what always naming the most frequent class gets, and the worst class."""
    if run.accuracy is None:
        return []
    numbers = [(f"{100 * run.accuracy[0]:.2f} %", run.accuracy[1])]
    perplexity = run.test.get("test_perplexity")
    if is_number(perplexity):
        numbers.append((f"{perplexity:.2f}", "test perplexity"))
    majority = run.test.get("majority_accuracy")
    if is_number(majority):
        numbers.append((f"{100 * majority:.2f} %", "for always naming the most frequent class"))
    known = [(name, float(value)) for name, value in run.recall.items() if is_number(value)]
    if known:
        name, value = min(known, key=lambda one: one[1])
        numbers.append((f"{100 * value:.2f} %", f"recall of {name}, the worst class"))
    return numbers


def _trained_on(run: Run) -> str:
    """How many examples or users the run was trained on, which is public; empty if it is not recorded."""
    count = run.ledger.plan.dataset_size if run.ledger is not None else run.statistics.get("dataset_size")
    return f"{count:,} {run.unit}s" if count else ""


def _chosen(run: Run) -> str:
    """The hyperparameters that a search chose, of a run that is the result of one; else empty."""
    flat = _flat(run.settings)
    searched = dict.fromkeys(key.removeprefix("tune.") for key in flat if key.startswith("tune."))
    names = dict.fromkeys(re.sub(r"\.(low|high|count|spacing)$", "", key) for key in searched)
    return ", ".join(f"{name} = {flat[name]}" for name in names if name in flat)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _summary(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """A column per run; what none of them recorded is left out."""
    columns = []
    for run in runs:
        seconds, batch, state = run.training_seconds, run.expected_batch, ""
        speed = batch * run.evaluations[-1]["step"] / seconds if seconds and batch and run.evaluations else None
        if run.optimizer_state is not None:
            own, adam = run.optimizer_state
            state = f"{8 * own / adam:.2f} B per parameter, {100 * own / adam:.0f} % of Adam's"
        lost = f", {run.lost:,} of them spent and lost" if run.lost else ""
        columns.append(
            {
                "Folder": run.name,
                "Private": cell("yes") if run.private else cell("no", run.stamp.removeprefix("not private: ")),
                "ε": cell(*_promise(run)),
                "Accuracy": cell(f"{100 * run.accuracy[0]:.2f} %", run.accuracy[1]) if run.accuracy else "",
                "Date": "" if run.last_activity is None else f"{run.last_activity:%Y-%m-%d}",
                "Method": run.method,
                "Model, data": ", ".join(str(run.settings[key]) for key in ("model", "data") if key in run.settings),
                "Chosen by a search": _chosen(run),
                "Trained on": _trained_on(run),
                "Steps": f"{run.steps:,} of {run.steps_planned:,}{lost}",
                "State": run.state,
                "Training time": "" if seconds is None else f"about {duration(seconds)}",
                "Throughput": "" if speed is None else f"{float(f'{speed:.1e}'):,.0f} expected {run.unit}s/s",
                "Optimizer state": state,
            }
        )
    names = [name for name in columns[0] if any(column[name] for column in columns)]
    lines = [[name, *(column[name] or cell("not recorded", faint=True) for column in columns)] for name in names]
    return Table.of("summary", "Summary", ["", *(labels if len(runs) > 1 else [runs[0].name])], lines, words=True)


def _recall(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """Recall with a row per class and a column per run; None if no run recorded it."""
    classes = dict.fromkeys(name for run in runs for name in run.recall)
    lines = [[name, *(_percent(run.recall.get(name)) for run in runs)] for name in classes]
    note = "Recall: of the test examples of a class, the share that the model gives this class."
    if len(runs) > 1:
        return Table.of("recall", "Recall by class", ["class", *labels], lines, note=f"{note} In %.") if lines else None
    return Table.of("recall", "Recall by class", ["class", "recall (%)"], lines, note=note) if lines else None


def _percent(value: Any) -> Cell:
    return cell(f"{100 * value:.1f}") if is_number(value) else cell("none", faint=True)


_COLUMNS = {
    "ε": ("epsilon", round_up),
    "validation accuracy (%)": ("validation_accuracy", lambda value: f"{100 * value:.2f}"),
    "validation loss (nats)": ("validation_loss", lambda value: f"{value:.4f}"),
    "averaged: accuracy (%)": ("ema_validation_accuracy", lambda value: f"{100 * value:.2f}"),
    "averaged: loss (nats)": ("ema_validation_loss", lambda value: f"{value:.4f}"),
    "learning rate": ("learning_rate", lambda value: f"{value:.4g}"),
}


def _evaluations(run: Run, number: int, label: str) -> Table | None:
    """A row per evaluation: the data of the learning curves."""
    kept = {head: what for head, what in _COLUMNS.items() if any(what[0] in one for one in run.evaluations)}
    if not kept:
        return None
    rates, lines = dict(run.throughput), []
    for one in run.evaluations:
        figures = [write(one[name]) if name in one else "" for name, write in kept.values()]
        rate = f"{rates[one['step']]:,.0f}" if one["step"] in rates else ""
        lines.append([f"{one['step']:,}", *figures, *([rate] if rates else [])])
    header = ["step", *kept, *([f"{run.unit}s/s (expected)"] if rates else [])]
    return Table.of(f"evaluations-{number}", f"Evaluations of {label}", header, lines)


def _memory(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """Optimizer state compared with Adam's, and peak memory."""
    lines: list[list[str]] = []
    for run, label in zip(runs, labels, strict=True):
        if run.optimizer_state is not None:
            (own, adam), found = run.optimizer_state, run.statistics
            peak = found.get("peak_memory_bytes")
            told = f"{in_bytes(peak)} of {found['peak_memory_of']}" if peak else ""
            counts = [f"{found['parameters']:,}", f"{found['trained_parameters']:,}"]
            lines.append([label, *counts, in_bytes(own), in_bytes(adam), f"{100 * own / adam:.1f} %", told])
    header = ["run", "parameters", "of these trained", "optimizer state", "Adam's would be", "share of Adam's", "peak memory"]
    if not any(line[-1] for line in lines):  # as of a search, whose runs it would tell about
        header, lines = header[:-1], [line[:-1] for line in lines]
    note = (
        "Adam keeps two float32 moments, 8 bytes per trained parameter. Peak memory of a process includes data and libraries."
    )
    return Table.of("memory", "Memory", header, lines, note=note) if lines else None


def _settings(runs: Sequence[Run], labels: Sequence[str]) -> Table | None:
    """All settings of the recipes; those in which runs differ are bold."""
    flat = [_flat(run.settings) for run in runs]
    lines: list[list[object]] = []
    for key in dict.fromkeys(key for one in flat for key in one):
        values = [str(one.get(key, "")) for one in flat]
        lines.append([key, *(cell(value, best=len(set(values)) > 1) for value in values)])
    header = ["setting", *(labels if len(runs) > 1 else ["value"])]
    note = "Settings in which the runs differ are bold." if len(runs) > 1 else ""
    return Table.of("settings", "Settings", header, lines, note=note, words=True) if lines else None


def _audit(content: Mapping[str, Any], name: str) -> Table:
    """Findings of an audit: claimed ε, lower bound, and the bound of a perfect attack."""
    lines: list[list[object]] = []
    for one in content["findings"]:
        reach = "within the claim" if one["claim"] < one["largest"] else "claim out of reach"
        shown = [f"ε ≥ {one['bound']:.2f}", f"{one['claim']:.2f}", f"{one['delta']:g}", f"ε ≥ {one['largest']:.2f}"]
        verdict = "claim refuted" if one["violated"] else reach
        lines.append([cell(one["name"], one["question"]), verdict, *shown, confidence_in_words(one["confidence"])])
    header = ["audit", "verdict", "shown", "claimed ε", "at δ", "a perfect attack shows", "confidence"]
    note = "A claim is out of reach if even a perfect attack of this size shows less."
    return Table.of(name, "Audits", header, lines, note=note)
