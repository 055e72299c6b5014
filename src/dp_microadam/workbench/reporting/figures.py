"""Figures as PNG and PDF for papers, and as SVG in HTML pages, where colours follow the light or dark theme.

A method has the same colour, marker and dash in every figure, and can be recognised by any of the three. The colours are those
of Okabe and Ito, darkened where they would be faint on white, each with a lighter variant for dark pages.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from dp_microadam.accounting.costs import PrivacyCost
from dp_microadam.accounting.trade_off import TradeOff, trade_off
from dp_microadam.durable_files import write_durably
from dp_microadam.errors import DPMicroAdamError, InputError
from dp_microadam.ledger.statement import round_up
from dp_microadam.methods.table import METHODS
from dp_microadam.workbench.reporting.run import Run

WIDTH = 360
"""Width of a figure in points; it fits a phone's screen without scaling the text."""

INK, FAINT, PAPER = "#22272f", "#d5d9e0", "#fffffe"
"""Colours of text, grid and background of figures; pages replace them by their own."""

_HEIGHT, _TRADE_OFF_HEIGHT = 225, 270
_LONG_LABEL = 22
_LEGEND_ROW = 16
_POINTS_OF_EPSILON = {"rdp": 80, "pld": 25}
_POINTS_OF_TRADE_OFF = 161
_DASHED = (0, (5, 3))

_SETTINGS = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "legend.fontsize": 10.5,
}

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Style:
    """Style of a line. ``colour`` is for a white background, ``dark`` for dark pages."""

    colour: str
    dark: str
    marker: str
    dash: tuple[float, ...]

    @property
    def line_style(self) -> tuple[float, tuple[float, ...] | None]:
        """The dash pattern in matplotlib's format."""
        return (0, self.dash or None)


STYLES = (
    Style("#0072b2", "#4fb3ee", "o", ()),
    Style("#e08e00", "#f5b53f", "s", (6, 2)),
    Style("#00815f", "#35c79a", "^", (6, 2, 1.5, 2)),
    Style("#b3538b", "#e08fbf", "D", (3, 1.5)),
    Style("#a83a00", "#ff7a45", "v", (9, 2, 1.5, 2, 1.5, 2)),
    Style("#2a8fc9", "#8fd3f8", "P", (1.5, 1.5)),
    Style("#7d7000", "#e0d24a", "X", (4, 1.5, 1.5, 1.5)),
    Style("#6b7280", "#a3abb8", "*", (1, 2)),
    Style("#5a3ea6", "#ab98f2", "p", (11, 1.5)),
)


def styles_of(runs: Sequence[Run]) -> list[Style]:
    """The style of each run: that of its method, unless runs share a method."""
    known = list(METHODS)
    places = [(known.index(run.method) if run.method in known else len(known)) % len(STYLES) for run in runs]
    if len(set(places)) < len(runs):
        places = [number % len(STYLES) for number in range(len(runs))]
    return [STYLES[place] for place in places]


def labels_of(runs: Sequence[Run]) -> list[str]:
    """A unique label for each run: its method or else its folder, marked if it is not private."""
    choices = [[run.method for run in runs], [run.name for run in runs], [str(run.folder) for run in runs]]
    labels = next((one for one in choices if len(set(one)) == len(runs)), choices[-1])
    return [
        f"{label} (not private)" if not run.private and "non-private" not in label else label
        for label, run in zip(labels, runs, strict=True)
    ]


def css_variables() -> dict[str, tuple[str, str, str]]:
    """By colour: the name of its CSS variable, and its values on light and on dark pages."""
    found = {style.colour: (f"--c{number}", style.colour, style.dark) for number, style in enumerate(STYLES)}
    return {**found, FAINT: ("--line", "#d9dde4", "#343c4a"), PAPER: ("--card", "#ffffff", "#1b212c")}


