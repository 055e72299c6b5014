"""Reports of runs: whoever began them, however they ended, and nothing in them that is private."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from flat import flat

pytest.importorskip("matplotlib")

from dp_microadam import MicroAdam, PrivacyPlan, PrivateTrainer
from dp_microadam.accounting.trade_off import trade_off
from dp_microadam.errors import InputError
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.ledger.statement import round_up
from dp_microadam.training.evaluation import class_loss
from dp_microadam.training.run_record import two_digits
from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.reporting.figures import labels_of, run_figures, spent_over_steps
from dp_microadam.workbench.reporting.report import write_report
from dp_microadam.workbench.reporting.run import Run

QUICK = ["--set", "model=mlp", "--set", "batch_size=64", "--set", "evaluate_every=4", "--quiet"]


def train(folder, *settings, steps=12, show=()):
    changes = [part for one in (f"steps={steps}", *settings) for part in ("--set", one)]
    assert main(["train", "demo", *QUICK, *changes, "--run-dir", str(folder), *show]) == 0
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with one run of each kind."""
    here = tmp_path_factory.mktemp("runs")
    own = ("method=dp-microadam", "bands=1", "ema_decay=0.9", "schedule=linear")
    train(here / "private", *own, show=("--show-private-metrics",))
    train(here / "seeded", "method=dp-microadam", "seed=1", "max_steps=8")
    train(here / "unprotected", "method=non-private")
    train(here / "sgd", "method=dp-sgd")
    return here


class Text:
    """What a reader sees of a page."""

    def __init__(self, source):
        body = re.sub(r"<style>.*?</style>", "", source, flags=re.DOTALL)
        self.text = " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())
        self.links = re.findall(r' (?:src|href|xlink:href)="([^"]*)"', body)
        self.sections = re.findall(r'<section id="([^"]*)"', body)


def page_of(tmp_path, *folders):
    page, *_ = write_report(folders, tmp_path / "page" / "report.html", files=False)
    return Text(page.read_text(encoding="utf-8"))


SECTIONS = ["privacy", "accuracy", "summary", "learning", "budget", "course", "memory", "settings"]


def test_the_page_of_a_run_has_every_section(runs, tmp_path):
    page = page_of(tmp_path, runs / "private")
    assert page.sections == SECTIONS
    ledger = read_ledger(runs / "private")
    accuracy = json.loads((runs / "private" / "test.json").read_text())["test_accuracy"]
    for said in ("dp-microadam", f"{100 * accuracy:.2f} %", "test accuracy", "at δ = 1e-05", "12 of 12", "finished", "0.96 B"):
        assert said in page.text
    assert 7.5 < ledger.epsilon() <= 8.0
    assert "ε = 8.00" in page.text
    assert "PRIVATE. Training was (8.00, 1e-05)-differentially private for one training example" in page.text
    recall = json.loads((runs / "private" / "test.json").read_text())["recall"]
    assert list(recall) == [str(digit) for digit in range(10)]
    for value in recall.values():
        assert f"{100 * value:.1f}" in page.text
    assert "for always naming the most frequent class" in page.text
    assert "1,000 test examples, 10 classes" in page.text
    assert "Trained on 3,600 examples" in " ".join(page.text.split())
    assert "no unit" not in page.text
    assert "the choice of hyperparameters by looking at earlier runs" in page.text


def test_the_page_fetches_nothing(runs, tmp_path):
    page = page_of(tmp_path, runs / "private")
    source = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert all(link.startswith(("#", "data:text/plain")) for link in page.links)
    assert not re.search(r"https?://(?!www\.w3\.org/)", source)
    assert "@import" not in source
    assert "url(http" not in source
    assert "<script" not in source


