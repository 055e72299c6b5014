"""One table in four forms says the same in each."""

import csv
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from thoroughness import examples

from dp_microadam.workbench.reporting.tables import Table, cell, latex_escape

TABLE = Table.of(
    "gains",
    "Gain in % of <ours> & theirs",
    ["method_1", "σ = 3", "a|b"],
    [["DP-SGD", cell("70.6", "paper 71.0 (−0.4)", best=True), cell("not run", faint=True)], ["B & C", "−1.5", "{x}"]],
    note="Bold is best.",
)


def test_csv_holds_every_cell_with_a_minus_that_programs_read():
    rows = list(csv.reader(io.StringIO(TABLE.csv())))
    assert rows[0] == ["method_1", "σ = 3", "a|b"]
    assert rows[1] == ["DP-SGD", "70.6; paper 71.0 (-0.4)", "not run"]
    assert float(rows[2][1]) == -1.5


def test_markdown_emphasises_the_best_and_keeps_its_columns():
    lines = TABLE.markdown().splitlines()
    body = [line for line in lines if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 4 for line in body)
    assert "**70.6**<br>paper 71.0 (−0.4)" in body[2]
    assert lines[-1] == "Bold is best."


class Cells(HTMLParser):
    def __init__(self):
        super().__init__()
        self.rows, self.open = [], []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def test_html_is_well_formed_and_escaped():
    found = Cells()
    found.feed(TABLE.html())
    assert found.open == []
    assert found.rows[0] == ["method_1", "σ = 3", "a|b"]
    assert found.rows[2] == ["B & C", "−1.5", "{x}"]
    assert "<strong>70.6</strong>" in TABLE.html()
    assert "<ours>" not in TABLE.html()


def test_html_offers_the_other_forms_without_a_network():
    addresses = re.findall(r'href="([^"]+)"', TABLE.html())
    assert len(addresses) == 3
    assert all(address.startswith("data:text/plain") for address in addresses)


@examples(200)
@given(st.text(max_size=30))
@example("$±")
def test_latex_text_has_no_character_with_a_meaning_of_its_own(text):
    escaped = latex_escape(text)
    for command in ("\\textbackslash{}", "\\textasciitilde{}", "\\textasciicircum{}", "\\textless{}", "\\textgreater{}"):
        escaped = escaped.replace(command, "")
    escaped = escaped.replace("\\textbar{}", "").replace("\\ldots{}", "")
    escaped = re.sub(r"\\[{}&%$#_]|\$[^$\\]*(\\[a-zA-Z]+)?[^$\\]*\$", "", escaped)  # from the left: \$ opens nothing
    assert not set(escaped) & set("\\{}&%$#_~^")


def test_a_row_that_does_not_fit_its_header_is_refused():
    with pytest.raises(ValueError, match="2 cells under 1 headers"):
        Table.of("t", "t", ["a"], [["1", "2"]])


def test_latex_compiles(tmp_path):
    if shutil.which("pdflatex") is None:
        pytest.skip("needs pdflatex with booktabs (Debian: texlive-latex-recommended)")
    document = (
        "\\documentclass{article}\\usepackage[utf8]{inputenc}\\usepackage{booktabs,graphicx}\\begin{document}\n"
        f"{TABLE.latex()}\n{latex_escape(''.join(chr(i) for i in range(33, 127)) + 'σεδ−±×≤–…₁½é')}\\end{{document}}"
    )
    (tmp_path / "t.tex").write_text(document, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1500:]
