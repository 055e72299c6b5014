"""The learning curves of a run: validation accuracy and loss over steps, with the ε spent along the top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dp_microadam.errors import DPMicroAdamError
from dp_microadam.ledger.statement import round_up
from dp_microadam.workbench.reporting.figures import canvas, save_png
from dp_microadam.workbench.reporting.formats import is_number

_RAW, _AVERAGED, _INK, _FAINT = "#1f5fa8", "#d9730d", "#333333", "#d8d8d8"
_NUMBER_OF_EPSILON_TICKS = 6


def draw_curves(metrics: Sequence[Mapping[str, Any]], path: Path, *, title: str, private: bool) -> None:
    """Plot learning curves from ``metrics``, one mapping per evaluation, as a PNG file.

    Each mapping has "step", "validation_accuracy" (a fraction) and "validation_loss"; "epsilon" for private runs, and
    "ema_validation_accuracy" and "ema_validation_loss" where averaged weights were evaluated too. Other keys are ignored.
    The title of a run that is not private says so, and no ε is shown.

    Raises:
        DPMicroAdamError: if matplotlib is not installed, or there is nothing to draw.
    """
    if not metrics:
        raise DPMicroAdamError("there are no evaluations to draw; the run ended before its first")
    figure = canvas(7.5, 6.4)
    from matplotlib.ticker import MaxNLocator

    accuracy, loss = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw(accuracy, metrics, "validation_accuracy", "validation accuracy (%)", scale=100)
    _draw(loss, metrics, "validation_loss", "validation loss", scale=1)
    loss.set_xlabel("step", color=_INK)
    loss.xaxis.set_major_locator(MaxNLocator(integer=True))
    if accuracy.lines:
        accuracy.legend(loc="lower right", frameon=False, labelcolor=_INK)
    if private:
        _add_epsilon_axis(accuracy, metrics)
    figure.suptitle(title if private else f"{title}: not private", color=_INK if private else "#b00020", fontweight="bold")
    save_png(figure, path)


def _draw(axes: Any, metrics: Sequence[Mapping[str, Any]], key: str, label: str, *, scale: float) -> None:
    """Plot one line for the raw weights and, if evaluated, one for the averaged weights."""
    for name, colour, what in ((key, _RAW, "weights"), (f"ema_{key}", _AVERAGED, "averaged weights")):
        points = [(row["step"], scale * row[name]) for row in metrics if is_number(row.get(name))]
        if points:
            steps, values = zip(*points, strict=True)
            marker = "o" if len(points) == 1 else None
            axes.plot(steps, values, color=colour, linewidth=1.8, marker=marker, label=f"{what}, {values[-1]:.2f} at the end")
    axes.set_ylabel(label, color=_INK)
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)
    axes.margins(x=0.01)


def _add_epsilon_axis(axes: Any, metrics: Sequence[Mapping[str, Any]]) -> None:
    """Add an axis at the top with the ε spent at evenly spaced evaluations."""
    spent = [(row["step"], row["epsilon"]) for row in metrics if is_number(row.get("epsilon"))]
    if not spent:
        return
    count = min(_NUMBER_OF_EPSILON_TICKS, len(spent))
    chosen = [spent[round(index * (len(spent) - 1) / max(1, count - 1))] for index in range(count)]
    top = axes.secondary_xaxis("top")
    top.set_xticks([step for step, _ in chosen], [round_up(epsilon) for _, epsilon in chosen])
    top.set_xlabel("ε spent", color=_INK)
    top.spines["top"].set_color(_FAINT)
    top.tick_params(colors=_INK)
