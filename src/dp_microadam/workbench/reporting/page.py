"""HTML pages from templates, which escape all text: self-contained files with a light, a dark and a print theme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dp_microadam.workbench.reporting.figures import css_variables

_COLOURS = (
    ("--ink", "#1d2433", "#e7eaf0"),
    ("--faint", "#5b6474", "#a3adbd"),
    ("--page", "#f7f8fa", "#12161d"),
    ("--good", "#17734a", "#4cc38a"),
    ("--bad", "#b00020", "#ff7d8c"),
    ("--tint", "#eef3f9", "#232b38"),
)
"""Name of a CSS variable, its value on light and on dark pages."""


@dataclass(frozen=True)
class Section:
    """A section of a page: ``name`` is its anchor, ``title`` its heading, ``body`` its HTML."""

    name: str
    title: str
    body: Any


def document(title: str, lead: str, sections: Sequence[Section], footer: str = "", *, extra_style: str = "") -> str:
    """A complete HTML document. Bodies of sections and ``extra_style`` are HTML from templates, all else is text."""
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=title,
            lead=lead,
            sections=sections,
            footer=footer,
            extra_style=extra_style,
            variables=[*_COLOURS, *css_variables().values()],
        )
    )


def template(name: str) -> Any:
    """The macros of a template, as functions that return HTML."""
    return _environment().get_template(name).module


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("dp_microadam.workbench"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
