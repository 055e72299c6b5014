"""Tables that can be written as Markdown, CSV, LaTeX (booktabs) and HTML."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from unicodedata import normalize
from urllib.parse import quote

_NARROW = 3
"""Tables with more columns are stacked on a phone, a block per row."""
_WIDE, _LONG = 10, 100
"""Tables with more columns are printed in landscape; tables with more rows are not printed."""


@dataclass(frozen=True)
class Cell:
    """Content of a table cell: one or more lines. ``best`` is set in bold, ``faint`` in grey."""

    lines: tuple[str, ...]
    best: bool = False
    faint: bool = False

    @property
    def text(self) -> str:
        return "; ".join(self.lines)


def cell(*lines: object, best: bool = False, faint: bool = False) -> Cell:
    """A cell with these lines.

    >>> cell("71.4", "paper 71.0").text
    '71.4; paper 71.0'
    """
    return Cell(tuple(str(line) for line in lines), best, faint)


@dataclass(frozen=True)
class Table:
    """A table. The first ``labels`` columns name the row; the others hold numbers, or text if ``words`` is true.

    Its files are named after ``name``.
    """

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    labels: int = 1
    note: str = ""
    words: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        header: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        labels: int = 1,
        note: str = "",
        words: bool = False,
    ) -> Table:
        """Build a table from rows of cells or of any values, which are converted by ``str``."""
        filled = tuple(tuple(one if isinstance(one, Cell) else cell(one) for one in row) for row in rows)
        for row in filled:
            if len(row) != len(header):
                raise ValueError(f"a row of table {name!r} has {len(row)} cells under {len(header)} headers")
        return cls(name, title, tuple(header), filled, labels, note, words)

    def markdown(self) -> str:
        """The table in Markdown.

        >>> print(Table.of("t", "Figures", ["σ", "DP-SGD"], [[3, cell("70.6", "a|b", best=True)]]).markdown())
        **Figures**
        <BLANKLINE>
        | σ | DP-SGD |
        |:---|---:|
        | 3 | **70.6**<br>a\\|b |
        """
        lines = [f"**{_markdown(self.title)}**", "", _row(_markdown(name) for name in self.header)]
        lines.append("|" + "|".join(":---" if self._left(i) else "---:" for i in range(len(self.header))) + "|")
        for row in self.rows:
            shown = []
            for one in row:
                first, *rest = (_markdown(line) for line in one.lines)
                shown.append("<br>".join([f"**{first}**" if one.best and first else first, *rest]))
            lines.append(_row(shown))
        return "\n".join([*lines, *(["", _markdown(self.note)] if self.note else [])])

    def csv(self) -> str:
        """The table as CSV, with ASCII minus signs."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows([_plain(one.text) for one in row] for row in self.rows)
        return file.getvalue()

    def latex(self) -> str:
        """The table as a LaTeX ``table`` environment; it needs the packages booktabs and graphicx.

        >>> print(Table.of("t", "Gain in %", ["method", "γ_1"], [["A & B", cell("70.6", best=True)]]).latex())
        % needs \\usepackage{booktabs,graphicx}
        \\begin{table}[ht]
        \\centering
        \\caption{Gain in \\%}
        \\label{tab:t}
        \\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%
        \\begin{tabular}{lr}
        \\toprule
        method & $\\gamma$\\_1 \\\\
        \\midrule
        A \\& B & \\textbf{70.6} \\\\
        \\bottomrule
        \\end{tabular}}
        \\end{table}
        """
        end = " \\\\ \\addlinespace" if any(len(one.lines) > 1 for row in self.rows for one in row) else " \\\\"
        columns = "".join("l" if self._left(i) else "r" for i in range(len(self.header)))
        lines = [
            "% needs \\usepackage{booktabs,graphicx}",
            "\\begin{table}[ht]",
            "\\centering",
            f"\\caption{{{latex_escape('. '.join(part for part in (self.title, self.note) if part))}}}",
            f"\\label{{tab:{self.name}}}",
            "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%",
            f"\\begin{{tabular}}{{{columns}}}",
            "\\toprule",
            " & ".join(latex_escape(name) for name in self.header) + " \\\\",
            "\\midrule",
            *(" & ".join(_latex_cell(one, columns[i]) for i, one in enumerate(row)) + end for row in self.rows),
            "\\bottomrule",
            "\\end{tabular}}",
            "\\end{table}",
        ]
        return "\n".join(lines)

    def html(self) -> str:
        """The table as HTML in a scrolling frame, with links to download the other formats."""
        head = "".join(f'<th scope="col"{self._side(i)}>{escape(name)}</th>' for i, name in enumerate(self.header))
        body = "\n".join(f"<tr>{''.join(self._html_cell(i, one) for i, one in enumerate(row))}</tr>" for row in self.rows)
        forms = (("CSV", "csv", self.csv()), ("LaTeX", "tex", self.latex()), ("Markdown", "md", self.markdown()))
        links = " · ".join(
            f'<a download="{escape(self.name)}.{ending}" href="data:text/plain;charset=utf-8,{quote(text)}">{form}</a>'
            for form, ending, text in forms
        )
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        sizes = [
            "table",
            *(["stacked"] if len(self.header) > _NARROW else []),
            *(["wide"] if len(self.header) > _WIDE else []),
            *(["long"] if len(self.rows) > _LONG else []),
        ]
        if "long" in sizes:
            note += f'<p class="note on-paper">{len(self.rows):,} rows, not printed: see {escape(self.name)}.csv.</p>'
        return f"""<div class="{" ".join(sizes)}" id="table-{escape(self.name)}">
<h3>{escape(self.title)}</h3>
<div class="scroll" tabindex="0" role="region" aria-label="{escape(self.title)}"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table></div>
{note}<p class="take">{links}</p>
</div>"""

    def _left(self, column: int) -> bool:
        return self.words or column < self.labels

    def _side(self, column: int) -> str:
        return "" if self._left(column) else ' class="figure"'

    def _html_cell(self, column: int, one: Cell) -> str:
        first, *rest = (escape(line) for line in one.lines)
        inside = f"<strong>{first}</strong>" if one.best else first
        inside += "".join(f"<small>{line}</small>" for line in rest)
        classes = [
            *([] if self._left(column) else ["figure"]),
            *(["faint"] if one.faint else []),
            *(["best"] if one.best else []),
        ]
        kind = f' class="{" ".join(classes)}"' if classes else ""
        # On a phone a row may be a block, in which each cell is told by the name of its column.
        named = f'{kind} data-column="{escape(self.header[column])}"'
        return f'<th scope="row"{named}>{inside}</th>' if column < self.labels else f"<td{named}>{inside}</td>"


