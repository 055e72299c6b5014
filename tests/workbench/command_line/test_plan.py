"""``dp-microadam plan`` as a user runs it."""

import json
import signal
import subprocess
import sys

import pytest

from dp_microadam import PrivacyPlan
from dp_microadam.accounting.meaning import meaning, percent
from dp_microadam.ledger.statement import round_up
from dp_microadam.workbench.command_line.cli import main

CIFAR = ["--dataset-size", "45000", "--batch-size", "4096", "--delta", "1e-5"]


def test_a_plan_is_one_short_table_and_explains_itself_on_request(capsys):
    plan = ["plan", *CIFAR, "--epsilon", "8", "--noise-multiplier", "3", "--accountant", "rdp"]
    assert main(plan) == 0
    short = capsys.readouterr().out
    assert "2480" in short
    assert "pld" not in short
    assert main([*plan, "--explain"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(short)
    assert "2480" in shown.out
    rows = {row.split("│")[1].strip(): row for row in shown.out.splitlines() if row.count("│") == 4}
    assert "7.9997" in rows["rdp"]
    assert "2480" in rows["rdp"]
    assert "7.42" in rows["pld"]
    assert "281" in rows["pld"]
    assert shown.err == ""


def test_json_has_the_plans_fields_at_top_level_and_nothing_else_on_stdout(capsys):
    assert main(["plan", *CIFAR, "--epsilon", "8", "--steps", "1000", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    plan = PrivacyPlan.solve(dataset_size=45_000, batch_size=4096, delta=1e-5, epsilon=8, steps=1000)
    assert printed | plan.to_dict() == printed
    pld, rdp = printed["accountants"]["pld"], printed["accountants"]["rdp"]
    assert plan.epsilon == pld["epsilon"] < rdp["epsilon"]
    assert pld["steps_allowed"] >= 1000 > rdp["steps_allowed"]


def test_the_plan_says_what_attackers_reach_mu_and_replacing(capsys):
    arguments = ["plan", *CIFAR, "--steps", "100", "--noise-multiplier", "3"]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["meaning"]
    spent = [PrivacyPlan(45_000, 4096, 3.0, 100, 1e-5).spent_after(100)]
    assert told == meaning(spent, 1e-5)
    assert main([*arguments, "--explain"]) == 0
    shown = capsys.readouterr().out
    rows = {row.split("│")[1].strip(): row for row in shown.splitlines() if row.count("│") == 3}
    assert percent(told["attacks"][1]["true_positive_rate"]) in rows["1 in 100"]
    assert f"μ ≤ {told['mu']:.2f}, for attacks" in shown
    assert f"ε = {round_up(told['replace_one_epsilon'], 4)} if one example is replaced by another, " in shown


@pytest.mark.slow
def test_what_pld_cannot_count_is_left_out(capsys):
    assert main(["plan", *CIFAR, "--epsilon", "8", "--noise-multiplier", "30000", "--accountant", "rdp", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accountants"]["pld"] == {"epsilon": None, "steps_allowed": None}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([*CIFAR, "--epsilon", "0", "--steps", "5"], "epsilon is 0.0"),
        ([*CIFAR, "--epsilon", "nan", "--steps", "5"], "epsilon is nan"),
        ([*CIFAR, "--noise-multiplier", "0", "--steps", "5"], "noise_multiplier is 0.0"),
        (["--dataset-size", "10", "--batch-size", "11", "--delta", "1e-5", "--epsilon", "1", "--steps", "5"], "is 11"),
        ([*CIFAR, "--epsilon", "0.0001", "--steps", "5", "--accountant", "rdp"], "no noise_multiplier"),
        ([], "dataset_size is not given; a plan needs --dataset-size, or the name of a recipe"),
        (["--dataset-size", "100", "--delta", "1e-5", "--epsilon", "8", "--advise"], "parameters is not given; advice needs"),
        ([*CIFAR[:2], *CIFAR[4:], "--epsilon", "8", "--advise", "--parameters", "9"], "examples is not given"),
        ([*CIFAR, "--epsilon", "8", "--steps", "9", "--minutes", "3"], "--minutes is for the plan of a recipe"),
        ([*CIFAR, "--epsilon", "8", "--advise", "--parameters", "9"], "batch_size is 4096, but --advise chooses it"),
        (["demo", "--steps", "9"], "steps is given beside the recipe 'demo'; set it there: --set steps=…"),
        (["demo", "--minutes", "9"], "minutes is 9.0, which is for --advise"),
        (["demo", "--set", "method=non-private"], "method is 'non-private'; a plan is for a single private run"),
        ([*CIFAR, "--epsilon", "1", "--noise-multiplier", "0.1"], "spends epsilon"),
        ([*CIFAR, "--epsilon", "1"], "exactly two"),
        (["demo", "--epochs", "3"], "epochs is given beside the recipe 'demo', which counts steps"),
        ([*CIFAR, "--epsilon", "8", "--steps", "100", "--bands", "0"], "bands is 0"),
        ([*CIFAR, "--epsilon", "8", "--steps", "100", "--bands", "few"], "bands is 'few'"),
        ([*CIFAR, "--epsilon", "8", "--steps", "100", "--bands", "11"], "bands is 11, but a group of 45000/11 examples"),
        (
            [*CIFAR, "--epsilon", "8", "--steps", "100", "--bands", "8", "--parameters", "86000000", "--noise-memory-gib", "1"],
            "bands must be at most 4",
        ),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(capsys, arguments, named):
    assert main(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert named in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["plan", "--advice"], ["plan", *CIFAR, "--epsilon", "eight", "--steps", "5"]])
def test_what_the_parser_refuses_gets_one_sentence_and_exit_code_2_too(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_large_delta_is_a_warning_on_stderr_and_stdout_stays_json(capsys):
    arguments = ["--dataset-size", "1000", "--batch-size", "10", "--delta", "0.01", "--epsilon", "1", "--steps", "10"]
    assert main(["plan", *arguments, "--json"]) == 0
    shown = capsys.readouterr()
    assert "warning: delta is 0.01, above 1/1000" in shown.err
    assert shown.err.count("\n") == 1
    json.loads(shown.out)


def test_planning_does_not_import_torch():
    """It answers in seconds because of it."""
    arguments = ["plan", *CIFAR, "--epsilon", "8", "--noise-multiplier", "3"]
    main = f"from dp_microadam.workbench.command_line.cli import main; main({arguments!r})"
    code = f"import sys; {main}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False")


SMALL_BATCHES = ["--dataset-size", "54000", "--batch-size", "256", "--delta", "1e-5", "--epsilon", "3", "--steps", "2000"]


def test_the_table_of_bands_shows_noise_multiplier_noise_of_the_sum_and_memory(capsys):
    assert main(["plan", *SMALL_BATCHES, "--accountant", "rdp", "--bands", "16", "--parameters", "26010", "--explain"]) == 0
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in shown.splitlines() if row.count("│") == 6]
    assert [row[0] for row in rows] == ["1", "2", "4", "8 auto", "16*", "32", "64", "128", "210"]
    assert rows[0] == ["1", "0.7505", "1.000", "1.000", "none"]
    assert rows[4][1:] == ["1.5799", "0.664", "3.336", f"{15 * 4 * 26010 / 2**20:.1f} MiB"]
    assert "in each of 16 groups" in shown


def test_bands_are_automatic_once_the_size_of_the_model_is_given(capsys):
    assert main(["plan", *SMALL_BATCHES, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["bands"] == 1
    automatic = next(row["bands"] for row in printed["bands_table"] if row["automatic"])
    assert main(["plan", *SMALL_BATCHES, "--parameters", "26010", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bands"] == automatic > 1


def test_advice_is_a_plan_that_can_be_afforded(capsys):
    arguments = ["--advise", "--dataset-size", "20000", "--delta", "1e-5", "--epsilon", "3", "--examples", "100000"]
    arguments += ["--parameters", "1000", "--bands", "1"]
    assert main(["plan", *arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["batch_size"] * printed["steps"] <= 100_000
    assert printed["epsilon"] <= 3
    chosen = min(printed["proposals"], key=lambda one: one["score"])
    assert abs(chosen["score"] - next(p["score"] for p in printed["proposals"] if p["steps"] == printed["steps"])) <= 0.03
    assert main(["plan", *arguments]) == 0
    assert f"batch_size = {printed['batch_size']}\nsteps = {printed['steps']}\nbands = 1" in capsys.readouterr().out


def test_the_plan_of_a_recipe_is_the_one_it_trains_with(capsys):
    settings = ["model=mlp", "model_options.hidden=[8]", "steps=200", "batch_size=16", "epsilon=20.0"]
    overrides = [word for setting in settings for word in ("--set", setting)]
    assert main(["plan", "demo", *overrides, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    parameters = 28 * 28 * 8 + 8 + 8 * 10 + 10
    plan = PrivacyPlan.solve(dataset_size=3600, batch_size=16, delta=1e-5, epsilon=20.0, steps=200, parameters=parameters)
    assert plan.bands > 1
    assert printed | plan.to_dict() == printed
    assert main(["plan", "demo", *overrides, "--advise", "--minutes", "0.05", "--json"]) == 0
    assert "proposals" in json.loads(capsys.readouterr().out)


def test_a_plan_for_users_says_whom_its_epsilon_is_for(capsys):
    assert main(["plan", *SMALL_BATCHES, "--examples-per-user", "4", "--explain"]) == 0
    shown = capsys.readouterr().out
    for words in ("one user with all their training", "ε for a user", "at most 4, as their mean", "expected users per step"):
        assert words in shown
    assert "if one user is replaced by another" in shown


def test_ctrl_c_ends_a_command_with_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(PrivacyPlan, "solve", lambda **_: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start what runs in the background without it
    try:
        assert main(["plan", *CIFAR, "--epsilon", "8", "--steps", "1000"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "dp-microadam: stopped by Ctrl-C\n"


@pytest.mark.parametrize(("examples", "hinted"), [(60, True), (300, False)])
def test_a_plan_with_too_much_noise_to_learn_from_says_so(capsys, examples, hinted):
    """At ε = 8 the network of the demo gets 27.6 % of the digits right after 60 of them, 65.5 % after 300."""
    sizes = ["--dataset-size", str(examples), "--batch-size", str(examples // 8), "--steps", "200", "--parameters", "26010"]
    assert main(["plan", *sizes, "--delta", "1e-3", "--epsilon", "8"]) == 0
    shown = capsys.readouterr().out
    assert ("26,010 parameters hardly learn then: more examples, a larger ε" in shown) == hinted
    assert "times as long as the sum of all its gradients can be" in shown


def test_epochs_are_taken_in_place_of_steps(capsys):
    assert main(["plan", *CIFAR, "--epsilon", "8", "--epochs", "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 110  # 10 · 45,000 / 4,096 = 109.9
