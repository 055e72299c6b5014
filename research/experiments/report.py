"""Table and figures of a sweep: what its folder's ``experiment.json`` and ``results.jsonl`` say, beside the paper's values."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

EXPERIMENT, RESULTS = "experiment.json", "results.jsonl"
SMOOTHED_OVER = 10
"""Points of the centred rolling mean of validation losses, as in the paper."""

Cell = Mapping[str, Any]


@dataclass(frozen=True)
class Summary:
    """Middle and range of the repeats of a cell."""

    middle: float
    low: float
    high: float
    seeds: int


class Sweep:
    """A study with its results so far. ``rows`` and ``columns`` name the keys of a cell that span the table."""

    def __init__(self, study: Mapping[str, Any], outcomes: Sequence[Mapping[str, Any]]) -> None:
        self.name, self.title = str(study["name"]), str(study["title"])
        self.rows, self.columns = tuple(study["rows"]), tuple(study["columns"])
        self.cells: list[Cell] = list(study["cells"])
        self.figures: list[Mapping[str, Any]] = list(study["figures"])
        self.notes, self.command, self.unit = list(study["notes"]), str(study["command"]), str(study["unit"])
        self.paper = {key_of(one["cell"]): (float(one["value"]), one.get("spread")) for one in study["paper"]}
        self.paper_source = str(study["paper_source"])
        self._middle = {"median": statistics.median, "mean": statistics.mean}[study["middle"]]
        self.outcomes = {(key_of(one["cell"]), one["repeat"]): one for one in outcomes}  # of the same run the last counts

    @classmethod
    def read(cls, folder: str | Path) -> Sweep:
        """Read a sweep's folder. Lines of results that a crash cut off are skipped."""
        folder = Path(folder)
        return cls(json.loads((folder / EXPERIMENT).read_text("utf-8")), list(lines_of(folder / RESULTS)))

    def of(self, cell: Cell) -> list[Mapping[str, Any]]:
        """The repeats of a cell that have a value, in their order."""
        wanted = key_of(cell)
        found = [one for (key, _), one in sorted(self.outcomes.items(), key=lambda item: item[0][1]) if key == wanted]
        return [one for one in found if one["value"] is not None]

    def summary(self, cell: Cell) -> Summary | None:
        """Median (or mean), smallest, largest and number of the cell's values; None if there is none."""
        values = [one["value"] for one in self.of(cell)]
        return Summary(self._middle(values), min(values), max(values), len(values)) if values else None

    @cached_property
    def method_key(self) -> str:
        """The key that distinguishes the lines of a figure."""
        return "method" if "method" in (*self.rows, *self.columns) else (*self.columns, *self.rows)[0]

    def values_of(self, key: str) -> list[Any]:
        """The values of a key, in the order of the cells."""
        return list(dict.fromkeys(cell[key] for cell in self.cells))

    def curve(self, cell: Cell) -> list[tuple[float, float]]:
        """Steps and smoothed validation losses of the run with the median value; of an even number, the worse of two."""
        ranked = sorted(self.of(cell), key=lambda one: one["value"])
        points = ranked[(len(ranked) - 1) // 2].get("curve", []) if ranked else []
        return list(zip((one[0] for one in points), rolling_mean([one[1] for one in points], SMOOTHED_OVER), strict=True))


def key_of(cell: Cell) -> frozenset[tuple[str, Any]]:
    """A cell as a hashable key.

    >>> key_of({"method": "DP-SGD", "σ": 3}) == key_of({"σ": 3.0, "method": "DP-SGD"})
    True
    """
    return frozenset(cell.items())


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of results; one that a crash cut off is skipped."""
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def rolling_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred rolling mean over ``window`` values; in an even window the outermost two have half weight.

    Towards the ends the window shrinks symmetrically, so that a straight line is left unchanged.

    >>> rolling_mean([1.0, 2.0, 3.0, 8.0], 2)
    [1.0, 2.0, 4.0, 8.0]
    """
    means = []
    for index, value in enumerate(values):
        reach = min(window // 2, index, len(values) - 1 - index)
        inside = list(values[index - reach : index + reach + 1])
        ends = (inside[0] + inside[-1]) / 2 if reach and 2 * reach == window else 0.0
        means.append((sum(inside) - ends) / (window if ends else 2 * reach + 1) if reach else value)
    return means


def markdown(sweep: Sweep) -> str:
    """The main table: middle and range of each cell, and the paper's value."""
    across = _distinct(sweep, sweep.columns)
    header = [*sweep.rows, *(", ".join(map(str, place.values())) for place in across)]
    lines = [_row(header), "|" + ":---|" * len(sweep.rows) + "---:|" * len(across)]
    known = [key_of(cell) for cell in sweep.cells]
    for place in _distinct(sweep, sweep.rows):
        cells = [{**place, **column} for column in across]
        entries = [_entry(sweep, cell) if key_of(cell) in known else "–" for cell in cells]
        if any(sweep.summary(cell) or key_of(cell) in sweep.paper for cell in cells):
            lines.append(_row([*map(str, place.values()), *entries]))
    return "\n".join(lines)


def _row(entries: Sequence[str]) -> str:
    return "| " + " | ".join(entry.replace("|", "\\|") for entry in entries) + " |"


def _distinct(sweep: Sweep, keys: Sequence[str]) -> list[dict[str, Any]]:
    found = ({key: cell[key] for key in keys} for cell in sweep.cells)
    return list({key_of(one): one for one in found}.values())


def _entry(sweep: Sweep, cell: Cell) -> str:
    ours, theirs = sweep.summary(cell), sweep.paper.get(key_of(cell))
    shown = "not run" if ours is None else _written(sweep, ours.middle)
    if ours is not None and ours.seeds > 1:
        shown += f" ({_written(sweep, ours.low)}–{_written(sweep, ours.high)}, {ours.seeds} seeds)"
    return shown if theirs is None else f"{shown}; paper {_written(sweep, theirs[0])}"


def _written(sweep: Sweep, value: float) -> str:
    return f"{value:.1f}" if sweep.unit == "%" else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def write_report(folder: str | Path) -> list[Path]:
    """Write ``table.md`` and the study's figures (PNG and PDF) into a sweep's folder; returns their paths."""
    folder = Path(folder)
    sweep = Sweep.read(folder)
    notes = "".join(f"\n- {note}" for note in sweep.notes)
    told = f"# {sweep.title}\n\n`{sweep.command}`\n\n{markdown(sweep)}\n{notes}\n"
    (folder / "table.md").write_text(told, encoding="utf-8")
    written = [folder / "table.md"]
    for wanted in sweep.figures:
        figure = {"lines": draw_lines, "curves": draw_curves}[wanted["kind"]](sweep, wanted)
        for ending in ("png", "pdf"):
            written.append(folder / f"{sweep.name}-{wanted['kind']}.{ending}")
            figure.savefig(written[-1], dpi=150)
    return written


def _panels(sweep: Sweep, without: Sequence[str]) -> tuple[Any, Iterator[tuple[Any, list[Cell]]]]:
    """A figure with a panel for each combination of the other keys, and the axes with their cells."""
    from matplotlib.figure import Figure

    groups: dict[str, list[Cell]] = {}
    for cell in sweep.cells:
        name = ", ".join(f"{key} = {value}" for key, value in cell.items() if key not in without)
        groups.setdefault(name, []).append(cell)
    columns = min(3, len(groups))
    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(5 * columns, 4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).flat

    def panels() -> Iterator[tuple[Any, list[Cell]]]:
        for one, (name, cells) in zip(axes, groups.items(), strict=False):
            one.set_title(name)
            one.grid(alpha=0.3)
            yield one, cells
            if one.get_legend_handles_labels()[0]:
                one.legend(fontsize=8)

    return figure, panels()


def draw_lines(sweep: Sweep, wanted: Mapping[str, Any]) -> Any:
    """Middles over ``x``, a line per method, bars from the smallest to the largest value; the paper's hollow and dashed."""
    x = wanted["x"]
    figure, panels = _panels(sweep, (x, sweep.method_key))
    for axes, cells in panels:
        for number, method in enumerate(sweep.values_of(sweep.method_key)):
            own = [one for one in cells if one[sweep.method_key] == method]
            found = [(one[x], summary) for one in own if (summary := sweep.summary(one)) is not None]
            if found:
                reach = [[s.middle - s.low for _, s in found], [s.high - s.middle for _, s in found]]
                look = {"color": f"C{number}", "label": method, "marker": "o", "capsize": 3}
                axes.errorbar([place for place, _ in found], [s.middle for _, s in found], yerr=reach, **look)
            paper = [(one[x], sweep.paper[key_of(one)][0]) for one in own if key_of(one) in sweep.paper]
            if paper:
                axes.plot(*zip(*paper, strict=True), linestyle="--", marker="o", mfc="none", color=f"C{number}")
        axes.set(xlabel=x, ylabel=f"test accuracy ({sweep.unit})")
    return figure


def draw_curves(sweep: Sweep, wanted: Mapping[str, Any]) -> Any:
    """A panel per value of ``panel``: validation loss over steps of each method's median run, smoothed."""
    figure, panels = _panels(sweep, (sweep.method_key,))
    for axes, cells in panels:
        for cell in cells:
            if points := sweep.curve(cell):
                axes.plot(*zip(*points, strict=True), label=cell[sweep.method_key])
        axes.set(xlabel="step", ylabel="validation loss (nats)")
    return figure
