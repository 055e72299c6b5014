"""The figures of a report about one or several runs, and the curves that a run leaves in its folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dp_microadam.accounting.costs import PrivacyCost
from dp_microadam.accounting.trade_off import TradeOff, trade_off
from dp_microadam.errors import DPMicroAdamError, InputError
from dp_microadam.ledger.statement import round_up
from dp_microadam.workbench.reporting.figures import (
    FAINT,
    INK,
    STYLES,
    Figure,
    Style,
    add_legend,
    canvas,
    draw_line,
    new_figure,
    over_steps,
    save_png,
    shortened,
    styles_for,
)
from dp_microadam.workbench.reporting.formats import in_bytes, is_number
from dp_microadam.workbench.reporting.run import Run

_HEIGHT, _TRADE_OFF_HEIGHT = 225, 270
_POINTS_OF_EPSILON = {"rdp": 80, "pld": 25}
_POINTS_OF_TRADE_OFF = 161
_EPSILON_TICKS = 6
_FAR_APART = 30
_DASHED = (0, (5, 3))
_CHANCE = STYLES[-1]

Points = Sequence[tuple[float, float]]


def labels_of(runs: Sequence[Run]) -> list[str]:
    """A unique label for each run: its method or else its folder, marked if it is not private."""
    choices = [[run.method for run in runs], [run.name for run in runs], [str(run.folder) for run in runs]]
    labels = next((one for one in choices if len(set(one)) == len(runs)), choices[-1])
    return [
        f"{label} (not private)" if not run.private and "non-private" not in label.casefold() else label
        for label, run in zip(labels, runs, strict=True)
    ]


def styles_of(runs: Sequence[Run]) -> list[Style]:
    """The plot style of each run: that of its method, unless runs share a method."""
    methods = [run.method for run in runs]
    distinct = methods if len(set(methods)) == len(runs) else map(str, range(len(runs)))
    return list(styles_for(distinct).values())


def run_figures(runs: Sequence[Run]) -> dict[str, list[Figure]]:
    """Figures by section of the report; those without recorded data are left out."""
    units = " or ".join(dict.fromkeys(f"{run.unit}s" for run in runs))
    drawn = {
        "learning": [_measure(runs, measure, over_epsilon=over) for over in (False, True) for measure in ("accuracy", "loss")],
        "budget": [_epsilon(runs), _trade_off(runs)],
        "course": [
            _course(runs, lambda run: run.series("learning_rate"), "learning-rate", "Learning rate", "learning rate"),
            _course(runs, lambda run: run.throughput, "throughput", "Throughput", f"{units}/s (expected)"),
        ],
        "memory": [_memory(runs)],
    }
    return {section: [figure for figure in figures if figure is not None] for section, figures in drawn.items()}


def _lines(runs: Sequence[Run], points_of: Callable[[Run], Points]) -> list[tuple[Points, Style, str]]:
    return [(points_of(run), style, label) for run, style, label in zip(runs, styles_of(runs), labels_of(runs), strict=True)]


def _plot(lines: Sequence[tuple[Points, Style, str]], y_label: str, x_label: str = "step") -> tuple[Any, Any] | None:
    """A figure of these lines, and its axes; None if there are no points."""
    if not any(points for points, _, _ in lines):
        return None
    figure, axes = new_figure(_HEIGHT)
    for line in lines:
        draw_line(axes, *line)
    if x_label == "step":
        over_steps(axes)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def _measure(runs: Sequence[Run], measure: str, *, over_epsilon: bool) -> Figure | None:
    """Validation accuracy or loss over steps, or over the ε spent by then; of a single run with and without averaging."""
    scale, unit = (100, "%") if measure == "accuracy" else (1, "nats")

    def points(run: Run, name: str) -> Points:
        found: Points = run.series_over_epsilon(name) if over_epsilon else run.series(name)
        return [(x, scale * y) for x, y in found]

    lines = _lines(runs, lambda run: points(run, run.headline(measure)))
    if len(runs) == 1 and runs[0].averaged:
        lines = [
            (*lines[0][:2], "averaged weights"),
            (points(runs[0], f"validation_{measure}"), replace(STYLES[1], marker="s"), "weights"),
        ]
    plotted = _plot(lines, f"validation {measure} ({unit})", "ε spent (δ as stated)" if over_epsilon else "step")
    if plotted is None:
        return None
    figure, _ = plotted
    add_legend(figure)
    title = f"Validation {measure} over {'the ε spent' if over_epsilon else 'steps'}"
    return Figure(f"validation-{measure}-over-{'epsilon' if over_epsilon else 'steps'}", title, figure)


def spent_over_steps(run: Run) -> list[tuple[float, float]]:
    """ε after each of several steps, fewer for PLD, which takes a hundredth of a second and more for each."""
    if run.ledger is None or run.steps == 0 or run.epsilon is None:
        return []
    plan, resumed_at = run.ledger.plan, run.ledger.resumed_at
    count = min(_POINTS_OF_EPSILON[plan.accountant], run.steps)
    steps = sorted({1 + round(number * (run.steps - 1) / max(1, count - 1)) for number in range(count)} - {run.steps})
    return [*((float(step), plan.epsilon_after(step, resumed_at)) for step in steps), (float(run.steps), run.epsilon)]


def _epsilon(runs: Sequence[Run]) -> Figure | None:
    """ε over steps, with the budget of the plan."""
    lines = _lines(runs, spent_over_steps)
    plotted = _plot(lines, "ε spent")
    if plotted is None:
        return None
    figure, axes = plotted
    with_steps = [run for run, (points, _, _) in zip(runs, lines, strict=True) if points and run.ledger is not None]
    budgets = {run.ledger.plan.epsilon for run in with_steps if run.ledger is not None}
    for number, (text, budget) in enumerate(sorted({f"{budget:.2f}": budget for budget in budgets}.items())):
        axes.axhline(budget, color=INK, linewidth=1.2, linestyle=_DASHED, label=None if number else "budget of the plan")
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "left", "va": "bottom"}
        axes.annotate(f"budget {text}", (0, budget), xytext=(4, 3), fontsize=10, color=INK, **place)
    axes.set_ylim(0, 1.15 * max([*budgets, *(epsilon for points, _, _ in lines for _, epsilon in points)]))
    axes.set_xlim(0, max(run.steps_planned for run in with_steps) * 1.02)
    add_legend(figure)
    return Figure("epsilon-over-steps", "ε over steps, and the budget", figure)


def _trade_off(runs: Sequence[Run]) -> Figure | None:
    """What attackers reach, by the steps done of each run."""
    return trade_off_figure(
        [
            (label, style, run.ledger.spent, run.epsilon, run.ledger.plan.delta)
            for run, style, label in zip(runs, styles_of(runs), labels_of(runs), strict=True)
            if run.private and run.ledger is not None and run.epsilon is not None
        ]
    )


def trade_off_figure(runs: Sequence[tuple[str, Style, Sequence[PrivacyCost], float, float]]) -> Figure | None:
    """The least misses over false accusations of runs: label, style, what was spent, ε and δ; None if nothing can be computed.

    With the lines of ε alone and of guessing.
    """
    drawn = [(label, style, curve, epsilon, delta) for label, style, spent, epsilon, delta in runs if (curve := _curve(spent))]
    if not drawn:
        return None
    figure, axes = new_figure(_TRADE_OFF_HEIGHT)
    axes.plot([0, 100], [100, 0], color=_CHANCE.colour, linewidth=1.4, linestyle=_CHANCE.line_style, label="chance")
    rates = np.linspace(0, 1, _POINTS_OF_TRADE_OFF)[1:-1] ** 3  # close together where the curve is steep
    for label, style, curve, epsilon, delta in drawn:
        missed = [curve.false_negatives(float(rate)) for rate in rates]
        axes.plot(100 * rates, 100 * np.array(missed), color=style.colour, linewidth=2.0, label=label, zorder=3)
        # The least misses that (ε, δ) alone allows: max(0, 1 − δ − e^ε·α, e^(−ε)·(1 − δ − α)).
        corner = 100 * (1 - delta) / (1 + math.exp(min(epsilon, 700.0)))
        end, alone = 100 * (1 - delta), len(drawn) == 1
        colour, said = (INK, f"ε = {round_up(epsilon)} alone") if alone else (style.colour, None)
        across, down = [0, corner, end], [end, corner, 0]
        axes.plot(across, down, color=colour, linewidth=1.3, linestyle=_DASHED, clip_on=False, label=said)
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 100)
    axes.set_xlabel("accused of those who did not take part (%)")
    axes.set_ylabel("missed of those who did (%)")
    add_legend(figure)
    note = "No attack is below a run's curve. Dashed: the weaker bound that (ε, δ) alone gives. Dotted: guessing."
    return Figure("trade-off", "What attackers reach", figure, note)


def _curve(spent: Sequence[PrivacyCost]) -> TradeOff | None:
    try:
        return trade_off(spent)
    except InputError:
        return None


def _course(runs: Sequence[Run], points_of: Callable[[Run], Points], name: str, title: str, label: str) -> Figure | None:
    """A quantity over steps, from zero on, or on a logarithmic scale if the largest values of the runs differ greatly."""
    plotted = _plot(_lines(runs, points_of), label)
    if plotted is None:
        return None
    figure, axes = plotted
    largest = [max(value for _, value in points) for run in runs if (points := points_of(run))]
    if min(largest) > 0 and max(largest) > _FAR_APART * min(largest):
        axes.set_yscale("log")
        axes.set_ylim(bottom=min(largest) / _FAR_APART)
    else:
        axes.set_ylim(0, 1.08 * max(largest) or None)  # the largest marker is whole
    add_legend(figure)
    return Figure(name, f"{title} over steps", figure)


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
    names, colours, values, sizes = zip(*rows, ("Adam", FAINT, 8.0, ""), strict=True)
    figure, axes = new_figure(136 + 36 * len(rows))
    axes.barh(range(len(names)), values, color=colours, height=0.6)
    for place, (value, size) in enumerate(zip(values, sizes, strict=True)):
        axes.annotate(f"{value:.2f}{size}", (value, place), xytext=(6, 0), textcoords="offset points", va="center", color=INK)
    axes.set_xlim(0, 1.5 * max(values))
    axes.set_xticks(range(0, 1 + int(max(values)), 2))
    axes.set_yticks(range(len(names)), [shortened(name, 22) for name in names])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("bytes of state per parameter")
    return Figure("optimizer-state", "Optimizer state against Adam's", figure)


def draw_curves(metrics: Sequence[Mapping[str, Any]], path: Path, *, title: str, private: bool) -> None:
    """Plot validation accuracy and loss over steps from ``metrics``, one mapping per evaluation, as a PNG file.

    With the ε spent along the top; the title of a run that is not private says so, and no ε is shown.

    Raises:
        DPMicroAdamError: if matplotlib is not installed, or there is nothing to draw.
    """
    if not metrics:
        raise DPMicroAdamError("there are no evaluations to draw; the run ended before its first")
    figure = canvas(7.5, 6.4)
    accuracy, loss = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for axes, measure, scale, unit in ((accuracy, "accuracy", 100, " (%)"), (loss, "loss", 1, "")):
        for name, style, what in (("", STYLES[0], "weights"), ("ema_", STYLES[1], "averaged weights")):
            key = f"{name}validation_{measure}"
            points = [(row["step"], scale * row[key]) for row in metrics if is_number(row.get(key))]
            if points:
                draw_line(axes, points, replace(style, dash=()), f"{what}, {points[-1][1]:.2f} at the end")
        axes.set_ylabel(f"validation {measure}{unit}")
        axes.grid(axis="y", color=FAINT)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    over_steps(loss)
    loss.set_xlabel("step")
    if accuracy.lines:
        accuracy.legend(loc="lower right", frameon=False)
    spent = [(row["step"], row["epsilon"]) for row in metrics if is_number(row.get("epsilon"))]
    if private and spent:
        count = min(_EPSILON_TICKS, len(spent))
        chosen = [spent[round(index * (len(spent) - 1) / max(1, count - 1))] for index in range(count)]
        top = accuracy.secondary_xaxis("top")
        top.set_xticks([step for step, _ in chosen], [round_up(epsilon) for _, epsilon in chosen])
        top.set_xlabel("ε spent")
    figure.suptitle(title if private else f"{title}: not private", color=INK if private else "#b00020", fontweight="bold")
    save_png(figure, path)
