"""The sections of a report about one or several runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dp_microadam.ledger.statement import round_up, statement_parts
from dp_microadam.workbench.reporting import run_tables
from dp_microadam.workbench.reporting.accuracy import accuracy_html, recall_table
from dp_microadam.workbench.reporting.figures import Figure
from dp_microadam.workbench.reporting.page import Section
from dp_microadam.workbench.reporting.palette import css_variables
from dp_microadam.workbench.reporting.run import Run
from dp_microadam.workbench.reporting.run_figures import labels_of, run_figures, styles_of
from dp_microadam.workbench.reporting.tables import Table


@dataclass(frozen=True)
class Part:
    """Sections of a page, with their figures and tables, which are also written as files."""

    title: str
    lead: str
    sections: tuple[Section, ...]
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]


def run_part(runs: Sequence[Run]) -> Part:
    """The part of a report about ``runs``."""
    figures = run_figures(runs)
    labelled = list(enumerate(zip(runs, labels_of(runs), strict=True), start=1))
    summary = run_tables.summary(runs)
    evaluations = _known(run_tables.evaluations(run, number=number, label=label) for number, (run, label) in labelled)
    measured = _known(run_tables.diagnostics(run, number=number, label=label) for number, (run, label) in labelled)
    audits = [run_tables.audit(run.audit, name=f"audit-{number}") for number, (run, _) in labelled if run.audit]
    recalls = _known([recall_table(runs)])
    accuracy = Section("accuracy", "Accuracy", accuracy_html(runs, recalls[0] if recalls else None))
    memory, settings = _known([run_tables.memory(runs)]), _known([run_tables.settings(runs)])
    statements = [_statement(run, label, len(runs)) for _, (run, label) in labelled]
    state = _pictures(figures["memory"], "The optimizer's state was not recorded") + _html(memory)
    overview = Section("summary", "The run" if len(runs) == 1 else "Runs", _overview(runs))
    privacy = Section("privacy", "Privacy statement", "\n".join(statements))
    # The first reader is responsible for the data. Of several runs, the cards say which of them are private.
    first = [privacy, accuracy, overview] if len(runs) == 1 else [overview, privacy, accuracy]
    sections = [
        *first,
        Section("learning", "Validation loss and accuracy", _learning(runs, figures["learning"], evaluations)),
        Section("budget", "Privacy budget", _budget(runs, figures["budget"])),
        Section("course", "Learning rate and throughput", _course(figures["course"])),
        Section("memory", "Memory", state),
        *([Section("diagnostics", "Diagnostics of MicroAdam", _html(measured))] if measured else []),
        *([Section("audit", "Audit", _audits(runs, audits))] if audits else []),
        *([Section("settings", "Settings", _html(settings))] if settings else []),
    ]
    drawn = tuple(figure for several in figures.values() for figure in several)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    tables = (summary, *recalls, *evaluations, *memory, *measured, *audits, *settings)
    return Part(title, _lead(runs), tuple(sections), drawn, tables)


def _known(tables: Iterable[Table | None]) -> list[Table]:
    return [table for table in tables if table is not None]


def _html(tables: Sequence[Table]) -> str:
    return "\n".join(table.html() for table in tables)


def _lead(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return escape("; ".join(dict.fromkeys(run.method for run in runs)))
    run = runs[0]
    what = " on ".join(str(run.settings[key]) for key in ("model", "data") if key in run.settings)
    on = f" on {run.last_activity:%Y-%m-%d}" if run.state == "finished" and run.last_activity is not None else ""
    return escape(", ".join(part for part in (run.method, what, run_tables.trained_on(run), f"{_state(run)}{on}") if part))


def _state(run: Run) -> str:
    """The state of the run, with progress and time of the last activity if it is not finished."""
    if run.state.startswith("finished") or run.last_activity is None:
        return run.state
    return f"{run.state}: {run.steps:,} of {run.steps_planned:,} steps, last activity {run.last_activity:%Y-%m-%d %H:%M} UTC"


def _overview(runs: Sequence[Run]) -> str:
    """A card per run; of a single one without the numbers that stand above it. The same as a table is among the files."""
    names = css_variables()
    colours = [f"var({names[style.colour][0]})" for style in styles_of(runs)]
    shown = [_card(run, colour, numbers=len(runs) > 1) for run, colour in zip(runs, colours, strict=True)]
    return '<div class="cards">\n' + "\n".join(shown) + "\n</div>"


def _card(run: Run, colour: str, *, numbers: bool) -> str:
    shown = [_accuracy(run), _promise(run)] if numbers else []
    if run.perplexity is not None:
        shown.insert(0, (f"{run.perplexity:.2f}", "test perplexity"))
    figures = "".join(f"<div><b>{escape(big)}</b><span>{escape(small)}</span></div>" for big, small in shown)
    facts = {
        "Date": "" if run.last_activity is None else f"{run.last_activity:%Y-%m-%d}",
        "Method": run.method,
        "Model, data": ", ".join(str(run.settings[key]) for key in ("model", "data") if key in run.settings),
        "Chosen by a search": run_tables.chosen_in_words(run),
        "Trained on": run_tables.trained_on(run),
        "Steps": run_tables.steps_in_words(run),
        "State": _state(run),
        "Training time": "" if run.training_seconds is None else str(run_tables.about(run.training_seconds)),
        "Optimizer state": _optimizer_state(run),
    }
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items() if text)
    badge = '<span class="badge">private</span>' if run.private else '<span class="badge bad">not private</span>'
    return f"""<article class="card">
