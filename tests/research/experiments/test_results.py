"""Sweeps: what the reader makes of the two files, and what tables and figures make of it."""

import csv
import io
import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples

pytest.importorskip("matplotlib")

from research.experiments.page import write_sweep
from research.experiments.results import Sweep
from research.experiments.sweep_figures import difference_map, group_ranges, rolling_mean, sweep_figures
from research.experiments.sweep_tables import sweep_tables

from dp_microadam.errors import InputError

NOISE = "noise multiplier σ"
METHODS = ("DP-SGD", "DP-MicroAdam", "Non-private")


def outcome(noise, method, repeat, value, **more):
    private = method != "Non-private"
    told = {"cell": {NOISE: noise, "method": method}, "repeat": repeat, "value": value, "private": private}
    told |= {
        "epsilon": 7.991 if private else None,
        "delta": 1e-5 if private else None,
        "steps": 2480,
        "parameters": 100 * noise,
    }
    told |= {"seconds": 301.2, "date": "2026-11-16", "machine": "two cores", "commit": "abc1234", "folder": "gone"}
    return told | {"curve": [[10 * t, 2.0 - 0.1 * t + 0.001 * repeat, 0.1 * t] for t in range(1, 6)]} | more


OUTCOMES = [
    *(outcome(3, "DP-SGD", repeat, value) for repeat, value in ((1, 71.2), (2, 70.0), (3, 70.9))),
    *(outcome(3, "DP-MicroAdam", repeat, value) for repeat, value in ((1, 65.0), (2, 66.0))),
    outcome(3, "Non-private", 1, 90.0),
    outcome(4, "DP-SGD", 1, 69.0),
    *(outcome(4, "DP-MicroAdam", repeat, value) for repeat, value in ((1, 70.5), (2, 71.5), (3, None))),
]


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "sweep")


def write(path, outcomes=OUTCOMES, **changes):
    cells = [{NOISE: noise, "method": method} for noise in (3, 4) for method in METHODS]
    told = {
        "name": "sigma-sweep", "title": "CIFAR-10 <over> noise", "question": "Which σ?", "scale": "cpu",
        "command": "python -m research reproduce sigma-sweep", "rows": [NOISE], "columns": ["method"],
        "notes": ["A note & more."],
        "figures": [
            {"kind": "lines", "x": NOISE}, {"kind": "curves", "panel": NOISE}, {"kind": "range", "group": "method"},
            {"kind": "difference", "of": "DP-MicroAdam", "minus": ["DP-SGD"], "x": NOISE, "y": "parameters"},
        ],
        "paper": [
            {"cell": {NOISE: 3, "method": "DP-SGD"}, "value": 70.6, "spread": None},
            {"cell": {NOISE: 4, "method": "DP-MicroAdam"}, "value": 70.7, "spread": 0.2},
            {"cell": {NOISE: 4, "method": "Non-private"}, "value": 97.2, "spread": None},
        ],
        "paper_source": "Table 4 of the paper", "cells": cells, "unit": "%", "value": "test accuracy",
    }  # fmt: skip
    path.mkdir(exist_ok=True)
    (path / "experiment.json").write_text(json.dumps(told | changes), encoding="utf-8")
    (path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in outcomes), encoding="utf-8")
    return path


def at(noise, method):
    return {NOISE: noise, "method": method}


def test_a_cell_has_median_spread_and_number_of_its_seeds(folder):
    summary = Sweep.read(folder).summary(at(3, "DP-SGD"))
    assert (summary.middle, summary.low, summary.high, summary.seeds) == (70.9, 70.0, 71.2, 3)


def test_a_cell_has_the_mean_of_its_seeds_where_the_study_says_so(tmp_path):
    folder = write(tmp_path / "sweep", middle="mean")
    values = [one["value"] for one in OUTCOMES if one["cell"] == at(3, "DP-SGD")]
    assert Sweep.read(folder).summary(at(3, "DP-SGD")).middle == pytest.approx(sum(values) / 3)
    with pytest.raises(InputError, match="middle is 'mode'"):
        Sweep.read(write(tmp_path / "other", middle="mode"))


