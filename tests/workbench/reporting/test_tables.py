"""A table says the same on the page and as CSV."""

import csv
import io
import re
from html.parser import HTMLParser

from dp_microadam.workbench.reporting.report import _template
from dp_microadam.workbench.reporting.tables import Table, cell

TABLE = Table.of(
    "gains",
    "Gain in % of <ours> & theirs",
    ["method_1", "σ = 3", "a|b"],
    [["DP-SGD", cell("70.6", "paper 71.0", best=True), cell("not run", faint=True)], ["B & C", "-1.5", "{x}"]],
)


def test_csv_holds_every_cell():
    rows = list(csv.reader(io.StringIO(TABLE.csv())))
    assert rows == [["method_1", "σ = 3", "a|b"], ["DP-SGD", "70.6; paper 71.0", "not run"], ["B & C", "-1.5", "{x}"]]


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


def test_html_is_well_formed_and_escaped_and_offers_the_csv_without_a_network():
    page = _template("parts.html").table(TABLE)
    found = Cells()
    found.feed(page)
    assert found.open == []
    assert found.rows[0] == ["method_1", "σ = 3", "a|b"]
    assert found.rows[2] == ["B & C", "-1.5", "{x}"]
    assert "<strong>70.6</strong>" in page
    assert "<ours>" not in page
    assert [address.partition(",")[0] for address in re.findall(r'href="([^"]+)"', page)] == ["data:text/plain;charset=utf-8"]
