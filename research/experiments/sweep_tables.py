"""The tables of a sweep: our results (median, range, seeds), the paper's, and the difference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dp_microadam.ledger.statement import round_up
from dp_microadam.workbench.reporting.formats import duration, is_number, significant
from dp_microadam.workbench.reporting.tables import Cell, Table, cell, file_name
from research.experiments.results import Key, Outcome, Sweep, key_of
from research.experiments.sweep_figures import difference_map, group_ranges, ordered, shown, smoothed_losses
from research.experiments.sweep_saving import savings

NOT_RUN = "not run"

_READING = "Ours: the {}, the smallest to the largest, and the number of seeds."
_READING_OF_COSTS = "Ours: measured on this machine."
_BOLD = " The best of a row, among runs with a privacy budget, is bold."


def sweep_tables(sweep: Sweep) -> list[Table]:
    """The main table, a table with the details of every cell, and the data of the figures."""
    tables = [_matrix(sweep), _details(sweep)]
    for wanted in sweep.figures:
        if wanted["kind"] == "curves":
            tables += _curves(sweep)
        elif wanted["kind"] == "difference":
            tables += [table for other in wanted["minus"] if (table := _difference(sweep, wanted, other)) is not None]
        elif wanted["kind"] == "range":
            tables += _ranges(sweep, wanted["group"])
        elif wanted["kind"] == "saving":
            tables += _saving(sweep, wanted["x"], wanted["beside"])
        elif wanted["kind"] == "final weights":
            tables += _final_weights(sweep)
    return tables


def _matrix(sweep: Sweep) -> Table:
    rows = _distinct(sweep, sweep.rows)
    columns = _distinct(sweep, sweep.columns)
    asked = {key_of(one) for one in sweep.cells}
    lines: list[list[object]] = []
    for row in rows:
        places = [{**row, **column} for column in columns]
        best = sweep.best_of(places)
        lines.append([*(shown(row[key]) for key in sweep.rows), *(_entry(sweep, place, best, asked) for place in places)])
    header = [*sweep.rows, *(", ".join(shown(value) for value in column.values()) for column in columns)]
    note = (
        (_READING.format(sweep.middle) if sweep.trained else _READING_OF_COSTS)
        + (_BOLD if sweep.better != "neither" else "")
        + (f" Paper: {sweep.published_source}; behind it, ours minus the paper's." if sweep.published else "")
    )
    return Table.of(sweep.slug, f"{sweep.title}: {sweep.value_with_unit}", header, lines, labels=len(sweep.rows), note=note)


def _distinct(sweep: Sweep, keys: Sequence[str]) -> list[dict[str, Any]]:
    found = ({key: one[key] for key in keys} for one in sweep.cells)
    return list({key_of(one): one for one in found}.values())


def _entry(sweep: Sweep, place: Mapping[str, Any], best: set[Key], asked: set[Key]) -> Cell:
    """One cell of the main table: our median and range, the paper's value and the difference."""
    paper = _paper_in_words(sweep, place)
    summary = sweep.summary(place)
    if summary is None:
        failed = len(sweep.of(place))
        reason = f"{failed} failed" if failed else NOT_RUN if key_of(place) in asked else "–"
        return cell(reason, *paper, faint=True)
    lines = [sweep.written(summary.middle), *([_spread_in_words(sweep, place)] if sweep.trained else [])]
    return cell(*lines, *paper, best=key_of(place) in best)


def _spread_in_words(sweep: Sweep, place: Mapping[str, Any]) -> str:
    summary = sweep.summary(place)
    assert summary is not None
    failed = len(sweep.of(place)) - summary.seeds
    seeds = f"{summary.seeds} seed{'s' if summary.seeds > 1 else ''}" + (f", {failed} failed" if failed else "")
    if summary.seeds == 1:
        return seeds
    return f"{sweep.written(summary.low)}–{sweep.written(summary.high)}, {seeds}"


def _paper_in_words(sweep: Sweep, place: Mapping[str, Any]) -> list[str]:
    theirs, difference = sweep.paper(place), sweep.difference(place)
    if theirs is None:
        return []
    spread = f" ± {significant(theirs.spread)}" if is_number(theirs.spread) else ""
    behind = f" ({sweep.written(difference, sign=True)})" if difference is not None else ""
    return [f"paper {sweep.written(theirs.value)}{spread}{behind}"]


def _details(sweep: Sweep) -> Table:
    """Table with a row per cell and every value in its own column."""
    keys = (*sweep.rows, *sweep.columns)
    of_paper = ["paper", "paper ±", "difference"] if sweep.published else []
    of_runs = ["ε", "δ", "private", "steps", "model parameters", "time of a run", "date", "commit"]
    header = [*keys, sweep.value_with_unit, "smallest", "largest", "seeds", *of_paper, *of_runs]
    lines = []
    for place in sweep.cells:
        summary = sweep.summary(place)
        ours: list[object] = [NOT_RUN, "", "", 0]
        if summary is not None:
            ours = [*(sweep.written(value) for value in (summary.middle, summary.low, summary.high)), summary.seeds]
        published = _paper_in_columns(sweep, place) if sweep.published else []
        lines.append([*(shown(place[key]) for key in keys), *ours, *published, *_facts(sweep.of(place))])
    title = "Every cell in detail"
    return Table.of(f"{sweep.slug}-details", title, header, lines, labels=len(keys), note=_where(sweep))


