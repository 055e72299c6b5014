"""Figures as PNG and PDF for papers, and as SVG in HTML pages, where colours follow the light or dark theme."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from dp_microadam.durable_files import write_durably
from dp_microadam.errors import DPMicroAdamError
from dp_microadam.workbench.reporting.palette import FAINT, INK, PAPER, Style, css_variables

WIDTH = 360
"""Width of one panel in points; it fits a phone's screen without scaling the text."""

_LONG_LABEL = 22
_LEGEND_ROW = 16

_SETTINGS = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "legend.fontsize": 10.5,
    "axes.unicode_minus": True,
}


@dataclass(frozen=True)
class Panel:
    """One panel of a figure in an HTML page."""

    figure: Any
    caption: str

    def svg(self, name: str) -> str:
        """The panel as an SVG element. ``name`` makes its internal identifiers unique within the page."""
        matplotlib = _matplotlib()
        file = io.StringIO()
        with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}):
            self.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        return _for_pages(file.getvalue(), self.caption)


@dataclass(frozen=True)
class Figure:
    """One figure: as a whole for print, and as separate panels for HTML pages."""

    name: str
    title: str
    whole: Any
    panels: tuple[Panel, ...]
    note: str = ""

    def write(self, folder: Path) -> list[Path]:
        """Write ``folder/NAME.png`` and ``.pdf`` with a white background; returns their paths."""
        matplotlib = _matplotlib()
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{self.name}.{ending}" for ending in ("png", "pdf")]
        with matplotlib.rc_context(_SETTINGS):
            # No dates in the files: the same figures give the same bytes, which keeps repositories of results quiet.
            with write_durably(paths[0]) as file:
                self.whole.savefig(file, format="png", dpi=200, facecolor="white", metadata={"Software": "dp-microadam"})
            with write_durably(paths[1]) as file:
                metadata = {"Creator": "dp-microadam", "CreationDate": None}
                self.whole.savefig(file, format="pdf", facecolor="white", metadata=metadata)
        return paths

    def html(self) -> str:
        """HTML of the panels, one card each, for a grid."""
        cards = []
        for number, panel in enumerate(self.panels):
            note = f"<small>{escape(self.note)}</small>" if self.note and len(self.panels) == 1 else ""
            picture = panel.svg(f"{self.name}-{number}")
            cards.append(f'<figure class="card">{picture}<figcaption>{escape(panel.caption)}{note}</figcaption></figure>')
        return "\n".join(cards)


def one_panel(name: str, title: str, figure: Any, *, note: str = "") -> Figure:
    """A figure with a single panel."""
    return Figure(name, title, figure, (Panel(figure, title),), note)


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


def new_figure(
    height: float, *, width: float = WIDTH, rows: int = 1, columns: int = 1, share_y: bool = False
) -> tuple[Any, Any]:
    """A figure of ``rows`` × ``columns`` panels of this size in points, and its axes as an array."""
    with _matplotlib().rc_context(_SETTINGS):
        figure = canvas(columns * width / 72, rows * height / 72)
        axes = figure.subplots(rows, columns, squeeze=False, sharey=share_y)
    for one in axes.flat:
        style_axes(one)
    return figure, axes


def style_axes(axes: Any) -> None:
    """Light grid, no frame, and colours that pages can replace."""
    axes.set_facecolor("none")
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)
    for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
        label.set_color(INK)


def integer_ticks(axes: Any) -> None:
    """Ticks at integers, with thousands separators."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def add_legend(figure: Any, *, columns: int = 2, also: Mapping[str, Any] | None = None) -> None:
    """Add one legend for all panels below them; none for a single line, which the title names."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    entries |= also or {}
    if len(entries) < 2:
        return
    across = columns if max(len(label) for label in entries) <= _LONG_LABEL else columns // 2
    # The figure grows by the height of the legend, so that the panels keep their size.
    figure.set_figheight(figure.get_figheight() + -(-len(entries) // across) * _LEGEND_ROW / 72)
    figure.legend(
        list(entries.values()),
        [shortened(label, 2 * _LONG_LABEL) for label in entries],
        loc="outside lower center",
        ncols=across,
        frameon=False,
        labelcolor=INK,
        handlelength=2.8,
        columnspacing=1.4,
    )


def shortened(text: str, most: int) -> str:
    """The text with its middle replaced by "…" if it is longer than ``most`` characters.

    >>> shortened("a-very-long-name-of-a-run-1", 13)
    'a-very…-run-1'
    """
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def draw_line(
    axes: Any, points: Sequence[tuple[float, float]], style: Style, label: str, *, markers: bool | None = None
) -> None:
    """Draw a line with markers, on about ten points if there are many."""
    if not points:
        return
    x, y = zip(*points, strict=True)
    every = 1 if markers else max(1, len(points) // 10)
    axes.plot(
        x, y,
        color=style.colour, linestyle=style.line_style, marker=style.marker, markersize=5.5, markevery=every,
        markeredgecolor=PAPER, markeredgewidth=0.6, linewidth=1.8, label=label,
    )  # fmt: skip


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise DPMicroAdamError("figures need matplotlib; run pip install 'dp-microadam[plots]'") from None
    return matplotlib


_IDENTIFIER = re.compile(r' id="([^"]+)"')
_SIZE = re.compile(r' width="[^"]+" height="[^"]+"')


def _for_pages(svg: str, caption: str) -> str:
    """The bare ``svg`` element, with size, font and colours from the page, and a label for screen readers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style type=.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    # Identifiers are global in a page: only those that are referenced stay, and these are hashes.
    svg = _IDENTIFIER.sub(lambda match: match.group(0) if f"#{match.group(1)}" in svg else "", svg)
    head, rest = svg.split(">", 1)
    head = _SIZE.sub("", head)
    for colour, replacement in _replacements().items():
        rest = rest.replace(colour, replacement)
    rest = re.sub(r"font-family: [^;\"]+", "font-family: inherit", rest)
    rest = re.sub(r"font: ([0-9.]+px) [^;\"]+", r"font: \1 inherit", rest)
    return f'{head} role="img" aria-label="{escape(caption)}">{rest}'.replace("\n", " ").strip()


def _replacements() -> Mapping[str, str]:
    return {INK: "currentColor", **{colour: f"var({name})" for colour, (name, _, _) in css_variables().items()}}
