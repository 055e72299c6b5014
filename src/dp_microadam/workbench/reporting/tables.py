"""Tables that can be written as Markdown, CSV, LaTeX (booktabs) and HTML."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from unicodedata import normalize

from dp_microadam.workbench.reporting.page import template


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
    """A table. The first column names the row; the others hold numbers, or text if ``words`` is true.

    Its files are named after ``name``.
    """

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
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
        note: str = "",
        words: bool = False,
    ) -> Table:
        """Build a table from rows of cells or of any values, which are converted by ``str``."""
        filled = tuple(tuple(one if isinstance(one, Cell) else cell(one) for one in row) for row in rows)
        for row in filled:
            if len(row) != len(header):
                raise ValueError(f"a row of table {name!r} has {len(row)} cells under {len(header)} headers")
        return cls(name, title, tuple(header), filled, note, words)

    def left(self, column: int) -> bool:
        """Whether a column is aligned to the left."""
        return self.words or column == 0

    def markdown(self) -> str:
        """The table in Markdown.

        >>> print(Table.of("t", "Figures", ["σ", "DP-SGD"], [[3, cell("70.6", "a|b", best=True)]]).markdown())
        **Figures**
        <BLANKLINE>
        | σ | DP-SGD |
        |:---|---:|
        | 3 | **70.6**<br>a\\|b |
        """

        def shown(one: Cell) -> str:
            first, *rest = map(_markdown, one.lines)
            return "<br>".join([f"**{first}**" if one.best and first else first, *rest])

        sides = "|".join(":---" if self.left(i) else "---:" for i in range(len(self.header)))
        rows = [_row(map(shown, row)) for row in self.rows]
        lines = [f"**{_markdown(self.title)}**", "", _row(map(_markdown, self.header)), f"|{sides}|", *rows]
        return "\n".join([*lines, *(["", _markdown(self.note)] if self.note else [])])

    def csv(self) -> str:
        """The table as CSV, with ASCII minus signs."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows([one.text.replace("−", "-") for one in row] for row in self.rows)
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
        columns = "".join("l" if self.left(i) else "r" for i in range(len(self.header)))
        lines = [
            "% needs \\usepackage{booktabs,graphicx}",
            "\\begin{table}[ht]",
            "\\centering",
            f"\\caption{{{latex_escape('. '.join(part for part in (self.title, self.note) if part))}}}",
            f"\\label{{tab:{self.name}}}",
            "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%",
            f"\\begin{{tabular}}{{{columns}}}",
            "\\toprule",
            " & ".join(map(latex_escape, self.header)) + " \\\\",
            "\\midrule",
            *(" & ".join(_latex_cell(one, columns[i]) for i, one in enumerate(row)) + end for row in self.rows),
            "\\bottomrule",
            "\\end{tabular}}",
            "\\end{table}",
        ]
        return "\n".join(lines)

    def forms(self) -> dict[str, str]:
        """The table as text, by the ending of its file."""
        return {"csv": self.csv(), "tex": self.latex() + "\n", "md": self.markdown() + "\n"}

    def html(self) -> Any:
        """The table as HTML in a scrolling frame, with links to download the other forms."""
        names = ("CSV", "LaTeX", "Markdown")
        return template("parts.html").table(
            self, [(name, *form) for name, form in zip(names, self.forms().items(), strict=True)]
        )


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
    """Escape text for LaTeX; characters without a glyph in pdfLaTeX are transliterated or dropped.

    >>> latex_escape("50 % of σ_1 − {a}")
    '50 \\\\% of $\\\\sigma$\\\\_1 $-$ \\\\{a\\\\}'
    """

    def escaped(character: str) -> str:
        if character in _LATEX or ord(character) <= _LAST_LATIN_LETTER:
            return _LATEX.get(character, character)
        return "".join(_LATEX.get(part, part) for part in normalize("NFKD", character) if ord(part) < 128 or part in _LATEX)

    return "".join(map(escaped, text))


def _latex_cell(one: Cell, side: str) -> str:
    first, *rest = map(latex_escape, one.lines)
    shown = [f"\\textbf{{{first}}}" if one.best else first, *rest]
    # A bracket at the start of a row would be read as an argument of the \\ before it.
    shown = [f"{{}}{line}" if line.startswith(("[", "*")) else line for line in shown]
    stacked = f"\\begin{{tabular}}[t]{{@{{}}{side}@{{}}}}" + " \\\\ ".join(shown) + "\\end{tabular}"
    return shown[0] if len(shown) == 1 else stacked


def _markdown(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def file_name(text: str) -> str:
    """A text as part of a file name.

    >>> file_name("Scale-then-Priv. (ours)")
    'scale-then-priv---ours'
    """
    return "".join(character if character.isalnum() else "-" for character in text.casefold()).strip("-")