def test_figures_on_training_data_are_not_in_the_report(runs, tmp_path):
    # What a report says is the same with and without them, to the byte, in every file.
    told = []
    for number, kept in enumerate((True, False)):
        folder = tmp_path / str(number) / "private"
        shutil.copytree(runs / "private", folder)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert any("outside_the_guarantee" in line for line in lines)  # the run was asked to keep them
        if not kept:
            lines = [{key: value for key, value in line.items() if key != "outside_the_guarantee"} for line in lines]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        written = write_report([folder], tmp_path / f"out{number}" / "report.html")
        told.append({path.relative_to(tmp_path / f"out{number}"): path.read_bytes() for path in written})
    assert told[0] == told[1]
    page = told[0][Path("report.html")].decode()
    assert "training_loss" not in page
    assert "loss and accuracy on training batches, which this run showed" in page


def test_throughput_is_of_the_expected_batch(runs):
    run = Run.read(runs / "private")
    lines = [json.loads(line) for line in (runs / "private" / "metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["steps_per_second"] for line in lines if "steps_per_second" in line}
    assert dict(run.throughput) == {step: pytest.approx(64 * rate) for step, rate in rates.items()}
    assert len(rates) == 3


def test_time_and_memory_are_kept_with_two_digits_only(runs):
    lines = [json.loads(line) for line in (runs / "private" / "metrics.jsonl").read_text().splitlines()]
    signs = json.loads((runs / "private" / "run.json").read_text())
    for value in [*(line["steps_per_second"] for line in lines if "steps_per_second" in line), signs["peak_memory_bytes"]]:
        assert value == two_digits(value)


def test_epsilon_over_steps_ends_at_what_the_ledger_says_and_shows_the_budget(runs):
    run = Run.read(runs / "private")
    points = spent_over_steps(run)
    assert points[-1] == (12, read_ledger(runs / "private").epsilon())
    assert points[0] == (1, pytest.approx(run.ledger.plan.epsilon_after(1)))
    figure, _ = run_figures([run])["budget"]
    levels = [line.get_ydata()[0] for line in figure.drawn.axes[0].lines if line.get_label() == "budget of the plan"]
    assert levels == [run.ledger.plan.epsilon]


def test_the_trade_off_curve_lies_between_chance_and_the_lines_of_epsilon(runs):
    run = Run.read(runs / "private")
    _, figure = run_figures([run])["budget"]
    chance, curve, lines = figure.drawn.axes[0].lines
    assert (list(chance.get_xdata()), list(chance.get_ydata())) == ([0, 100], [100, 0])
    alone = np.interp(curve.get_xdata(), lines.get_xdata(), lines.get_ydata())
    assert (alone <= curve.get_ydata() + 1e-9).all()
    assert (curve.get_ydata() <= 100 - curve.get_xdata() + 1e-9).all()
    assert curve.get_ydata()[80] == pytest.approx(
        100 * trade_off(run.ledger.spent).false_negatives(curve.get_xdata()[80] / 100)
    )
    assert lines.get_label() == f"ε = {round_up(run.epsilon)} alone"


def test_figures_show_what_was_recorded(runs):
    run = Run.read(runs / "private")
    figures = {figure.name: figure.drawn.axes[0] for several in run_figures([run]).values() for figure in several}
    lines = [json.loads(line) for line in (runs / "private" / "metrics.jsonl").read_text().splitlines()]
    averaged, raw = figures["validation-accuracy-over-epsilon"].lines
    assert list(averaged.get_xdata()) == [line["epsilon"] for line in lines]
    assert list(averaged.get_ydata()) == pytest.approx([100 * line["ema_validation_accuracy"] for line in lines])
    assert list(raw.get_ydata()) == pytest.approx([100 * line["validation_accuracy"] for line in lines])
    (rate,) = figures["learning-rate"].lines
    assert list(rate.get_xdata()) == [4, 8, 12]
    assert list(rate.get_ydata()) == pytest.approx([1e-3 * (1 - step / 12) for step in (3, 7, 11)])  # of the last step taken
    assert all(axes.get_xlabel() for axes in figures.values())
    assert all(axes.get_ylabel() for axes in figures.values())


def test_a_seeded_run_is_reported_as_not_private(runs, tmp_path):
    page = page_of(tmp_path, runs / "seeded")
    assert "not private" in page.text
    assert "ε = 8" not in page.text
    assert "NOT PRIVATE. Sampling and noise were predictable" in page.text
    assert "finished early, at max_steps" in page.text
    assert "8 of 12" in page.text


def test_a_run_without_clipping_and_noise_has_no_epsilon(runs, tmp_path):
    page = page_of(tmp_path, runs / "unprotected")
    assert "not private" in page.text
    assert "no ε" in page.text
    assert "NOT PRIVATE: not private: trained without clipping and noise" in page.text
    assert not run_figures([Run.read(runs / "unprotected")])["budget"]


def test_several_runs_share_plots_and_one_table(runs, tmp_path):
    folders = [runs / name for name in ("private", "seeded", "unprotected", "sgd")]
    several = [Run.read(folder) for folder in folders]
    figures = run_figures(several)
    accuracy = figures["learning"][0].drawn.axes[0]
    assert {line.get_label() for line in accuracy.lines} == set(labels_of(several))
    assert len({(line.get_color(), line.get_marker()) for line in accuracy.lines}) == 4
    page = page_of(tmp_path, *folders)
    named = re.findall(r' id="([^"]+)"', (tmp_path / "page" / "report.html").read_text(encoding="utf-8"))
    assert len(set(named)) == len(named)  # figures refer to parts of themselves and not of each other
    assert "4 runs compared" in page.text
    assert "seeded (not private)" in page.text
    assert page.text.count("Unit of privacy") == 3  # the statement of each that has one


def test_the_same_method_looks_the_same_in_every_report(runs):
    alone, together = [Run.read(runs / "sgd")], [Run.read(runs / "private"), Run.read(runs / "sgd")]
    looks = []
    for several in (alone, together):
        lines = run_figures(several)["budget"][0].drawn.axes[0].lines
        looks.append({(line.get_color(), line.get_marker()) for line in lines if "sgd" in line.get_label()})
    assert looks[0] == looks[1] != set()


def test_a_run_begun_from_python_is_reported(tmp_path):
    images, labels = torch.randn(200, 8), torch.arange(200) % 2
    model = torch.nn.Linear(8, 2)
    plan = PrivacyPlan(150, 30, 1.0, 6, 1e-5)
    options = {"run_dir": tmp_path / "run", **flat(evaluate_every=2, show_progress=False)}
    trainer = PrivateTrainer(model, MicroAdam(model.parameters()), plan, class_loss, **options)
    trainer.fit((images[:150], labels[:150]), validation=(images[150:], labels[150:]))
    page = page_of(tmp_path, tmp_path / "run")
    assert "MicroAdam" in page.text
    assert "Accuracy was not measured" in page.text
    assert "settings" not in page.sections
    assert "Validation loss over steps" in page.text


def test_a_run_before_its_first_evaluation_is_reported(runs, tmp_path):
    young = tmp_path / "young"
    shutil.copytree(runs / "private", young)
    (young / "metrics.jsonl").unlink()
    (young / "test.json").unlink()
    ledger = (young / "ledger.jsonl").read_text().splitlines()
    (young / "ledger.jsonl").write_text("\n".join(ledger[:3]) + '\n{"step": 2, "sam')  # torn by a kill
    signs = json.loads((young / "run.json").read_text())
    (young / "run.json").write_text(json.dumps(signs | {"updates": 0, "steps_done": 0, "optimizer_state_bytes": 0}))
    page = page_of(tmp_path, young)
    assert "of Adam's" not in page.text  # an optimizer has no state before its first step
    assert "3 of 12" in page.text  # a torn line is a step spent
    assert "not finished: 3 of 12 steps" in page.text
    assert "No evaluation yet: young" in page.text


@pytest.mark.slow
def test_a_run_that_goes_on_and_then_is_killed_is_reported_from_its_ledger(tmp_path):
    folder = tmp_path / "going"
    command = [sys.executable, "-m", "dp_microadam", "train", "demo", *QUICK, "--set", "steps=100000", "--run-dir", str(folder)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    try:
        while not (folder / "metrics.jsonl").is_file():
            assert process.poll() is None
            time.sleep(0.1)
        assert "not finished" in page_of(tmp_path, folder).text
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    page = page_of(tmp_path, folder)
    record = read_ledger(folder)
    assert f"{record.steps:,} of 100,000" in page.text
    assert Run.read(folder).epsilon == record.epsilon()  # and not what privacy.json said when it was last written


def test_an_audit_in_the_folder_of_a_run_is_in_its_report(runs, tmp_path):
    run = tmp_path / "audited"
    shutil.copytree(runs / "sgd", run)
    finding = {"name": "one run", "question": "is the canary there?", "claim": 1.0, "delta": 1e-5, "bound": 0.4}
    finding |= {"confidence": 0.95, "largest": 5.8, "canaries": 1000, "violated": False}
    told = {"violated": False, "summary": "no violation found", "findings": [finding]}
    (run / "audit.json").write_text(json.dumps(told))
    page = page_of(tmp_path, run)
    assert "audit" in page.sections
    assert "No violation found." in page.text
    assert "within the claim ε ≥ 0.40 1.00" in page.text
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "audit.json").write_text(json.dumps(told))
    assert "No violation found." in page_of(tmp_path, tmp_path / "alone").text


@pytest.mark.slow
def test_the_command_writes_the_page_and_everything_for_papers(runs, capsys):
    assert main(["report", str(runs / "sgd")]) == 0
    folder = runs / "sgd"
    assert f"page {folder / 'report.html'}" in capsys.readouterr().out
    figures = {path.name for path in (folder / "figures").iterdir()}
    assert {"validation-accuracy-over-steps.pdf", "validation-accuracy-over-steps.png", "epsilon-over-steps.pdf"} <= figures
    assert {"summary.csv", "evaluations-1.csv"} <= {path.name for path in (folder / "tables").iterdir()}


def test_the_command_with_json_prints_nothing_else(runs, tmp_path, capsys):
    page = tmp_path / "mine.html"
    assert main(["report", str(runs / "sgd"), "--out", str(page), "--page-only", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": str(page), "files": []}
    assert [path.name for path in tmp_path.iterdir()] == ["mine.html"]


@pytest.mark.parametrize("name", ["missing", "empty", "torn"])
def test_what_is_no_run_is_refused_in_one_sentence_with_exit_code_2(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "ledger.jsonl").write_text('{"format": 1')
    assert main(["report", str(tmp_path / name)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert not (tmp_path / name / "report.html").exists()


def test_a_run_named_twice_and_a_page_that_cannot_be_written_are_refused(runs, tmp_path, capsys):
    with pytest.raises(InputError, match="named twice"):
        write_report([runs / "sgd", runs / "sgd" / ".." / "sgd"], tmp_path / "report.html")
    (tmp_path / "file").touch()
    for out, sentence in ((tmp_path, "must be the name of a file"), (tmp_path / "file" / "page.html", "cannot be written")):
        assert main(["report", str(runs / "sgd"), "--out", str(out)]) == 2
        assert sentence in capsys.readouterr().err


def test_without_matplotlib_the_page_says_what_to_install_in_place_of_figures(runs, tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.ticker", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    page = page_of(tmp_path, runs / "sgd")
    assert page.text.count("figures need matplotlib; run pip install 'dp-microadam[plots]'.") == 3
    assert "12 of 12" in page.text


def test_steps_that_were_spent_and_lost_are_named(runs, tmp_path):
    lossy = tmp_path / "lossy"
    shutil.copytree(runs / "sgd", lossy)
    signs = json.loads((lossy / "run.json").read_text())
    (lossy / "run.json").write_text(json.dumps(signs | {"updates": signs["steps_done"] - 3}))
    assert "12 of 12, 3 of them spent and lost" in page_of(tmp_path, lossy).text


def test_a_run_that_has_not_taken_a_step_is_reported(runs, tmp_path):
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "ledger.jsonl").write_text((runs / "sgd" / "ledger.jsonl").read_text().splitlines()[0] + "\n")
    page = page_of(tmp_path, begun)
    assert "0 of 12" in page.text
    assert "unknown method" in page.text


def test_reporting_does_not_import_torch(runs):
    code = (
        "import sys; from dp_microadam.workbench.reporting.run import Run; Run.read(sys.argv[1]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, runs / "sgd"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