<header><h3><i class="key" style="background:{colour}"></i>{escape(run.name)}</h3>{badge}</header>
{f'<div class="numbers">{figures}</div>' if figures else ""}
<dl>{rows}</dl>
</article>"""


def _optimizer_state(run: Run) -> str:
    if run.optimizer_state is None:
        return ""
    own, adam = run.optimizer_state
    return f"{8 * own / adam:.2f} B per parameter, {100 * own / adam:.0f} % of Adam's"


def _accuracy(run: Run) -> tuple[str, str]:
    if run.accuracy is None:
        return "–", "accuracy was not measured"
    value, what = run.accuracy
    return f"{100 * value:.2f} %", what


def _promise(run: Run) -> tuple[str, str]:
    if run.epsilon is None:
        return "no ε", "trained without clipping and noise"
    spent = f"{round_up(run.epsilon)}"
    if not run.private:
        return "no ε", f"fixed seed; {spent} at δ = {run.privacy['delta']:g} without it"
    return f"ε = {spent}", f"{run.whom}{', ' * bool(run.whom)}at δ = {run.privacy['delta']:g}"


def _pictures(figures: Sequence[Figure], otherwise: str) -> str:
    if not figures:
        return f'<p class="note">{escape(otherwise)}.</p>'
    return '<div class="figures">\n' + "\n".join(figure.html() for figure in figures) + "\n</div>"


def _learning(runs: Sequence[Run], figures: Sequence[Figure], tables: Sequence[Table]) -> str:
    missing = [run.name for run in runs if not run.evaluations]
    words = f'<p class="note">{escape("No evaluation yet: " + ", ".join(missing))}.</p>' if missing else ""
    words += f'<p class="note">{escape(run_tables.HELD_OUT)}</p>\n' if tables else ""
    return _pictures(figures, "Nothing was evaluated on validation data") + words + _html(tables)


def _budget(runs: Sequence[Run], figures: Sequence[Figure]) -> str:
    without = [label for run, label in zip(runs, labels_of(runs), strict=True) if run.ledger is None]
    words = (
        f'<p class="note">{escape(", ".join(without))}: no ε, since nothing was clipped and no noise was added.</p>'
        if without
        else ""
    )
    private = [run for run in runs if run.private]
    if len(private) > 1:
        words += (
            '<p class="note">Each ε is that of its run alone. Runs on the same data add up; '
            "<code>dp-microadam budget RUN…</code> composes them.</p>"
        )
    return (_pictures(figures, "No step was taken") if figures or not without else "") + words


def _course(figures: Sequence[Figure]) -> str:
    words = "Throughput is the expected batch size times steps per second; realised batch sizes are private."
    return _pictures(figures, "Learning rate and time were not recorded") + (f'<p class="note">{words}</p>' if figures else "")


def _statement(run: Run, label: str, count: int) -> str:
    big, small = _promise(run)
    number = f'<div class="numbers"><div><b>{escape(big)}</b><span>{escape(small)}</span></div></div>'
    heading = f"<h3>{escape(label)}</h3>" if count > 1 else number
    kind = "" if run.private else " bad"
    if run.ledger is None:
        words = run.words or f"NOT PRIVATE: {run.stamp}. No guarantee of any kind holds for this model."
        return f'{heading}<p class="verdict{kind}">{escape(words.strip())}</p>'
    opening, facts, outside = statement_parts(dict(run.privacy))
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    items = "".join(f"<li>{escape(item)}</li>" for item in outside)
    return f"""{heading}<p class="verdict{kind}">{escape(" ".join(opening.split()))}</p>
<div class="card"><dl>{rows}</dl></div>
<p>Outside the guarantee:</p>
<ul>{items}</ul>"""


def _audits(runs: Sequence[Run], tables: Sequence[Table]) -> str:
    audited = [run for run in runs if run.audit]
    return "\n".join(audit_html(run.audit or {}, table) for run, table in zip(audited, tables, strict=True))


def audit_html(content: Mapping[str, Any], table: Table) -> str:
    """The result of an audit as HTML: its summary and the table of findings."""
    words = str(content.get("summary", ""))
    kind = " bad" if content.get("violated") else ""
    return f'<p class="verdict{kind}">{escape(words[:1].upper() + words[1:])}.</p>\n{table.html()}'
