"""``python -m research theory`` as a user runs it."""

import json
import subprocess
import sys

import pytest
from research.__main__ import main
from research.theory.bounds import Setting, block_contraction, corrected_bound, printed_bound

from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.workbench import models
from dp_microadam.workbench.command_line.cli import main as train

UNKNOWN = ["--initial-gap", "2.3", "--smoothness", "10", "--gradient-deviation", "0.1"]
GIVEN = [*UNKNOWN, "--steps", "1000", "--dimension", "500", "--noise-multiplier", "2", "--batch-size", "100"]
INSIDE = [*GIVEN, "--density", "0.5", "--rounding-error", "0.1", "--eps", "0.2"]


def test_json_has_every_term_of_both_forms_and_nothing_else_on_stdout(capsys):
    assert main(["theory", *INSIDE, "--json"]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    setting = Setting(2.3, 10.0, 1.0, 0.1, 0.02, 500, 0.9, 0.2, block_contraction([500], 0.5), 0.1)
    for name, bound in (("corrected", corrected_bound(setting, 1000)), ("printed", printed_bound(setting, 1000))):
        assert report[name]["terms"] == bound.terms
        assert report[name]["total"] == bound.total
        assert report[name]["dominant"] == bound.dominant
        assert report[name]["step_size"] == bound.step_size
    assert report["applies"] is True
    assert report["covers_what_is_run"] is False
    assert (report["c1"], report["c2"]) == (setting.c1, setting.c2)
    assert shown.err == ""


def test_the_table_says_which_term_dominates_and_that_algorithm_1_is_not_covered(capsys):
    assert main(["theory", *INSIDE]) == 0
    out = capsys.readouterr().out
    assert "adaptivity dominates" in out
    assert "Algorithm 1" in out
    assert "not covered" in out


def test_default_settings_have_no_bound_and_it_says_why(capsys):
    assert main(["theory", *GIVEN]) == 0
    out = capsys.readouterr().out
    assert "does not apply" in out
    assert "needs ω below 0.00504" in out
    assert main(["theory", *GIVEN, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["applies"] is False
    assert report["corrected"] is None
    assert report["printed"] is None


def test_zero_noise_is_the_non_private_limit(capsys):
    arguments = [value if value != "2" else "0" for value in INSIDE]
    assert main(["theory", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["noise_deviation"] == 0
    assert report["corrected"]["terms"]["noise"] == report["corrected"]["terms"]["rare noise"] == 0


@pytest.mark.slow
def test_without_a_run_it_answers_without_torch():
    program = "import sys; from research.__main__ import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program, "theory", *INSIDE, "--json"], capture_output=True, check=False)
    assert found.returncode == 0
    assert json.loads(found.stdout)["applies"] is True


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theory") / "run"
    quick = [
        "method=dp-microadam",
        "model=mlp",
        "steps=2",
        "batch_size=50",
        "max_grad_norm=0.5",
        "optimizer.density=0.2",
        "optimizer.eps=0.3",
    ]
    assert (
        train(["train", "demo", *(part for key in quick for part in ("--set", key)), "--quiet", "--run-dir", str(folder)]) == 0
    )
    return folder


def test_numbers_are_read_from_a_run_and_those_given_win(run, capsys):
    capsys.readouterr()
    assert main(["theory", str(run), *UNKNOWN, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    plan = read_ledger(run).plan
    sizes = [parameter.numel() for parameter in models.build("mlp", 10, (1, 28, 28)).parameters()]
    assert report["steps"] == 2
    assert (report["steps_are"], report["updates_done"]) == ("planned", 2)
    assert report["dimension"] == sum(sizes)
    assert report["gradient_bound"] == 0.5
    assert report["noise_deviation"] == pytest.approx(plan.noise_multiplier * 0.5 / 50)
    assert report["eps"] == pytest.approx(0.09)
    assert report["contraction"] == block_contraction(sizes, 0.2, 32_768)
    assert main(["theory", str(run), *UNKNOWN, "--rounding-error", "0", "--steps", "9", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["rounding_error"], report["applies"]) == (9, 0.0, True)
    assert (report["steps_are"], report["updates_done"]) == ("given", None)
    assert main(["theory", str(run), *UNKNOWN]) == 0
    assert "2 planned, 2 done" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (UNKNOWN, "steps is not given"),
        ([*GIVEN, "--density", "0"], "density is 0.0"),
        ([*GIVEN, "--noise-multiplier", "-1"], "noise_multiplier is -1.0"),
        ([*GIVEN, "--smoothness", "0"], "smoothness is 0.0"),
        ([*GIVEN, "--steps", "0"], "steps is 0"),
        ([*GIVEN, "--dimension", "0"], "dimension is 0"),
        ([*GIVEN, "--eps", "nan"], "eps is nan"),
        (["nowhere", *UNKNOWN], "not a run folder"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(arguments, named, capsys):
    assert main(["theory", *arguments]) == 2
    shown = capsys.readouterr()
    assert named in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
