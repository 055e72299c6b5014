"""The figures of a sweep: values over a setting, validation losses, difference maps, and ranges by method."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dp_microadam.errors import InputError
from dp_microadam.workbench.reporting.figures import (
    WIDTH,
    Figure,
    Panel,
    add_legend,
    draw_line,
    integer_ticks,
    new_figure,
    one_panel,
    shortened,
)
from dp_microadam.workbench.reporting.formats import is_number, significant
from dp_microadam.workbench.reporting.palette import AHEAD, BEHIND, INK, PAPER, Style, styles_for
from dp_microadam.workbench.reporting.tables import file_name
from research.experiments.results import Sweep

SMOOTHED_OVER = 10
"""Points of the centred rolling mean of validation losses, as in the paper."""

_MEASURED = ("parameters", "steps", "epsilon", "seconds")
_STRONGEST = 0.6
_FAR_APART = 20

Cells = Mapping[str, Any]


def sweep_figures(sweep: Sweep) -> list[Figure]:
    """The figures that the experiment specifies; those without results are left out."""
    kinds: dict[str, Callable[[Sweep, Mapping[str, Any]], list[Figure]]] = {
        "lines": _lines,
        "curves": _curves,
        "difference": _differences,
        "range": _range,
        "saving": lambda sweep, wanted: [],  # tables alone
        "final weights": lambda sweep, wanted: [],
    }
    found: list[Figure] = []
    for wanted in sweep.figures:
        if wanted.get("kind") not in kinds:
            raise InputError(f"figure kind {wanted.get('kind')!r} of sweep {sweep.name!r} must be one of {', '.join(kinds)}")
        try:
            found += kinds[wanted["kind"]](sweep, wanted)
        except KeyError as error:
            raise InputError(f"figure {wanted['kind']!r} of sweep {sweep.name!r} needs {error}, which is not there") from None
    return found


def rolling_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred rolling mean over ``window`` values; in an even window the outermost two have half weight.

    Towards the ends the window shrinks symmetrically, so that a straight line is left unchanged: a one-sided mean would bend a
    falling curve.

    >>> rolling_mean([1.0, 2.0, 3.0, 8.0], 2)
    [1.0, 2.0, 4.0, 8.0]
    """
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for index, value in enumerate(values):
        reach = min(window // 2, index, len(values) - 1 - index)
        total, count = sums[index + reach + 1] - sums[index - reach], 2 * reach + 1
        if reach and 2 * reach == window:
            total, count = total - (values[index - reach] + values[index + reach]) / 2, window
        means.append(total / count if reach else value)
    return means


def _panels(sweep: Sweep, without: Sequence[str | None]) -> dict[str, list[Cells]]:
    """Cells grouped by all keys except these; the key of a group is its label."""
    groups: dict[str, list[Cells]] = {}
    for cell in sweep.cells:
        name = ", ".join(f"{key} = {shown(value)}" for key, value in cell.items() if key not in without)
        groups.setdefault(name, []).append(cell)
    return groups


def shown(value: Any) -> str:
    """A label of an axis as text."""
    return significant(value) if is_number(value) else str(value)


def _styles(sweep: Sweep) -> dict[str, Style]:
    return styles_for(str(name) for name in sweep.values_of(sweep.method_key))


def _lines(sweep: Sweep, wanted: Mapping[str, Any]) -> list[Figure]:
    """Medians over ``x``, a line per method, bars from the smallest to the largest value; the paper's hollow and dashed.

    ``beside`` names a key each of whose values has a line of its own: the first one dotted and hollow, the others as usual.
    ``log`` says that ``x`` is shown on a logarithmic scale, ``own_scale`` that each panel has a scale of its own.
    """
    x, beside = wanted["x"], wanted.get("beside")
    if beside is not None and not sweep.values_of(beside):
        raise KeyError(beside)
    groups = {
        name: cells
        for name, cells in _panels(sweep, (x, sweep.method_key, beside)).items()
        if any(sweep.summary(cell) or sweep.paper(cell) for cell in cells)
    }
    with_paper = bool(sweep.published)
    note = f"Points are {sweep.middle}s, bars reach from the smallest to the largest seed." + (
        f" Hollow, dashed: {sweep.published_source}." if with_paper else ""
    )
    title = _sentence(f"{sweep.value} over {x}")

    def draw(axes: Any, cells: Sequence[Cells]) -> None:
        _draw_lines(axes, sweep, cells, x, beside)
        if wanted.get("log"):
            _log_scale(axes)

    name, shared = f"{sweep.slug}-lines", not wanted.get("own_scale")
    return _small_multiples(name, title, groups, draw, height=280, note=note, also=_hollow(sweep), shared=shared)


def _hollow(sweep: Sweep) -> dict[str, Any]:
    """The legend entry for the paper's results."""
    if not sweep.published:
        return {}
    from matplotlib.lines import Line2D

    look = Line2D([], [], color=INK, linestyle=(0, (2, 2)), linewidth=1.1, marker="o", markersize=6, markerfacecolor=PAPER)
    return {"paper": look}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _draw_lines(axes: Any, sweep: Sweep, cells: Sequence[Cells], x: str, beside: str | None = None) -> None:
    places, ticks = _places([cell[x] for cell in cells if beside is None or sweep.summary(cell) or sweep.paper(cell)])
    for name, style in _styles(sweep).items():
        for number, value in enumerate(sweep.values_of(beside) if beside else [None]):
            own = [cell for cell in cells if str(cell[sweep.method_key]) == name and (beside is None or cell[beside] == value)]
            label = name if beside is None else f"{name}, {beside} {shown(value)}"
            _draw_line_of_cells(
                axes,
                sweep,
                {places[cell[x]]: cell for cell in own if cell[x] in places},
                style,
                label,
                hollow=beside and not number,
            )
    axes.set_xticks(list(ticks.values()), list(ticks))
    if all(is_number(value) for value in places) and 0 < _FAR_APART * min(places.values()) < max(places.values()):
        _log_scale(axes)
    axes.set_xlabel(x)
    axes.set_ylabel(sweep.value_with_unit)


def _draw_line_of_cells(
    axes: Any, sweep: Sweep, cells: Mapping[float, Cells], style: Style, label: str, *, hollow: object = False
) -> None:
    """Cells by their place on the axis: a line of ours, and one of the paper's."""
    ours = [(place, found) for place, cell in sorted(cells.items()) if (found := sweep.summary(cell)) is not None]
    theirs = [(place, paper.value) for place, cell in sorted(cells.items()) if (paper := sweep.paper(cell)) is not None]
    if theirs:
        axes.plot(
            *zip(*theirs, strict=True), color=style.colour, linestyle=(0, (2, 2)), linewidth=1.1, marker=style.marker,
            markersize=6, markerfacecolor=PAPER, markeredgecolor=style.colour, label=f"{label}, paper" if not ours else None,
        )  # fmt: skip
    if ours:
        where = [place for place, _ in ours]
        reach = [[found.middle - found.low for _, found in ours], [found.high - found.middle for _, found in ours]]
        axes.errorbar(where, [found.middle for _, found in ours], yerr=reach, fmt="none", ecolor=style.colour, capsize=3)
        look = replace(style, dash=(1, 2)) if hollow else style
        draw_line(axes, [(place, found.middle) for place, found in ours], look, label, markers=True)
        if hollow:
            axes.lines[-1].set(markerfacecolor=PAPER, markeredgecolor=style.colour, markeredgewidth=1.2)


def _log_scale(axes: Any) -> None:
    ticks, labels = axes.get_xticks(), [text.get_text() for text in axes.get_xticklabels()]
    axes.set_xscale("log")
    axes.set_xticks(ticks, labels)
    axes.minorticks_off()


def _places(values: Sequence[Any]) -> tuple[dict[Any, float], dict[str, float]]:
    """Positions of values on an axis, and its ticks: numbers to scale, other labels equidistant."""
    distinct = list(dict.fromkeys(values))
    if all(is_number(value) for value in distinct):
        places = {value: float(value) for value in distinct}
    else:
        places = {value: float(number) for number, value in enumerate(distinct)}
    return places, {shown(value): place for value, place in places.items()}


def _curves(sweep: Sweep, wanted: Mapping[str, Any]) -> list[Figure]:
    """A panel per value of ``panel``: validation loss over steps of each method's median run, smoothed."""
    groups = {
        name: cells
        for name, cells in _panels(sweep, (sweep.method_key,)).items()
        if any((run := sweep.median_run(cell)) is not None and run.curve for cell in cells)
    }
    if not sweep.values_of(wanted["panel"]):
        raise KeyError(wanted["panel"])
    note = f"The run with the median {sweep.value} of each cell; centred rolling mean of {SMOOTHED_OVER} evaluations."

    def draw(axes: Any, cells: Sequence[Cells]) -> None:
        _draw_losses(axes, sweep, cells)

    return _small_multiples(f"{sweep.slug}-curves", "Validation loss over steps", groups, draw, height=250, note=note)


def smoothed_losses(sweep: Sweep, cell: Cells) -> list[tuple[float, float]]:
    """Steps and smoothed validation losses of the cell's median run; empty if there is none."""
    run = sweep.median_run(cell)
    points = [(point[0], point[1]) for point in run.curve if is_number(point[1])] if run is not None else []
    smooth = rolling_mean([loss for _, loss in points], SMOOTHED_OVER)
    return [(step, loss) for (step, _), loss in zip(points, smooth, strict=True)]


def _draw_losses(axes: Any, sweep: Sweep, cells: Sequence[Cells]) -> None:
    styles = _styles(sweep)
    for cell in cells:
        name = str(cell[sweep.method_key])
        draw_line(axes, smoothed_losses(sweep, cell), styles[name], name)
    integer_ticks(axes)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss (nats)")


def _differences(sweep: Sweep, wanted: Mapping[str, Any]) -> list[Figure]:
    """A difference map over ``x`` and ``y`` for each method in ``minus``."""
    figures = []
    for other in wanted["minus"]:
        values = difference_map(sweep, wanted["of"], other, wanted["x"], wanted["y"])
        if values:
            figures.append(_draw_difference(sweep, wanted, other, values))
    return figures


def difference_map(sweep: Sweep, of: str, minus: str, x: str, y: str) -> dict[tuple[Any, Any], float]:
    """Median of ``of`` minus that of ``minus`` by (x, y), where both have results."""
    found: dict[tuple[Any, Any], list[float]] = {}
    for cell in sweep.cells:
        if str(cell[sweep.method_key]) != of:
            continue
        opponent = {**cell, sweep.method_key: minus}
        ours, theirs = sweep.summary(cell), sweep.summary(opponent)
        if ours is not None and theirs is not None:
            found.setdefault((_coordinate(sweep, cell, x), _coordinate(sweep, cell, y)), []).append(ours.middle - theirs.middle)
    return {place: statistics.median(values) for place, values in found.items()}


def _coordinate(sweep: Sweep, cell: Cells, key: str) -> Any:
    """The value of ``key`` in the cell, or the median that its runs recorded."""
    if key in cell:
        return cell[key]
    if key not in _MEASURED:
        raise KeyError(key)
    values = [value for one in sweep.of(cell) if is_number(value := getattr(one, key))]
    return statistics.median(values) if values else math.nan


def _draw_difference(sweep: Sweep, wanted: Mapping[str, Any], other: str, values: Mapping[tuple[Any, Any], float]) -> Figure:
    across, up = (ordered([place[axis] for place in values]) for axis in (0, 1))
    of, better = wanted["of"], 1 if sweep.better == "higher" else -1
    figure, grid = new_figure(max(140.0, 80 + 34 * len(up)), width=max(WIDTH, 110 + 52 * len(across)))
    axes = grid[0, 0]
    axes.grid(visible=False)
    largest = max(abs(value) for value in values.values()) or 1.0
    from matplotlib.patches import Patch, Rectangle

    for (x, y), value in values.items():
        column, row = across.index(x), up.index(y)
        colour, strength = AHEAD if value * better > 0 else BEHIND, _STRONGEST * abs(value) / largest
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=colour, alpha=strength, linewidth=0))
        axes.text(column, row, sweep.written(value, sign=True), color=INK, ha="center", va="center")
        _draw_border(axes, values, (x, y), across, up)
    for column, row in ((across.index(x), up.index(y)) for x in across for y in up if (x, y) not in values):
        axes.text(column, row, "not run", color=INK, alpha=0.6, fontsize=9.5, ha="center", va="center")
    axes.set(xlim=(-0.5, len(across) - 0.5), ylim=(-0.5, len(up) - 0.5))
    axes.set_xticks(range(len(across)), [shown(value) for value in across])
    axes.set_yticks(range(len(up)), [shown(value) for value in up])
    axes.set_xlabel(wanted["x"])
    axes.set_ylabel(wanted["y"])
    sides = {f"{of} ahead": AHEAD, f"{other} ahead": BEHIND}
    add_legend(figure, also={name: Patch(facecolor=colour, alpha=_STRONGEST) for name, colour in sides.items()})
    ahead = sum(value * better > 0 for value in values.values())
    title = f"{of} minus {other}: {sweep.value_with_unit}"
    note = f"{of} is ahead in {ahead} of {len(values)} places; the line is where the sign changes."
    return one_panel(f"{sweep.slug}-difference-{file_name(other)}", title, figure, note=note)


