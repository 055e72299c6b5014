"""The sections of a report about a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from dp_microadam.ledger.statement import round_up
from dp_microadam.workbench.reporting.figures import Figure
from dp_microadam.workbench.reporting.page import Section
from dp_microadam.workbench.reporting.report import REPORT, write_parts
from dp_microadam.workbench.reporting.run_page import Part
from research.experiments.results import Sweep
from research.experiments.sweep_figures import sweep_figures
from research.experiments.sweep_tables import sweep_tables

_SCALES = {
    "paper": "at the paper's scale",
    "cpu": "scaled down to run on a CPU: not comparable with the paper's figures as such",
}


def write_sweep(folder: str | Path) -> list[Path]:
    """Write tables, figures and ``report.html`` of a sweep into its folder; returns the paths of the files.

    Raises:
        InputError: if there is no sweep in ``folder``.
    """
    return write_parts([sweep_part(Sweep.read(folder))], Path(folder) / REPORT)


def sweep_part(sweep: Sweep) -> Part:
    """The part of a report about a sweep."""
    figures, tables = sweep_figures(sweep), sweep_tables(sweep)
    main, details, *data = tables
    name = sweep.slug
    sections = [
        Section(f"{name}-about", "What was asked", _about(sweep)),
        Section(f"{name}-results", "Results", main.html()),
        *([Section(f"{name}-figures", "Figures", _pictures(figures))] if figures else []),
        Section(f"{name}-privacy", "Privacy of these runs", _privacy(sweep)),
        Section(f"{name}-details", "Data", "\n".join(table.html() for table in (details, *data))),
    ]
    return Part(sweep.title, escape(sweep.question), tuple(sections), tuple(figures), tuple(tables))


def _pictures(figures: Sequence[Figure]) -> str:
    """Figures of one panel side by side, then each of several panels under its own heading."""
    single = [figure for figure in figures if len(figure.panels) == 1]
    shown = ['<div class="figures">\n' + "\n".join(figure.html() for figure in single) + "\n</div>"] if single else []
    for figure in figures:
        if len(figure.panels) > 1:
            note = f'<p class="note">{escape(figure.note)}</p>' if figure.note else ""
            shown.append(f'<h3>{escape(figure.title)}</h3>\n<div class="figures">\n{figure.html()}\n</div>\n{note}')
    return "\n".join(shown)


def _about(sweep: Sweep) -> str:
    done = sum(sweep.summary(cell) is not None for cell in sweep.cells)
    facts = {
        "Measured": sweep.value_with_unit + {"lower": "; less is better", "higher": "; more is better"}.get(sweep.better, ""),
        "Scale": _SCALES.get(sweep.scale, sweep.scale),
        "Done": f"{done} of {len(sweep.cells)} cells, {len(sweep.outcomes)} runs",
        "Compared with": sweep.published_source if sweep.published else "",
    }
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items() if text)
    command = f"<dt>Command</dt><dd><code>{escape(sweep.command)}</code></dd>" if sweep.command else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in sweep.notes)
    return f'<div class="card"><dl>{rows}{command}</dl></div>' + (f"<ul>{notes}</ul>" if notes else "")


def _privacy(sweep: Sweep) -> str:
    """The privacy guarantee of each run alone, and a note that all runs together spend more."""
    private = [one for one in sweep.outcomes if one.private and one.epsilon is not None and one.delta is not None]
    others = len(sweep.outcomes) - len(private)
    if private:
        epsilon = round_up(max(one.epsilon or 0.0 for one in private))
        deltas = ", ".join(dict.fromkeys(f"{one.delta:g}" for one in private))
        words = f"{len(private)} of {len(sweep.outcomes)} runs were private, each by itself with ε ≤ {epsilon} at δ = {deltas}."
    else:
        words = "None of these runs was private." if sweep.outcomes else "Nothing was run yet."
    if others and private:
        words += f" {others} {'was' if others == 1 else 'were'} not: without noise, or with a fixed seed."
    kind = "" if private and not others else " bad"
    together = (
        "<p>All runs of a table on the same data together spend more than each: choosing a setting by such a table is "
        "outside the guarantee of the run that is chosen. <code>dp-microadam budget RUN…</code> composes runs.</p>"
    )
    return f'<p class="verdict{kind}">{escape(words)}</p>' + (together if sweep.outcomes else "")
