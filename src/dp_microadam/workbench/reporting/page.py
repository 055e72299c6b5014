"""Template of HTML reports: one self-contained file, with a light, a dark and a print theme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from dp_microadam.workbench.reporting.palette import css_variables


@dataclass(frozen=True)
class Section:
    """A section of a page: ``name`` is its anchor, ``title`` its heading, ``body`` its HTML."""

    name: str
    title: str
    body: str


def _variables(*, dark: bool) -> str:
    own = {
        "--ink": ("#1d2433", "#e7eaf0"),
        "--faint": ("#5b6474", "#a3adbd"),
        "--page": ("#f7f8fa", "#12161d"),
        "--good": ("#17734a", "#4cc38a"),
        "--bad": ("#b00020", "#ff7d8c"),
        "--tint": ("#eef3f9", "#232b38"),
        **{name: (light, night) for name, light, night in css_variables().values()},
    }
    return "; ".join(f"{name}: {values[dark]}" for name, values in own.items())


def style() -> str:
    """The style sheet with its colour variables: a light and a dark theme; print uses the light one."""
    rules = resources.files("dp_microadam.workbench.reporting").joinpath("page.css").read_text("utf-8")
    return f""":root {{ {_variables(dark=False)}; color-scheme: light dark }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(dark=True)} }} }}
@media print {{ :root {{ {_variables(dark=False)}; --page: #fff; color-scheme: light }} }}
{rules}"""


def document(title: str, lead: str, sections: Sequence[Section], footer: str = "") -> str:
    """A complete HTML document."""
    links = "".join(f'<a href="#{one.name}">{escape(one.title)}</a>' for one in sections)
    parts = "\n".join(f'<section id="{one.name}">\n<h2>{escape(one.title)}</h2>\n{one.body}\n</section>' for one in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style()}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="lead">{lead}</p>
<nav aria-label="Sections">{links}</nav>
{parts}
<footer>{footer}</footer>
</main>
</body>
</html>
"""
