"""Figures as PNG and PDF for papers, and as SVG in HTML pages, where colours follow the light or dark theme.

Each method has the same colour, marker and dash in every figure, and can be recognised by any of the three. The colours are
those of Okabe and Ito, darkened where they would be faint on white, each with a lighter variant for dark pages.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from markupsafe import Markup

from dp_microadam.durable_files import write_durably
from dp_microadam.errors import DPMicroAdamError

WIDTH = 360
"""Width of a figure in points; it fits a phone's screen without scaling the text."""

INK, FAINT, PAPER = "#22272f", "#d5d9e0", "#fffffe"
"""Colours of text, grid and background of figures; pages replace them by their own."""

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
class Style:
    """Style of a line, bar or point. ``colour`` is for a white background, ``dark`` for dark pages."""

    colour: str
    dark: str
    marker: str
    dash: tuple[float, ...]

    @property
    def line_style(self) -> tuple[float, tuple[float, ...] | None]:
        """The dash pattern in matplotlib's format."""
        return (0, self.dash or None)


_BLUE = Style("#0072b2", "#4fb3ee", "o", ())
_ORANGE = Style("#e08e00", "#f5b53f", "s", (6, 2))
_GREEN = Style("#00815f", "#35c79a", "^", (6, 2, 1.5, 2))
_PURPLE = Style("#b3538b", "#e08fbf", "D", (3, 1.5))
_VERMILION = Style("#a83a00", "#ff7a45", "v", (9, 2, 1.5, 2, 1.5, 2))
_SKY = Style("#2a8fc9", "#8fd3f8", "P", (1.5, 1.5))
_OLIVE = Style("#7d7000", "#e0d24a", "X", (4, 1.5, 1.5, 1.5))
_INDIGO = Style("#5a3ea6", "#ab98f2", "p", (11, 1.5))
_GREY = Style("#6b7280", "#a3abb8", "*", (1, 2))
STYLES = (_BLUE, _ORANGE, _GREEN, _PURPLE, _VERMILION, _SKY, _OLIVE, _GREY, _INDIGO)

_KNOWN = {
    "dpmicroadam": ("DP-MicroAdam", _BLUE),
    "dpwalk": ("DP-Walk", _INDIGO),
    "dpsgd": ("DP-SGD", _ORANGE),
    "dpadambc": ("DP-AdamBC", _PURPLE),
    "dpadamw": ("DP-AdamW", _OLIVE),
    "dpadam": ("DP-Adam", _GREEN),
    "scalethenprivatize": ("Scale-then-privatize", _VERMILION),
    "dpbitfit": ("DP-BiTFiT", _SKY),
    "sparta": ("SPARTA", _OLIVE),
    "nonprivate": ("Non-private", _GREY),
}
"""Names and styles of known methods; longer names come before their prefixes."""

_VARIANTS = tuple(zip("h<>d8H", ((2, 2), (8, 3), (1, 1), (5, 1, 1, 1), (3, 3, 1, 3), (7, 1)), strict=True))


def method_name(name: str) -> str:
    """Display name of a method; unknown names are returned unchanged.

    >>> method_name("dp-microadam"), method_name("MyOptimizer")
    ('DP-MicroAdam', 'MyOptimizer')
    """
    return _KNOWN[_key(name)][0] if _key(name) in _KNOWN else name


def styles_for(names: Iterable[str]) -> dict[str, Style]:
    """A style for each name. Known methods always have the same style; variants of them share only the colour.

    >>> looks = styles_for(["DP-SGD", "DP-MicroAdam, 4 bits", "dp-microadam", "mine"])
    >>> looks["dp-microadam"] == styles_for(["DP-MicroAdam"])["DP-MicroAdam"]
    True
    >>> looks["DP-MicroAdam, 4 bits"].colour == looks["dp-microadam"].colour, len(set(looks.values()))
    (True, 4)
    """
    names = list(dict.fromkeys(names))
    found: dict[str, Style] = {}
    for name in sorted(names, key=lambda one: (_family(one) is None, _key(one) not in _KNOWN)):
        colours = {style.colour for style in found.values()}
        free = (style for style in STYLES if style.colour not in colours)
        style = _family(name) or next(free, STYLES[len(found) % len(STYLES)])
        for marker, dash in _VARIANTS:
            if style in found.values():
                style = replace(style, marker=marker, dash=dash)
        found[name] = style
    return {name: found[name] for name in names}


def css_variables() -> dict[str, tuple[str, str, str]]:
    """By colour: the name of its CSS variable, and its values on light and on dark pages."""
    found = {style.colour: (f"--c{number}", style.colour, style.dark) for number, style in enumerate(STYLES)}
    return {**found, FAINT: ("--line", "#d9dde4", "#343c4a"), PAPER: ("--card", "#ffffff", "#1b212c")}


def _key(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.casefold())


def _family(name: str) -> Style | None:
    return next((style for known, (_, style) in _KNOWN.items() if _key(name).startswith(known)), None)


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


def over_steps(axes: Any) -> None:
    """Ticks of steps at integers, with thousands separators."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


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


def draw_line(axes: Any, points: Sequence[tuple[float, float]], style: Style, label: str) -> None:
    """Draw a line with markers, on about ten points if there are many."""
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
    colours: Mapping[str, str] = {colour: f"var({name})" for colour, (name, _, _) in css_variables().items()}
    for colour, variable in {INK: "currentColor", **colours}.items():
        rest = rest.replace(colour, variable)
    rest = re.sub(r"font-family: [^;\"]+", "font-family: inherit", rest)
    rest = re.sub(r"font: ([0-9.]+px) [^;\"]+", r"font: \1 inherit", rest)
    return f'{head} role="img" aria-label="{escape(caption)}">{rest}'.replace("\n", " ").strip()