@dataclass(frozen=True)
class Figure:
    """One figure, for print and for HTML pages."""

    name: str
    title: str
    drawn: Any
    note: str = ""

    def write(self, folder: Path) -> list[Path]:
        """Write ``folder/NAME.png`` and ``.pdf`` with a white background; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        # No dates in the files: the same figures give the same bytes, which keeps repositories of results quiet.
        metadata = {"png": {"Software": "dp-microadam"}, "pdf": {"Creator": "dp-microadam", "CreationDate": None}}
        paths = [folder / f"{self.name}.{form}" for form in metadata]
        with _matplotlib().rc_context(_SETTINGS):
            for path, (form, about) in zip(paths, metadata.items(), strict=True):
                with write_durably(path) as file:
                    self.drawn.savefig(file, format=form, dpi=200, facecolor="white", metadata=about)
        return paths

    def svg(self) -> Markup:
        """The figure as an SVG element for pages."""
        file = io.StringIO()
        with _matplotlib().rc_context({**_SETTINGS, "svg.hashsalt": self.name}):
            self.drawn.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        return Markup(_for_pages(file.getvalue(), self.title))


def canvas(width: float, height: float) -> Any:
    """An empty matplotlib figure of this size in inches; not pyplot's, whose state is global and may need a display.

    Raises:
        DPMicroAdamError: if matplotlib is not installed.
    """
    _matplotlib()
    from matplotlib.figure import Figure as MatplotlibFigure

    return MatplotlibFigure(figsize=(width, height), layout="constrained")


def save_png(figure: Any, path: str | Path) -> None:
    """Write a matplotlib figure as a PNG file."""
    with write_durably(Path(path)) as file:
        figure.savefig(file, dpi=150, format="png", metadata={"Software": "dp-microadam"})


def new_figure(height: float, *, width: float = WIDTH) -> tuple[Any, Any]:
    """A figure of this size in points and its axes: light grid, no frame, and colours that pages can replace."""
    with _matplotlib().rc_context(_SETTINGS):
        figure = canvas(width / 72, height / 72)
        axes = figure.subplots()
    axes.set_facecolor("none")
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)
    for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
        label.set_color(INK)
    return figure, axes


def add_legend(figure: Any) -> None:
    """Add a legend below the figure; none for a single line, which the title names."""
    entries: dict[str, Any] = {}
    for handle, label in zip(*figure.axes[0].get_legend_handles_labels(), strict=True):
        entries.setdefault(label, handle)
    if len(entries) < 2:
        return
    across = 2 if max(len(label) for label in entries) <= _LONG_LABEL else 1
    # The figure grows by the height of the legend, so that the panel keeps its size.
    figure.set_figheight(figure.get_figheight() + -(-len(entries) // across) * _LEGEND_ROW / 72)
    half = _LONG_LABEL - 1
    figure.legend(
        list(entries.values()),
        [label if len(label) <= 2 * half else f"{label[:half]}…{label[-half:]}" for label in entries],
        loc="outside lower center",
        ncols=across,
        frameon=False,
        labelcolor=INK,
        handlelength=2.8,
        columnspacing=1.4,
    )


def run_figures(runs: Sequence[Run]) -> dict[str, list[Figure]]:
    """Figures by section of the report; those without recorded data are left out."""
    units = " or ".join(dict.fromkeys(f"{run.unit}s" for run in runs))
    drawn = {
        "learning": [_measure(runs, measure, over) for over in ("step", "epsilon") for measure in ("accuracy", "loss")],
        "budget": [_epsilon(runs), _trade_off(runs)],
        "course": [
            _course(runs, lambda run: run.series("learning_rate"), "Learning rate", "learning rate"),
            _course(runs, lambda run: run.throughput, "Throughput", f"{units}/s (expected)"),
        ],
    }
    return {section: [figure for figure in figures if figure is not None] for section, figures in drawn.items()}


def _lines(runs: Sequence[Run], points_of: Callable[[Run], Points]) -> list[tuple[Points, Style, str]]:
    return [(points_of(run), style, label) for run, style, label in zip(runs, styles_of(runs), labels_of(runs), strict=True)]


def _plot(lines: Sequence[tuple[Points, Style, str]], y_label: str, x_label: str = "step") -> tuple[Any, Any] | None:
    """A figure of these lines, with markers on about ten points of each, and its axes; None if there are no points."""
    if not any(points for points, _, _ in lines):
        return None
    figure, axes = new_figure(_HEIGHT)
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for points, style, label in lines:
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=style.colour,
                linestyle=style.line_style,
                marker=style.marker,
                markersize=5.5,
                markevery=max(1, len(points) // 10),
                markeredgecolor=PAPER,
                markeredgewidth=0.6,
                linewidth=1.8,
                label=label,
            )
    if x_label == "step":
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def _measure(runs: Sequence[Run], measure: str, over: str) -> Figure | None:
    """Validation accuracy or loss over steps, or over the ε spent by then; of a single run with and without averaging."""
    scale, unit = (100, "%") if measure == "accuracy" else (1, "nats")

    def points(run: Run, name: str) -> Points:
        return [(x, scale * y) for x, y in run.series(name, over)]

    lines = _lines(runs, lambda run: points(run, run.headline(measure)))
    if len(runs) == 1 and runs[0].averaged:
        second = STYLES[1] if lines[0][1] != STYLES[1] else STYLES[0]
        lines = [(*lines[0][:2], "averaged weights"), (points(runs[0], f"validation_{measure}"), second, "weights")]
    plotted = _plot(lines, f"validation {measure} ({unit})", "step" if over == "step" else "ε spent (δ as stated)")
    if plotted is None:
        return None
    add_legend(plotted[0])
    of_what, name = ("steps", "steps") if over == "step" else ("the ε spent", "epsilon")
    return Figure(f"validation-{measure}-over-{name}", f"Validation {measure} over {of_what}", plotted[0])


def spent_over_steps(run: Run) -> list[tuple[float, float]]:
    """ε after each of several steps, fewer for PLD, which takes a hundredth of a second and more for each."""
    if run.ledger is None or run.steps == 0 or run.epsilon is None:
        return []
    plan, resumed_at = run.ledger.plan, run.ledger.resumed_at
    count = min(_POINTS_OF_EPSILON[plan.accountant], run.steps)
    steps = sorted({round(step) for step in np.linspace(1, run.steps, count)} - {run.steps})
    return [*((float(step), plan.epsilon_after(step, resumed_at)) for step in steps), (float(run.steps), run.epsilon)]


def _epsilon(runs: Sequence[Run]) -> Figure | None:
    """ε over steps, with the budget of the plan."""
    lines = _lines(runs, spent_over_steps)
    plotted = _plot(lines, "ε spent")
    if plotted is None:
        return None
    figure, axes = plotted
    budgets = {run.ledger.plan.epsilon for run in runs if run.ledger is not None}
    for number, (text, budget) in enumerate(sorted({f"{budget:.2f}": budget for budget in budgets}.items())):
        axes.axhline(budget, color=INK, linewidth=1.2, linestyle=_DASHED, label=None if number else "budget of the plan")
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "left", "va": "bottom"}
        axes.annotate(f"budget {text}", (0, budget), xytext=(4, 3), fontsize=10, color=INK, **place)
    axes.set_ylim(0, 1.15 * max([*budgets, *(epsilon for points, _, _ in lines for _, epsilon in points)]))
    axes.set_xlim(0, max(run.steps_planned for run in runs) * 1.02)
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
    axes.plot([0, 100], [100, 0], color=STYLES[7].colour, linewidth=1.4, linestyle=STYLES[7].line_style, label="chance")
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


def _course(runs: Sequence[Run], points_of: Callable[[Run], Points], title: str, label: str) -> Figure | None:
    """A quantity over steps, from zero on."""
    plotted = _plot(_lines(runs, points_of), label)
    if plotted is None:
        return None
    figure, axes = plotted
    axes.set_ylim(0, 1.08 * max(value for run in runs for _, value in points_of(run)) or None)  # the largest marker is whole
    add_legend(figure)
    return Figure(title.lower().replace(" ", "-"), f"{title} over steps", figure)


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise DPMicroAdamError("figures need matplotlib; run pip install 'dp-microadam[plots]'") from None
    return matplotlib


_IDENTIFIER = re.compile(r' id="([^"]+)"')
_LEFT_OUT = re.compile(r"<metadata>.*?</metadata>|<style type=.*?</style>|<!--.*?-->\s*", re.DOTALL)


def _for_pages(svg: str, caption: str) -> str:
    """The bare ``svg`` element, with size, font and colours from the page, and a label for screen readers."""
    svg = _LEFT_OUT.sub("", svg[svg.index("<svg") :])
    # Identifiers are global in a page: only those that are referenced stay, and these are hashes.
    svg = _IDENTIFIER.sub(lambda match: match.group(0) if f"#{match.group(1)}" in svg else "", svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r' width="[^"]+" height="[^"]+"', "", head)
    rest = rest.replace(INK, "currentColor")
    for colour, (name, _, _) in css_variables().items():
        rest = rest.replace(colour, f"var({name})")
    rest = re.sub(r"font-family: [^;\"]+", "font-family: inherit", rest)
    rest = re.sub(r"font: ([0-9.]+px) [^;\"]+", r"font: \1 inherit", rest)
    return f'{head} role="img" aria-label="{escape(caption)}">{rest}'.replace("\n", " ").strip()
