"""The commands that train and look at runs, as a person uses them."""

import json
import re
import shutil

import pytest
import torch

from dp_microadam.workbench.command_line.cli import main

QUICK = ["--set", "model=mlp", "--set", "steps=12", "--set", "batch_size=64", "--set", "checkpoint_every=5", "--quiet"]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", "demo", *QUICK, "--set", "ema_decay=0.9", "--set", "evaluate_every=6", "--run-dir", str(run)]) == 0
    return run


def test_train_ends_with_accuracy_epsilon_and_where_the_report_is(tmp_path, capsys):
    assert main(["train", *QUICK, "--run-dir", str(tmp_path / "run")]) == 0
    *_, accuracy, spent, report = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"test accuracy \d+\.\d\d %", accuracy)
    assert re.fullmatch(r"ε = \d+\.\d\d at δ = 1e-05", spent)
    assert report == f"report {tmp_path / 'run' / 'report.html'}"
    assert accuracy.removeprefix("test accuracy ") in (tmp_path / "run" / "report.html").read_text("utf-8")


def test_a_model_that_learned_nothing_is_told_what_naming_one_class_gets(tmp_path, capsys):
    quick = [word for word in QUICK if word != "--quiet"]
    still = ["--set", "method=dp-sgd", "--set", "learning_rate=1e-30", "--set", "ema_decay=0", "--set", "steps=1"]
    assert main(["train", *quick, *still, "--run-dir", str(tmp_path / "run")]) == 0
    tested, told = json.loads((tmp_path / "run" / "test.json").read_text()), capsys.readouterr().err
    sentence = f"most frequent class, which has {100 * tested['majority_accuracy']:.2f} %"
    assert (sentence in told) == (tested["test_accuracy"] <= tested["majority_accuracy"])


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *((command, "log.txt") for command in ("evaluate", "report", "budget", "export", "audit", "predict")),
        *(("resume", name) for name in ("log.txt", "test.json.unfinished", "checkpoints/step-000000099.ckpt", "up")),
    ],
)
def test_no_command_follows_a_link_out_of_the_folder_of_a_run(finished_run, tmp_path, capsys, command, name):
    sent, mine = tmp_path / "sent", tmp_path / "mine.txt"
    shutil.copytree(finished_run, sent)
    mine.write_text("mine")
    (sent / name).unlink(missing_ok=True)
    (sent / name).symlink_to(mine if name != "up" else sent.parent)
    more = {"predict": ["x.png"]}
    assert main([command, str(sent), *more.get(command, [])]) == 2
    assert f"outside of {sent}; put the file itself there" in capsys.readouterr().err
    assert mine.read_text() == "mine"