_LATEX = {
    "\\": "\\textbackslash{}", "{": "\\{", "}": "\\}", "&": "\\&", "%": "\\%", "$": "\\$", "#": "\\#", "_": "\\_",
    "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "\\textless{}", ">": "\\textgreater{}", "|": "\\textbar{}",
    '"': "''", "−": "$-$", "±": "$\\pm$", "×": "$\\times$", "≤": "$\\leq$", "≥": "$\\geq$", "–": "--", "—": "---",
    "…": "\\ldots{}", "·": "$\\cdot$", "→": "$\\to$", "∞": "$\\infty$", "√": "$\\surd$", "≈": "$\\approx$",
    "α": "$\\alpha$", "β": "$\\beta$", "γ": "$\\gamma$", "δ": "$\\delta$", "ε": "$\\varepsilon$", "η": "$\\eta$",
    "θ": "$\\theta$", "λ": "$\\lambda$", "μ": "$\\mu$", "σ": "$\\sigma$", "ω": "$\\omega$", "Δ": "$\\Delta$", "Σ": "$\\Sigma$",
    "²": "$^2$", "\n": " ",
}  # fmt: skip

_LAST_LATIN_LETTER = 0x17F


def latex_escape(text: str) -> str:
    """Escape text for LaTeX.

    >>> latex_escape("50 % of σ_1 − {a}")
    '50 \\\\% of $\\\\sigma$\\\\_1 $-$ \\\\{a\\\\}'
    """
    return "".join(_latex_character(character) for character in text)


def _latex_character(character: str) -> str:
    """LaTeX for one character; characters without a glyph in pdfLaTeX are transliterated or dropped."""
    if character in _LATEX:
        return _LATEX[character]
    if ord(character) <= _LAST_LATIN_LETTER:
        return character
    return "".join(_LATEX.get(part, part) for part in normalize("NFKD", character) if ord(part) < 128 or part in _LATEX)


def _latex_cell(one: Cell, side: str) -> str:
    first, *rest = (latex_escape(line) for line in one.lines)
    shown = [f"\\textbf{{{first}}}" if one.best else first, *rest]
    # A bracket at the start of a row would be read as an argument of the \\ before it.
    shown = [f"{{}}{line}" if line.startswith(("[", "*")) else line for line in shown]
    stacked = f"\\begin{{tabular}}[t]{{@{{}}{side}@{{}}}}" + " \\\\ ".join(shown) + "\\end{tabular}"
    return shown[0] if len(shown) == 1 else stacked


def _markdown(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _row(cells: object) -> str:
    return "| " + " | ".join(cells) + " |"  # type: ignore[arg-type]


def _plain(text: str) -> str:
    return text.replace("−", "-")


def file_name(text: str) -> str:
    """A text as part of a file name.

    >>> file_name("Scale-then-Priv. (ours)")
    'scale-then-priv---ours'
    """
    return "".join(character if character.isalnum() else "-" for character in text.casefold()).strip("-")