def _paper_in_columns(sweep: Sweep, place: Mapping[str, Any]) -> list[str]:
    theirs, difference = sweep.paper(place), sweep.difference(place)
    if theirs is None:
        return ["", "", ""]
    spread = significant(theirs.spread) if is_number(theirs.spread) else ""
    return [sweep.written(theirs.value), spread, "" if difference is None else sweep.written(difference, sign=True)]


def _facts(runs: Sequence[Outcome]) -> list[str]:
    """Properties of the runs of a cell: the largest ε, and medians of the others."""
    if not runs:
        return [""] * 8
    epsilons = [one.epsilon for one in runs if one.epsilon is not None]
    deltas = dict.fromkeys(f"{one.delta:g}" for one in runs if one.delta is not None)
    seconds = [one.seconds for one in runs if one.seconds is not None]
    private = {one.private for one in runs}
    return [
        round_up(max(epsilons)) if epsilons else "none",
        ", ".join(deltas) or "none",
        "yes" if private == {True} else "no" if private == {False} else "some",
        _median_of([one.steps for one in runs]),
        _median_of([one.parameters for one in runs]),
        duration(statistics.median(seconds)) if seconds else "",
        ", ".join(dict.fromkeys(one.date for one in runs if one.date)),
        ", ".join(dict.fromkeys(one.commit for one in runs if one.commit)),
    ]


def _median_of(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return significant(statistics.median(known)) if known else ""


def _where(sweep: Sweep) -> str:
    machines = dict.fromkeys(one.machine for one in sweep.outcomes if one.machine)
    return f"Run on: {'; '.join(machines)}." if machines else ""


def _curves(sweep: Sweep) -> list[Table]:
    """Smoothed validation losses of the median runs: a row per step, a column per method."""
    method = sweep.method_key
    others = [key for key in (*sweep.rows, *sweep.columns) if key != method]
    names = sweep.values_of(method)
    lines: list[list[object]] = []
    for place in _distinct(sweep, others):
        curves = {name: dict(smoothed_losses(sweep, {**place, method: name})) for name in names}
        for step in sorted({step for curve in curves.values() for step in curve}):
            losses = [f"{curve[step]:.4f}" if step in curve else "" for curve in curves.values()]
            lines.append([*(shown(place[key]) for key in others), significant(step), *losses])
    if not lines:
        return []
    header = [*others, "step", *(str(name) for name in names)]
    return [Table.of(f"{sweep.slug}-curves", "Validation loss over steps", header, lines, labels=len(others) + 1)]


def _difference(sweep: Sweep, wanted: Mapping[str, Any], other: str) -> Table | None:
    values = difference_map(sweep, wanted["of"], other, wanted["x"], wanted["y"])
    if not values:
        return None
    across, up = (ordered([place[axis] for place in values]) for axis in (0, 1))
    lines = [
        [shown(y), *(sweep.written(values[x, y], sign=True) if (x, y) in values else NOT_RUN for x in across)]
        for y in reversed(up)
    ]
    header = [f"{wanted['y']} \\ {wanted['x']}", *(shown(x) for x in across)]
    title = f"{wanted['of']} minus {other}: {sweep.value_with_unit}"
    return Table.of(f"{sweep.slug}-difference-{file_name(other)}", title, header, lines)


def _ranges(sweep: Sweep, group: str) -> list[Table]:
    ranges = group_ranges(sweep, group)
    if not ranges:
        return []
    lines = [[name, *(sweep.written(value) for value in ends), count] for name, (*ends, count) in ranges.items()]
    title = f"Worst, median and best {sweep.value_with_unit} by {group}"
    return [Table.of(f"{sweep.slug}-range", title, [group, "worst", "median", "best", "cells"], lines)]


def _saving(sweep: Sweep, x: str, beside: str) -> list[Table]:
    """What equal values cost with the first and the last value of ``beside``, which are compared cell by cell."""
    others = [key for key in (*sweep.rows, *sweep.columns) if key not in (x, beside)]
    lines: list[list[object]] = []
    for one in savings(sweep, x, beside):
        at = float(one.cell[x])
        if one.reached_at == 0:
            place, factor = f"below {shown(one.smallest)}", f"less than {one.smallest / at:.2g}×"
        elif math.isinf(one.reached_at):
            place, factor = f"above {shown(one.largest)}", f"more than {one.largest / at:.2g}×"
        else:
            place, factor = f"{one.reached_at:.0f}", f"{one.reached_at / at:.2g}×"
        values = [sweep.written(one.reference), sweep.written(one.value), sweep.written(one.value - one.reference, sign=True)]
        lines.append([*(shown(one.cell[key]) for key in others), shown(one.cell[x]), *values, place, factor])
    if not lines:
        return []
    first, *_, last = sweep.values_of(beside)
    header = [
        *others,
        x,
        f"{beside} {first}",
        f"{beside} {last}",
        "difference",
        f"{x} for the same with {beside} {first}",
        "ratio",
    ]
    title = f"Where {beside} {first} reaches the same {sweep.value}"
    return [Table.of(f"{sweep.slug}-saving", title, header, lines, labels=len(others) + 1)]


def _final_weights(sweep: Sweep) -> list[Table]:
    """The main table for the weights after the last step, where values are those of an average of the weights."""
    final = replace(
        sweep,
        name=f"{sweep.name}-final-weights",
        title=f"{sweep.title}, weights after the last step",
        outcomes=tuple(replace(one, value=one.final_weights) for one in sweep.outcomes if one.final_weights is not None),
    )
    return [_matrix(final)] if final.outcomes else []
