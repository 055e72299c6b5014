"""The figures of a report about one or several runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dp_microadam.workbench.reporting.figures import (
    Figure,
    add_legend,
    draw_line,
    integer_ticks,
    new_figure,
    one_panel,
    shortened,
)
from dp_microadam.workbench.reporting.formats import in_bytes
from dp_microadam.workbench.reporting.palette import FAINT, INK, Style, styles_for, styles_in_order
from dp_microadam.workbench.reporting.run import Run
from dp_microadam.workbench.reporting.trade_off_figure import trade_off_figure

_HEIGHT = 225
_POINTS_OF_EPSILON = {"rdp": 80, "pld": 25}
_FAR_APART = 30

Points = Sequence[tuple[float, float]]


def labels_of(runs: Sequence[Run]) -> list[str]:
    """A unique label for each run: its method or else its folder, marked if it is not private."""
    methods, names = [run.method for run in runs], [run.name for run in runs]
    if len(set(methods)) == len(runs):
        labels = methods
    elif len(set(names)) == len(runs):
        labels = names
    else:
        labels = [str(run.folder) for run in runs]
    return [
        f"{label} (not private)" if not run.private and "non-private" not in label.casefold() else label
        for label, run in zip(labels, runs, strict=True)
    ]


def styles_of(runs: Sequence[Run]) -> list[Style]:
    """The plot style of each run: that of its method, unless runs share a method."""
    methods = [run.method for run in runs]
    if len(set(methods)) == len(runs):
        return list(styles_for(methods).values())
    return list(styles_in_order(len(runs)))


def run_figures(runs: Sequence[Run]) -> dict[str, list[Figure]]:
    """Figures by section of the report; those without recorded data are left out."""
    drawn: dict[str, list[Figure | None]] = {
        "learning": [
            _measure(runs, "accuracy", over_epsilon=False),
            _measure(runs, "loss", over_epsilon=False),
            _measure(runs, "accuracy", over_epsilon=True),
            _measure(runs, "loss", over_epsilon=True),
        ],
        "budget": [_epsilon(runs), _trade_off(runs)],
        "course": [_learning_rate(runs), _throughput(runs)],
        "memory": [_memory(runs)],
    }
    return {section: [figure for figure in figures if figure is not None] for section, figures in drawn.items()}


def _measure(runs: Sequence[Run], measure: str, *, over_epsilon: bool) -> Figure | None:
    """Validation accuracy or loss over steps, or over the ε spent by then."""
    scale, unit = (100, "%") if measure == "accuracy" else (1, "nats")
    lines: list[tuple[Points, Style, str]] = []
    for run, style, label in zip(runs, styles_of(runs), labels_of(runs), strict=True):
        find: Callable[[str], Points] = run.series_over_epsilon if over_epsilon else run.series
        shown = {run.headline(measure): (style, label)}
        if len(runs) == 1 and run.averaged:
            other = replace(styles_in_order(2)[1], marker="s")
            shown = {f"ema_validation_{measure}": (style, "averaged weights"), f"validation_{measure}": (other, "weights")}
        for name, (look, what) in shown.items():
            lines.append(([(x, scale * y) for x, y in find(name)], look, what))
    if not any(points for points, _, _ in lines):
        return None
    figure, grid = new_figure(_HEIGHT)
    axes = grid[0, 0]
    for points, look, what in lines:
        draw_line(axes, points, look, what)
    if over_epsilon:
        axes.set_xlabel("ε spent (δ as stated)")
    else:
        _steps(axes)
    axes.set_ylabel(f"validation {measure} ({unit})")
    add_legend(figure)
    over = "epsilon" if over_epsilon else "steps"
    title = f"Validation {measure} over {'the ε spent' if over_epsilon else 'steps'}"
    return one_panel(f"validation-{measure}-over-{over}", title, figure)


def _steps(axes: Any) -> None:
    axes.set_xlabel("step")
    integer_ticks(axes)


def spent_over_steps(run: Run) -> list[tuple[float, float]]:
    """ε after each of several steps, fewer for PLD, which takes a hundredth of a second and more for each."""
    if run.ledger is None or run.steps == 0 or run.epsilon is None:
        return []
    count = min(_POINTS_OF_EPSILON[run.ledger.plan.accountant], run.steps)
    steps = sorted({1 + round(number * (run.steps - 1) / max(1, count - 1)) for number in range(count)})
    before = [(float(step), run.ledger.plan.epsilon_after(step, run.ledger.resumed_at)) for step in steps if step < run.steps]
    return [*before, (float(run.steps), run.epsilon)]


def _epsilon(runs: Sequence[Run]) -> Figure | None:
    """ε over steps, with the budget of the plan."""
    spent = [spent_over_steps(run) for run in runs]
    if not any(spent):
        return None
    figure, grid = new_figure(_HEIGHT)
    axes = grid[0, 0]
    budgets: dict[str, float] = {}
    for run, points, style, label in zip(runs, spent, styles_of(runs), labels_of(runs), strict=True):
        draw_line(axes, points, style, label)
        if points and run.ledger is not None:
            budgets[f"{run.ledger.plan.epsilon:.2f}"] = run.ledger.plan.epsilon
    for number, (text, budget) in enumerate(budgets.items()):
        axes.axhline(budget, color=INK, linewidth=1.2, linestyle=(0, (5, 3)), label=None if number else "budget of the plan")
        axes.annotate(
            f"budget {text}", (0, budget), xycoords=("axes fraction", "data"), xytext=(4, 3), textcoords="offset points",
            ha="left", va="bottom", fontsize=10, color=INK,
        )  # fmt: skip
    axes.set_ylim(0, 1.15 * max([*budgets.values(), *(epsilon for points in spent for _, epsilon in points)]))
    planned = max(run.steps_planned for run, points in zip(runs, spent, strict=True) if points)
    axes.set_xlim(0, planned * 1.02)
    _steps(axes)
    axes.set_ylabel("ε spent")
    add_legend(figure)
    return one_panel("epsilon-over-steps", "ε over steps, and the budget", figure)


def _trade_off(runs: Sequence[Run]) -> Figure | None:
    """What attackers reach, by the steps done of each run."""
    return trade_off_figure(
        [
            (label, style, run.ledger.spent, run.epsilon, run.ledger.plan.delta)
            for run, style, label in zip(runs, styles_of(runs), labels_of(runs), strict=True)
            if run.private and run.ledger is not None and run.epsilon is not None
        ]
    )


def _over_steps(runs: Sequence[Run], points_of: Callable[[Run], Points], name: str, title: str, label: str) -> Figure | None:
    if not any(points_of(run) for run in runs):
        return None
    figure, grid = new_figure(_HEIGHT)
    axes = grid[0, 0]
    for run, style, what in zip(runs, styles_of(runs), labels_of(runs), strict=True):
        draw_line(axes, points_of(run), style, what)
    _steps(axes)
    _set_y_scale(axes, [max(value for _, value in points) for run in runs if (points := points_of(run))])
    axes.set_ylabel(label)
    add_legend(figure)
    return one_panel(name, title, figure)


def _set_y_scale(axes: Any, largest: Sequence[float]) -> None:
    """Start the y axis at zero, or make it logarithmic if the ``largest`` values of the runs differ greatly."""
    if min(largest) > 0 and max(largest) > _FAR_APART * min(largest):
        axes.set_yscale("log")
        axes.set_ylim(bottom=min(largest) / _FAR_APART)
    else:
        axes.set_ylim(0, 1.08 * max(largest) or None)  # the largest marker is whole


def _learning_rate(runs: Sequence[Run]) -> Figure | None:
    return _over_steps(
        runs, lambda run: run.series("learning_rate"), "learning-rate", "Learning rate over steps", "learning rate"
    )


def _throughput(runs: Sequence[Run]) -> Figure | None:
    counted = " or ".join(dict.fromkeys(f"{run.unit}s" for run in runs))
    return _over_steps(runs, lambda run: run.throughput, "throughput", "Throughput over steps", f"{counted}/s (expected)")


def _memory(runs: Sequence[Run]) -> Figure | None:
    """Bytes of optimizer state per trained parameter, beside Adam's."""
    rows = [
        (label, style.colour, 8 * own / adam, f"  ({in_bytes(own)})")
        for run, style, label in zip(runs, styles_of(runs), labels_of(runs), strict=True)
        for own, adam in [run.optimizer_state or (0, 0)]
        if adam
    ]
    if not rows:
        return None
    rows.append(("Adam", FAINT, 8.0, ""))
    names, colours, values, sizes = zip(*rows, strict=True)
    figure, grid = new_figure(100 + 36 * len(rows))
    axes = grid[0, 0]
    axes.barh(range(len(rows)), values, color=colours, height=0.6)
    for place, (value, size) in enumerate(zip(values, sizes, strict=True)):
        axes.annotate(f"{value:.2f}{size}", (value, place), xytext=(6, 0), textcoords="offset points", va="center", color=INK)
    axes.set_xlim(0, 1.5 * max(values))
    axes.set_xticks(range(0, 1 + int(max(values)), 2))
    axes.set_yticks(range(len(names)), [shortened(name, 22) for name in names])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("bytes of state per parameter")
    return one_panel("optimizer-state", "Optimizer state against Adam's", figure)
