"""The frame of a page: one HTML file with nothing to fetch, for phones and for paper, in light and in dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from dp_microadam.reporting.palette import css_variables


@dataclass(frozen=True)
class Section:
    """A part of the page. ``name`` is its anchor, ``title`` its heading, ``body`` HTML."""

    name: str
    title: str
    body: str


def _variables(dark: bool) -> str:
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


STYLE = f"""
:root {{ {_variables(False)}; color-scheme: light dark }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(True)} }} }}
@media print {{ :root {{ {_variables(False)}; --page: #fff; color-scheme: light }} }}
* {{ box-sizing: border-box }}
html {{ -webkit-text-size-adjust: 100% }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, "DejaVu Sans", sans-serif }}
main {{ max-width: 1140px; margin: 0 auto; padding: 36px 20px 64px }}
h1 {{ font-size: 28px; line-height: 1.25; margin: 0 0 6px; overflow-wrap: anywhere }}
h2 {{ font-size: 21px; margin: 44px 0 12px }}
h3 {{ font-size: 16px; margin: 0 0 8px; overflow-wrap: anywhere }}
p {{ margin: 8px 0; max-width: 76ch; overflow-wrap: anywhere }}
a {{ color: var(--c0) }}
nav {{ display: flex; flex-wrap: wrap; gap: 6px 16px; font-size: 14px; margin: 16px 0 0 }}
.lead, .note, figcaption, .take {{ color: var(--faint) }}
.note, .take, figcaption {{ font-size: 13px; margin: 6px 0 0 }}
figcaption {{ text-align: center }}
.verdict {{ border-left: 5px solid var(--good); background: var(--card); padding: 14px 18px; margin: 16px 0; border-radius: 4px }}
.verdict.bad {{ border-color: var(--bad) }}
.cards, .figures {{ display: grid; gap: 16px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr)) }}
.figures {{ margin: 0 0 16px }}
.card {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px; min-width: 0; margin: 0 }}
.card header {{ display: flex; flex-wrap: wrap; justify-content: space-between; gap: 2px 12px; align-items: baseline }}
.badge {{ font-size: 13px; font-weight: 600; border-radius: 99px; padding: 1px 10px; border: 1px solid currentColor; color: var(--good) }}
.badge.bad {{ color: var(--bad) }}
.numbers {{ display: flex; flex-wrap: wrap; gap: 10px 28px; margin: 12px 0 }}
.numbers div {{ min-width: 0 }}
.numbers b {{ display: block; font-size: 26px; line-height: 1.2; font-variant-numeric: tabular-nums }}
.numbers span {{ font-size: 13px; color: var(--faint) }}
dl {{ display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 4px 16px; margin: 10px 0 0; font-size: 14px }}
dt {{ color: var(--faint) }} dd {{ margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums }}
.key {{ display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 8px }}
svg {{ display: block; width: 100%; height: auto; max-width: 560px; margin: 0 auto; color: var(--ink) }}
.figure-place {{ display: contents }}
.table {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px 10px; margin: 0 0 16px; min-width: 0 }}
.scroll {{ overflow: auto; max-height: 560px }}
table {{ border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; min-width: min(100%, 320px) }}
th, td {{ padding: 6px 14px 6px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line) }}
thead th {{ position: sticky; top: 0; background: var(--card); color: var(--faint); font-weight: 600; vertical-align: bottom }}
tbody th {{ font-weight: 500 }}
.figure {{ text-align: right; white-space: nowrap }}
.two .figure {{ text-align: left; white-space: normal; overflow-wrap: anywhere }}
td small, th small {{ display: block; color: var(--faint); font-size: 12px; font-weight: 400 }}
.faint {{ color: var(--faint) }} .best strong {{ color: var(--c0) }}
ul {{ padding-left: 22px; max-width: 76ch }} li {{ margin: 6px 0 }}
code {{ font-size: 13px; overflow-wrap: anywhere; background: var(--tint); border-radius: 4px; padding: 1px 5px }}
footer {{ margin-top: 48px; font-size: 13px; color: var(--faint) }}
@media (max-width: 560px) {{
  main {{ padding: 22px 12px 40px }} .card, .table {{ padding: 12px }} dl {{ grid-template-columns: minmax(0, 1fr); gap: 0 }}
  dt {{ margin-top: 8px }} th, td {{ padding-right: 12px }}
}}
@media print {{
  body {{ font-size: 11pt }} main {{ max-width: none; padding: 0 }} nav, .take {{ display: none }}
  .scroll {{ max-height: none; overflow: visible }} .card, .table tr {{ break-inside: avoid }} h2, h3 {{ break-after: avoid }}
  .figures, .cards {{ grid-template-columns: repeat(2, minmax(0, 1fr)) }} thead th {{ position: static }}
  table {{ font-size: 8pt; width: 100% }} th, td {{ padding-right: 6px; overflow-wrap: anywhere }} .figure {{ white-space: normal }}
}}
"""


def document(title: str, lead: str, sections: Sequence[Section], footer: str = "") -> str:
    """A whole page."""
    links = "".join(f'<a href="#{one.name}">{escape(one.title)}</a>' for one in sections)
    parts = "\n".join(f'<section id="{one.name}">\n<h2>{escape(one.title)}</h2>\n{one.body}\n</section>' for one in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
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
