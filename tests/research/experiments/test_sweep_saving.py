"""Sweeps that compare two values of a key: how much computing equal accuracy takes, and both lines in one picture."""

import json
import math

import pytest

pytest.importorskip("matplotlib")

from research.experiments.results import Sweep
from research.experiments.sweep_figures import sweep_figures
from research.experiments.sweep_saving import reached_at, savings
from research.experiments.sweep_tables import sweep_tables

from dp_microadam.errors import InputError

VALUES = {
    ("DP-SGD", "1"): {64: 70.0, 128: 74.0, 256: 76.0},
    ("DP-SGD", "auto"): {64: 74.0, 128: 75.0, 256: 77.0},
    ("DP-Adam", "1"): {64: 80.0, 128: 81.0},
    ("DP-Adam", "auto"): {64: 79.0},
}
FIGURES = [
    {"kind": "lines", "x": "B", "beside": "bands", "log": True},
    {"kind": "saving", "x": "B", "beside": "bands"},
    {"kind": "final weights"},
]


@pytest.fixture
def sweep(tmp_path):
    return write(tmp_path, FIGURES)


def write(folder, figures):
    cells = [{"B": size, "method": method, "bands": bands} for (method, bands), by in VALUES.items() for size in by]
    told = {"name": "bands", "rows": ["B"], "columns": ["method", "bands"], "cells": cells, "figures": figures}
    (folder / "experiment.json").write_text(json.dumps(told), encoding="utf-8")
    lines = [
        {"cell": cell, "repeat": 1, "value": value, "final_weights": value - 2}
        for cell in cells
        for value in [VALUES[cell["method"], cell["bands"]][cell["B"]]]
    ]
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return Sweep.read(folder)


def test_a_line_reaches_a_value_where_it_is_interpolated_over_the_logarithm():
    line = [(64.0, 70.0), (128.0, 74.0), (256.0, 76.0)]
    assert reached_at(line, 75.0) == pytest.approx(128 * math.sqrt(2))
    assert reached_at(line, 74.0) == 128
    assert reached_at(line, 70.0) == 0
    assert reached_at(line, 76.1) == math.inf


def test_a_dip_counts_where_the_value_is_first_reached():
    assert reached_at([(1.0, 0.0), (2.0, 10.0), (4.0, 5.0), (8.0, 20.0)], 10.0) == 2


def test_the_saving_is_where_the_first_setting_reaches_what_the_last_has(sweep):
    found = {(one.cell["method"], one.cell["B"]): one for one in savings(sweep, "B", "bands")}
    assert found["DP-SGD", 64].reached_at == 128
    assert found["DP-SGD", 128].reached_at == pytest.approx(128 * math.sqrt(2))
    assert found["DP-SGD", 256].reached_at == math.inf
    assert found["DP-Adam", 64].reached_at == 0
    assert (found["DP-Adam", 64].reference, found["DP-Adam", 64].value) == (80.0, 79.0)


def test_the_table_of_savings_says_what_lies_beyond_what_was_measured(sweep):
    table = next(one for one in sweep_tables(sweep) if one.name == "bands-saving")
    rows = [line.strip("| ").split(" | ") for line in table.markdown().splitlines() if line.startswith("| DP")]
    assert [row[:2] + row[-2:] for row in rows] == [
        ["DP-SGD", "64", "128", "2×"],
        ["DP-SGD", "128", "181", "1.4×"],
        ["DP-SGD", "256", "above 256", "more than 1×"],
        ["DP-Adam", "64", "below 64", "less than 1×"],
    ]
    assert rows[0][2:5] == ["70.0", "74.0", "+4.0"]


def test_the_weights_after_the_last_step_have_a_table_of_their_own(sweep):
    table = next(one for one in sweep_tables(sweep) if one.name == "bands-final-weights")
    assert "68.0" in table.markdown()
    assert "70.0" not in table.markdown().replace("77.0", "").splitlines()[4]


def test_both_settings_have_a_line_and_the_first_is_hollow(sweep):
    [figure] = sweep_figures(sweep)
    axes = figure.panels[0].figure.axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["DP-SGD, bands 1"].get_ydata()) == [70.0, 74.0, 76.0]
    assert list(lines["DP-SGD, bands auto"].get_ydata()) == [74.0, 75.0, 77.0]
    assert lines["DP-SGD, bands 1"].get_markerfacecolor() == "#fffffe"
    assert lines["DP-SGD, bands auto"].get_markerfacecolor() != "#fffffe"
    assert axes.get_xscale() == "log"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["64", "128", "256"]


def test_a_key_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="needs 'colour', which is not there"):
        sweep_figures(write(tmp_path, [{"kind": "lines", "x": "B", "beside": "colour"}]))