def test_the_difference_is_ours_minus_the_paper_s_where_both_are(folder):
    sweep = Sweep.read(folder)
    assert sweep.difference(at(3, "DP-SGD")) == pytest.approx(70.9 - 70.6)
    assert sweep.difference(at(4, "DP-MicroAdam")) == pytest.approx(71.0 - 70.7)
    assert sweep.difference(at(3, "DP-MicroAdam")) is None
    assert sweep.difference(at(4, "Non-private")) is None


def test_a_run_without_a_value_counts_as_failed_and_not_as_a_seed(folder):
    sweep = Sweep.read(folder)
    assert sweep.summary(at(4, "DP-MicroAdam")).seeds == 2
    assert "1 failed" in sweep_tables(sweep)[0].markdown()


def test_the_median_run_is_the_one_with_the_median_value(folder):
    sweep = Sweep.read(folder)
    assert sweep.median_run(at(3, "DP-SGD")).repeat == 3
    assert sweep.median_run(at(3, "DP-MicroAdam")).value == 65.0  # of two, the worse
    assert sweep.median_run(at(4, "Non-private")) is None


def test_a_line_that_a_kill_tore_is_left_out_and_a_repeated_run_replaces_the_first(folder):
    with open(folder / "results.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(outcome(4, "DP-SGD", 1, 68.0)) + "\n" + '{"cell": {"noise mul')
    sweep = Sweep.read(folder)
    assert sweep.summary(at(4, "DP-SGD")).middle == 68.0
    assert len(sweep.outcomes) == len(OUTCOMES)


def row_of(table, label):
    (row,) = [row for row in table.rows if row[0].text == label]
    return dict(zip(table.header, row, strict=True))


def test_the_table_shows_ours_the_paper_s_and_the_difference(folder):
    table = sweep_tables(Sweep.read(folder))[0]
    assert row_of(table, "3")["DP-SGD"].lines == ("70.9", "70.0–71.2, 3 seeds", "paper 70.6 (+0.3)")
    assert row_of(table, "4")["DP-MicroAdam"].lines == ("71.0", "70.5–71.5, 2 seeds, 1 failed", "paper 70.7 ± 0.2 (+0.3)")
    assert row_of(table, "4")["Non-private"].lines == ("not run", "paper 97.2")


def test_the_best_of_a_row_is_emphasised_among_runs_with_a_budget(folder):
    table = sweep_tables(Sweep.read(folder))[0]
    best = {(row[0].text, name) for row in table.rows for name, one in zip(table.header, row, strict=True) if one.best}
    assert best == {("3", "DP-SGD"), ("4", "DP-MicroAdam")}


def test_less_is_better_where_the_value_is_time(tmp_path):
    table = sweep_tables(Sweep.read(write(tmp_path / "hours", unit="hours", value="training time")))[0]
    assert [name for name, one in row_of(table, "3").items() if one.best] == ["DP-MicroAdam"]


def test_values_of_several_kinds_are_not_compared(tmp_path):
    table = sweep_tables(Sweep.read(write(tmp_path / "cost", unit="", value="cost")))[0]
    assert not any(one.best for row in table.rows for one in row)
    assert "bold" not in table.note


def test_a_table_of_costs_gives_each_number_its_digits_and_speaks_of_no_seeds(tmp_path):
    sweep = Sweep.read(write(tmp_path / "cost", unit="", value="cost"))
    assert [sweep.written(value) for value in (18803, 412.93, 81.44, 1.57)] == ["18,803", "413", "81.4", "1.57"]
    assert sweep.written(-97.27, sign=True) == "−97.3"
    table = sweep_tables(sweep)[0]
    assert "seed" not in table.markdown()


def test_the_details_have_every_number_in_a_column_of_its_own(folder):
    details = sweep_tables(Sweep.read(folder))[1]
    rows = list(csv.DictReader(io.StringIO(details.csv())))
    (sgd,) = [row for row in rows if row[NOISE] == "3" and row["method"] == "DP-SGD"]
    assert [float(sgd[name]) for name in ("test accuracy (%)", "smallest", "largest", "paper", "difference")] == [
        70.9, 70.0, 71.2, 70.6, 0.3
    ]  # fmt: skip
    assert (sgd["ε"], sgd["δ"], sgd["private"], sgd["seeds"]) == ("8.00", "1e-05", "yes", "3")  # ε is rounded up
    assert len(rows) == 6


def test_two_keys_may_span_the_rows(tmp_path):
    cells = [{"data": d, "model": m, "method": "SPARTA"} for d in ("CIFAR-10", "CIFAR-100") for m in ("Tiny", "Base")]
    outcomes = [{"cell": one, "repeat": 1, "value": 90.0 + number} for number, one in enumerate(cells)]
    figures = [{"kind": "lines", "x": "model"}]
    path = write(tmp_path / "two", outcomes, rows=["data", "model"], cells=cells, figures=figures, paper=[])
    sweep = Sweep.read(path)
    table = sweep_tables(sweep)[0]
    assert table.header == ("data", "model", "SPARTA")
    assert [tuple(one.lines[0] for one in row) for row in table.rows][-1] == ("CIFAR-100", "Base", "93.0")
    (figure,) = sweep_figures(sweep)
    assert [panel.caption for panel in figure.panels] == [
        f"Test accuracy over model; data = {d}" for d in ("CIFAR-10", "CIFAR-100")
    ]


def lines_of(axes):
    return {line.get_label(): line for line in axes.lines}


def test_lines_pass_through_the_medians_and_bars_reach_the_extremes(folder):
    figure = next(one for one in sweep_figures(Sweep.read(folder)) if one.name.endswith("-lines"))
    axes = figure.panels[0].figure.axes[0]
    micro = lines_of(axes)["DP-MicroAdam"]
    assert list(micro.get_xdata()) == [3, 4]
    assert list(micro.get_ydata()) == [65.5, 71.0]
    bars = [tuple(end[1] for end in segment) for bar in axes.collections for segment in bar.get_segments()]
    assert (70.0, 71.2) in [pytest.approx(bar) for bar in bars]
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "#fffffe"]
    assert [list(line.get_ydata()) for line in hollow] == [[70.6], [70.7], [97.2]]