def _draw_border(
    axes: Any, values: Mapping[tuple[Any, Any], float], place: tuple[Any, Any], across: list[Any], up: list[Any]
) -> None:
    """Draw a line between the cell and its right and upper neighbours with the opposite sign."""
    column, row = across.index(place[0]), up.index(place[1])
    right = values.get((across[column + 1], place[1])) if column + 1 < len(across) else None
    above = values.get((place[0], up[row + 1])) if row + 1 < len(up) else None
    if right is not None and right * values[place] < 0:
        axes.plot([column + 0.5] * 2, [row - 0.5, row + 0.5], color=INK, linewidth=1.6)
    if above is not None and above * values[place] < 0:
        axes.plot([column - 0.5, column + 0.5], [row + 0.5] * 2, color=INK, linewidth=1.6)


def ordered(values: Sequence[Any]) -> list[Any]:
    """Distinct values: numbers sorted, others in their original order."""
    distinct = list(dict.fromkeys(values))
    return sorted(distinct) if all(is_number(value) for value in distinct) else distinct


def group_ranges(sweep: Sweep, group: str) -> dict[str, tuple[float, float, float, int]]:
    """By value of ``group``: worst, median and best of its cells' medians, and the number of cells."""
    found: dict[str, tuple[float, float, float, int]] = {}
    for name in sweep.values_of(group):
        own = [
            summary.middle for cell in sweep.cells if cell.get(group) == name and (summary := sweep.summary(cell)) is not None
        ]
        if own:
            ends = (max(own), min(own)) if sweep.better == "lower" else (min(own), max(own))
            found[str(name)] = (ends[0], statistics.median(own), ends[1], len(own))
    return found


