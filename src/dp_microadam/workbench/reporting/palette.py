"""Plot styles: each method has the same colour, marker and dash in every figure, and can be recognised by any of the three.

The colours are those of Okabe and Ito, darkened where they would be faint on white, each with a lighter variant for dark pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

INK, FAINT, PAPER = "#22272f", "#d5d9e0", "#fffffe"
"""Colours of text, grid and background of figures; pages replace them by their own."""

AHEAD, BEHIND = "#0b72b3", "#d45e01"
"""Colours of positive and negative differences, slightly different from those of the methods so that pages can replace each."""


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

_KNOWN = {
    "dpmicroadam": ("DP-MicroAdam", _BLUE),
    "dpwalk": ("DP-Walk", _INDIGO),
    "dpsgd": ("DP-SGD", _ORANGE),
    "dpadambc": ("DP-AdamBC", _PURPLE),
    "dpadamw": ("DP-AdamW", _OLIVE),
    "dpadam": ("DP-Adam", _GREEN),
    "scalethenprivatize": ("Scale-then-privatize", _VERMILION),
    "scalethenpriv": ("Scale-then-Priv.", _VERMILION),
    "dpbitfit": ("DP-BiTFiT", _SKY),
    "sparta": ("SPARTA", _OLIVE),
    "nonprivate": ("Non-private", _GREY),
}
"""Names and styles of known methods; longer names come before their prefixes."""

STYLES = (_BLUE, _ORANGE, _GREEN, _PURPLE, _VERMILION, _SKY, _OLIVE, _GREY, _INDIGO)
_VARIANT_MARKERS = ("h", "<", ">", "d", "8", "H")
_VARIANT_DASHES = ((2, 2), (8, 3), (1, 1), (5, 1, 1, 1), (3, 3, 1, 3), (7, 1))


def method_name(name: str) -> str:
    """Display name of a method; unknown names are returned unchanged.

    >>> method_name("dp-microadam"), method_name("MyOptimizer")
    ('DP-MicroAdam', 'MyOptimizer')
    """
    known = _KNOWN.get(_key(name))
    return known[0] if known else name


def styles_for(names: Iterable[str]) -> dict[str, Style]:
    """A style for each name. Known methods always have the same style; variants of them share only the colour.

    >>> looks = styles_for(["DP-SGD", "DP-MicroAdam, 4 bits", "dp-microadam", "mine"])
    >>> looks["dp-microadam"] == styles_for(["DP-MicroAdam"])["DP-MicroAdam"]
    True
    >>> looks["DP-MicroAdam, 4 bits"].colour == looks["dp-microadam"].colour, len(set(looks.values()))
    (True, 4)
    """
    names = list(dict.fromkeys(names))
    found: dict[str, Style] = {name: _KNOWN[_key(name)][1] for name in names if _key(name) in _KNOWN}
    variants = [name for name in names if name not in found and _family(name)]
    for number, name in enumerate(variants):
        found[name] = _variant(_family(name) or _GREY, number)
    free = [style for style in STYLES if style.colour not in {taken.colour for taken in found.values()}] or list(STYLES)
    others = [name for name in names if name not in found]
    for number, name in enumerate(others):
        style = free[number % len(free)]
        found[name] = style if number < len(free) else _variant(style, number)
    return {name: found[name] for name in names}


def styles_in_order(count: int) -> Sequence[Style]:
    """``count`` distinct styles in a fixed order."""
    return [STYLES[i] if i < len(STYLES) else _variant(STYLES[i % len(STYLES)], i) for i in range(count)]


def css_variables() -> dict[str, tuple[str, str, str]]:
    """By colour: the name of its CSS variable, and its values on light and on dark pages."""
    colours = {style.colour: style for style in STYLES}
    found = {colour: (f"--c{number}", colour, style.dark) for number, (colour, style) in enumerate(colours.items())}
    found[FAINT] = ("--line", "#d9dde4", "#343c4a")
    found[PAPER] = ("--card", "#ffffff", "#1b212c")
    found[AHEAD] = ("--ahead", "#0072b2", "#4fb3ee")
    found[BEHIND] = ("--behind", "#d55e00", "#ff8a3d")
    return found


def _key(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.casefold())


def _family(name: str) -> Style | None:
    return next((style for known, (_, style) in _KNOWN.items() if _key(name).startswith(known)), None)


def _variant(style: Style, number: int) -> Style:
    which = number % len(_VARIANT_MARKERS)
    return replace(style, marker=_VARIANT_MARKERS[which], dash=_VARIANT_DASHES[which])