def test_curves_show_the_smoothed_loss_of_the_median_run(folder):
    figure = next(one for one in sweep_figures(Sweep.read(folder)) if one.name.endswith("-curves"))
    assert [panel.caption.partition("; ")[2] for panel in figure.panels] == [f"{NOISE} = 3", f"{NOISE} = 4"]
    line = lines_of(figure.panels[0].figure.axes[0])["DP-SGD"]
    losses = [2.0 - 0.1 * t + 0.003 for t in range(1, 6)]  # of repeat 3
    assert list(line.get_xdata()) == [10, 20, 30, 40, 50]
    assert list(line.get_ydata()) == pytest.approx(losses)  # a straight line stays itself


def test_the_difference_map_subtracts_medians_and_takes_measured_coordinates(folder):
    values = difference_map(Sweep.read(folder), "DP-MicroAdam", "DP-SGD", NOISE, "parameters")
    assert values == {(3, 300): pytest.approx(65.5 - 70.9), (4, 400): pytest.approx(71.0 - 69.0)}


def test_the_difference_figure_prints_its_values_and_names_its_sides(folder):
    figure = next(one for one in sweep_figures(Sweep.read(folder)) if "-difference-" in one.name)
    texts = {text.get_text() for text in figure.whole.axes[0].texts}
    assert texts == {"−5.4", "+2.0", "not run"}
    assert [text.get_text() for text in figure.whole.legends[0].get_texts()] == ["DP-MicroAdam ahead", "DP-SGD ahead"]
    assert figure.note.startswith("DP-MicroAdam is ahead in 1 of 2 places")


def test_ranges_are_worst_median_and_best_of_the_cells_of_a_group(folder, tmp_path):
    ranges = group_ranges(Sweep.read(folder), "method")
    assert ranges["DP-SGD"] == (69.0, pytest.approx(69.95), 70.9, 2)
    timed = group_ranges(Sweep.read(write(tmp_path / "hours", unit="hours")), "method")
    assert timed["DP-SGD"][0] == 70.9  # the longest is the worst