def _range(sweep: Sweep, wanted: Mapping[str, Any]) -> list[Figure]:
    """A bar per group from its worst to its best cell, with the median marked."""
    ranges = group_ranges(sweep, wanted["group"])
    if not ranges:
        return []
    styles = styles_for(ranges)
    figure, grid = new_figure(90 + 34 * len(ranges))
    axes = grid[0, 0]
    for row, (name, (worst, median, best, _)) in enumerate(ranges.items()):
        style = styles[name]
        axes.plot([worst, best], [row, row], color=style.colour, linewidth=5, alpha=0.35, solid_capstyle="round")
        axes.plot([worst, best], [row, row], color=style.colour, linewidth=0, marker="|", markersize=11, markeredgewidth=2)
        axes.plot([median], [row], color=style.colour, marker=style.marker, markersize=8, markeredgecolor=PAPER)
        low, high = min(worst, best), max(worst, best)
        for value, shift, side in ((low, (-6, -4), "right"), (median, (0, 8), "center"), (high, (6, -4), "left")):
            text = sweep.written(value)
            axes.annotate(text, (value, row), xytext=shift, textcoords="offset points", ha=side, fontsize=9.5, color=INK)
    axes.set_yticks(range(len(ranges)), [shortened(name, 22) for name in ranges])
    axes.set_ylim(len(ranges) - 0.5, -0.8)
    axes.margins(x=0.22)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(sweep.value_with_unit)
    title = f"Worst, median and best {sweep.value} by {wanted['group']}"
    note = "Over the medians of all cells of the group: how much its setting matters."
    return [one_panel(f"{sweep.slug}-range", title, figure, note=note)]


def _small_multiples(
    name: str,
    title: str,
    groups: Mapping[str, Sequence[Cells]],
    draw: Callable[[Any, Sequence[Cells]], None],
    *,
    height: float,
    note: str,
    also: Mapping[str, Any] | None = None,
    shared: bool = True,
) -> list[Figure]:
    """One figure with all panels for print, and separate panels for pages."""
    if not groups:
        return []
    columns = min(3, len(groups))
    rows = -(-len(groups) // columns)
    whole, grid = new_figure(height, rows=rows, columns=columns, share_y=shared)
    panels = []
    for axes, (label, cells) in zip(grid.flat, groups.items(), strict=False):
        draw(axes, cells)
        axes.set_title(label)
        alone, single = new_figure(height)
        draw(single[0, 0], cells)
        add_legend(alone, also=also)
        panels.append(Panel(alone, f"{title}; {label}" if label else title))
    for axes in list(grid.flat)[len(groups) :]:
        axes.set_visible(False)
    add_legend(whole, columns=2 * columns, also=also)
    return [Figure(name, title, whole, tuple(panels), note)]