def test_a_run_may_be_reached_by_a_link_and_have_links_inside(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    (tmp_path / "run" / "log-of-today.txt").symlink_to("log.txt")
    (tmp_path / "run" / "loop").symlink_to("loop")
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    assert main(["budget", str(tmp_path / "latest")]) == 0


def test_a_run_folder_holds_what_it_promises(finished_run):
    names = {path.name for path in finished_run.iterdir()}
    promised = {
        "config.toml",
        "ledger.jsonl",
        "privacy.json",
        "privacy.txt",
        "metrics.jsonl",
        "checkpoints",
        "log.txt",
        "report.html",
        "run.json",
        "test.json",
    }
    assert promised <= names
    summary = json.loads((finished_run / "privacy.json").read_text())
    assert summary["private"] is True
    assert (summary["steps_planned"], summary["steps_done"]) == (12, 12)
    assert {"epsilon", "delta", "accountant"} <= summary.keys()


def test_tensorboard_events_are_written_where_it_is_installed(finished_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished_run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("validation_accuracy")] == [6, 12]


def test_json_output_is_nothing_but_json(tmp_path, capsys):
    assert main(["train", *QUICK, "--json", "--run-dir", str(tmp_path / "run")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["private"] is True
    assert result["steps_done"] == 12
    assert 0 <= result["test_accuracy"] <= 1
    assert result["epsilon"] <= 8.0


def test_resuming_a_finished_run_says_so_and_exits_with_0(finished_run, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished_run.rglob("*") if path.is_file()}
    assert main(["resume", str(finished_run), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "is finished" in out
    assert "ε = " in out
    assert {path: path.stat().st_mtime_ns for path in finished_run.rglob("*") if path.is_file()} == before


def test_evaluate_agrees_with_train(finished_run, capsys):
    main(["resume", str(finished_run), "--quiet", "--json"])
    trained = json.loads(capsys.readouterr().out)
    assert main(["evaluate", str(finished_run), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["test_accuracy"] == trained["test_accuracy"]
    assert evaluated["weights"] == "averaged weights"
    assert evaluated["epsilon"] == trained["epsilon"]


def test_exported_weights_load_in_plain_pytorch_by_the_card_s_own_code(finished_run, tmp_path, capsys, monkeypatch):
    from safetensors.torch import load_file

    from dp_microadam.workbench import data, models

    output = tmp_path / "export"
    assert main(["export", str(finished_run), "--output", str(output)]) == 0
    weights = {"model.safetensors", "model_ema.safetensors"}
    others = {"README.md", "export.json", "model.pt2", "privacy.json", "privacy.txt"}
    assert {path.name for path in output.iterdir()} == weights | others
    digits = data.load("digits", None)
    model = models.build("mlp", 10, (1, 28, 28))
    model.load_state_dict(load_file(output / "model_ema.safetensors"))
    images, labels = data.Preparation(digits)(digits.test)
    accuracy = float((model(images).argmax(1) == labels).float().mean())
    capsys.readouterr()
    main(["evaluate", str(finished_run), "--json"])
    assert accuracy == pytest.approx(json.loads(capsys.readouterr().out)["test_accuracy"], abs=1e-6)
    card = (output / "README.md").read_text()
    assert "differentially private" in card
    assert re.search(
        r"an attack that accuses 1 in 10 of those who did not take part finds at most [\d.]+ % of those who did", card
    )
    assert re.search(r"μ ≤ \d\.\d\d, for attacks with error rates of at least", card)
    assert re.search(r"ε = [\d.]+ at δ = 1e-05 if one unit is exchanged for another", card)
    assert "test accuracy" in card
    _, code = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    monkeypatch.chdir(output)
    built: dict = {}
    exec(code, built)
    assert torch.equal(built["model"](images), model(images))


@pytest.mark.parametrize("recipe_is_there", [True, False])
def test_averaged_weights_of_a_partly_frozen_model_are_exported_with_the_frozen_ones(tmp_path, recipe_is_there):
    from safetensors.torch import load_file

    from dp_microadam.workbench import models

    run, output = tmp_path / "run", tmp_path / "export"
    assert main(["train", *QUICK, "--set", "method=dp-bitfit", "--set", "ema_decay=0.9", "--run-dir", str(run)]) == 0
    if not recipe_is_there:
        (run / "config.toml").unlink()
    assert main(["export", str(run), "--output", str(output)]) == 0
    averaged, last = (load_file(output / f"{name}.safetensors") for name in ("model_ema", "model"))
    models.build("mlp", 10, (1, 28, 28)).load_state_dict(averaged)
    assert 0 < sum(bool((averaged[name] != last[name]).any()) for name in last) < len(last)


def test_an_export_states_what_the_ledger_says_not_what_was_written_before(finished_run, tmp_path):
    run, output = tmp_path / "run", tmp_path / "export"
    shutil.copytree(finished_run, run)
    stale = json.loads((run / "privacy.json").read_text())
    (run / "privacy.json").write_text(json.dumps({**stale, "epsilon": 0.01, "steps_done": 1}))
    (run / "privacy.txt").write_text("PRIVATE. (0.01, 1e-05)")
    assert main(["export", str(run), "--output", str(output)]) == 0
    assert json.loads((output / "privacy.json").read_text())["epsilon"] == stale["epsilon"]
    assert "0.01" not in (output / "privacy.txt").read_text().splitlines()[0]


def test_the_ledger_s_last_hash_is_printed_and_goes_with_the_exported_weights(tmp_path, capsys):
    """What a reader of the model needs to notice later that steps are missing from the ledger."""
    run, output = tmp_path / "run", tmp_path / "export"
    assert main(["train", "demo", *QUICK, "--run-dir", str(run)]) == 0
    (printed,) = re.findall(r"^ledger's last hash ([0-9a-f]{32})$", capsys.readouterr().out, flags=re.MULTILINE)
    assert main(["export", str(run), "--output", str(output)]) == 0
    assert f"ledger's last hash {printed}" in capsys.readouterr().out
    assert json.loads((output / "privacy.json").read_text())["ledger_head"] == printed
    assert printed in (output / "README.md").read_text()


def test_export_refuses_to_overwrite(finished_run, tmp_path, capsys):
    assert main(["export", str(finished_run), "--output", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "export", "audit"])
def test_a_folder_that_cannot_be_created_is_one_sentence(finished_run, tmp_path, capsys, monkeypatch, command):
    file = tmp_path / "digit.png"
    file.write_text("x")
    monkeypatch.setattr("dp_microadam.workbench.audit.suite.audit_pipeline", None)  # is not reached
    arguments = {"train": [*QUICK, "--run-dir"], "export": [str(finished_run), "--output"], "audit": ["--out"]}
    assert main([command, *arguments[command], str(file / "x")]) == 2
    told = capsys.readouterr().err
    assert (str(file) in told, told.count("\n")) == (True, 1)


def test_a_non_private_run_says_so_in_its_last_line(tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", *QUICK, "--set", "method=non-private", "--run-dir", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-2].startswith("not private")
    assert json.loads((run / "privacy.json").read_text())["private"] is False
    assert main(["resume", str(run), "--quiet"]) == 0
    assert "is finished" in capsys.readouterr().out


def test_a_seeded_run_does_not_claim_to_be_private(tmp_path, capsys):
    assert main(["train", *QUICK, "--set", "seed=1", "--run-dir", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.splitlines()[-2].startswith("not private (fixed seed)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "no-such-recipe"], "no-such-recipe"),
        (["train", "--set", "lerning_rate=1"], "learning_rate"),
        (["train", "--set", "epsilon=-1"], "epsilon"),
        (["train", "--set", "batch_size=100000"], "batch_size is 100000"),
        (["train", "--set", "data=mnist", "--set", "data_folder=/no/such/folder"], "/no/such/folder"),
        (["train", "--set", "method=dp-microadam", "--set", "optimizer.density=7"], "density is 7"),
        (["train", "--set", "optimizer.weight_decay=-7"], "weight_decay is -7"),
        (["train", "--set", "physical_batch_size=0"], "physical_batch_size"),
        (["resume", "/no/such/run"], "/no/such/run"),
        (["evaluate", "/no/such/run"], "not a run folder"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_bad_input_gets_one_sentence_exit_code_2_and_nothing_written(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert message in captured.err
    assert not any(tmp_path.iterdir())


def test_a_run_folder_that_exists_is_refused_and_left_alone(tmp_path, capsys):
    (tmp_path / "precious.txt").write_text("mine")
    assert main(["train", *QUICK, "--run-dir", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_private_metrics_are_marked_on_the_terminal(tmp_path, capsys):
    arguments = [argument for argument in QUICK if argument != "--quiet"]
    run = tmp_path / "run"
    assert main(["train", *arguments, "--set", "evaluate_every=6", "--show-private-metrics", "--run-dir", str(run)]) == 0
    assert "outside the guarantee" in capsys.readouterr().err