def plain_rolling_mean(values, window):
    """Read aloud: weights 1 within half a window, ½ at its very ends if it is even; as far as both sides reach alike."""
    means = []
    for index in range(len(values)):
        reach = window // 2
        while index - reach < 0 or index + reach >= len(values):
            reach -= 1
        total = weight = 0.0
        for other in range(index - reach, index + reach + 1):
            own = 0.5 if reach and abs(other - index) * 2 == window else 1.0
            total, weight = total + own * values[other], weight + own
        means.append(total / weight)
    return means


@examples(100)
@given(st.lists(st.floats(-100, 100), max_size=40), st.integers(1, 12))
def test_the_rolling_mean_agrees_with_a_plain_loop(values, window):
    assert rolling_mean(values, window) == pytest.approx(plain_rolling_mean(values, window), abs=1e-9)


@examples(50)
@given(st.integers(1, 40), st.integers(1, 12), st.floats(-3, 3))
def test_the_rolling_mean_leaves_a_straight_line_straight_up_to_its_ends(count, window, slope):
    line = [1.0 + slope * index for index in range(count)]
    assert rolling_mean(line, window) == pytest.approx(line, abs=1e-9)


def test_the_rolling_mean_of_ten_is_the_mean_of_ten():
    values = [float((7 * index) % 13) for index in range(21)]
    inside = statistics.fmean([(values[5] + values[15]) / 2, *values[6:15]])
    assert rolling_mean(values, 10)[10] == pytest.approx(inside)


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A sweep's folder with its report, and what was written."""
    folder = write(tmp_path_factory.mktemp("reported") / "sweep")
    return folder, {path: path.read_bytes() for path in write_sweep(folder)}


def test_a_sweep_leaves_tables_figures_and_a_page(reported):
    folder, written = reported
    names = {str(path.relative_to(folder)) for path in written}
    assert all((folder / name).is_file() for name in names)
    base = ["sigma-sweep", "sigma-sweep-details", "sigma-sweep-curves", "sigma-sweep-range", "sigma-sweep-difference-dp-sgd"]
    assert {f"tables/{name}.{form}" for name in base for form in ("csv", "tex", "md")} <= names
    drawn = [f"sigma-sweep-{kind}" for kind in ("lines", "curves", "range", "difference-dp-sgd")]
    assert {f"figures/{name}.{form}" for name in drawn for form in ("png", "pdf")} <= names
    assert (folder / "figures/sigma-sweep-lines.pdf").read_bytes().startswith(b"%PDF")
    assert (folder / "figures/sigma-sweep-lines.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "CIFAR-10 &lt;over&gt; noise" in page
    assert "9 of 10 runs were private, each by itself with ε ≤ 8.00 at δ = 1e-05. 1 was not" in page


def test_written_twice_a_sweep_gives_the_same_files(reported):
    folder, first = reported
    assert {path: path.read_bytes() for path in write_sweep(folder)} == first


def test_a_sweep_of_which_nothing_is_run_says_so(tmp_path):
    folder = write(tmp_path / "empty", [])
    written = write_sweep(folder)
    assert (folder / "report.html") in written
    table = (folder / "tables" / "sigma-sweep.csv").read_text(encoding="utf-8")
    assert table.count("not run") == 6
    assert "Nothing was run yet" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cells": [{"method": "DP-SGD"}]}, "must have the keys that span its table: noise multiplier σ, method"),
        ({"cells": None}, "does not describe a sweep"),
        ({"figures": [{"kind": "pie"}]}, "must be one of lines, curves, difference, range"),
        ({"figures": [{"kind": "lines", "x": "batch"}]}, "needs 'batch'"),
        ({"figures": [{"kind": "curves"}]}, "needs 'panel'"),
    ],
)
def test_a_sweep_that_cannot_be_understood_is_refused_in_one_sentence(tmp_path, changes, said):
    path = write(tmp_path / "bad", **({"outcomes": []} if "cells" in changes else {}), **changes)
    with pytest.raises(InputError, match=said) as refusal:
        write_sweep(path)
    assert "\n" not in str(refusal.value)


def test_a_folder_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(InputError, match="must be a folder with an experiment"):
        write_sweep(tmp_path)
