"""What diagnostics report is what the optimizer did, and watching changes nothing."""

import json

import numpy as np
import pytest
import torch

from dp_microadam import MicroAdam
from dp_microadam.errors import InputError
from dp_microadam.optimizers.micro_adam_reference import MicroAdamReference
from dp_microadam.training.diagnostics import MicroAdamDiagnostics

SHAPES = ((40, 30), (7,), (300,))
OPTIONS = {
    "lr": 1e-2,
    "eps": 1e-3,
    "density": 0.05,
    "window": 10,
}


def parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def give_gradients(params, step):
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def dense(params, reference):
    """The reference's error and window, flat over all parameters."""
    options = reference.param_groups[0]
    states = [reference.state[param] for param in params]
    errors = [
        reference._error(state, options) if state else torch.zeros(p.numel()) for p, state in zip(params, states, strict=True)
    ]
    windows = [state["window"] if state else torch.zeros(10, p.numel()) for p, state in zip(params, states, strict=True)]
    return torch.cat(errors).double(), torch.cat(windows, dim=1).double()


@pytest.mark.parametrize("quantize", [True, False])
def test_every_figure_is_that_of_the_reference(quantize):
    """Steps 1, 2 … 14 are all measured, and each figure is computed again from the dense twin."""
    params, twins = parameters(), parameters()
    optimizer = MicroAdam(params, quantize=quantize, **OPTIONS)
    reference = MicroAdamReference(twins, quantize=quantize, **OPTIONS)
    diagnostics = MicroAdamDiagnostics(optimizer, every=1)
    ever = torch.zeros(sum(param.numel() for param in params), dtype=torch.bool)
    for step in range(1, 15):
        give_gradients(params, step)
        give_gradients(twins, step)
        error_before, window_before = dense(twins, reference)
        accumulator = torch.cat([twin.grad.view(-1) for twin in twins]).double() + error_before
        optimizer.step()
        reference.step()
        (found,) = diagnostics.take()
        error, window = dense(twins, reference)
        newest = window[(step - 1) % 10]
        selected = newest != 0
        left = accumulator * ~selected
        ever |= selected
        contraction = float(left.norm() / accumulator.norm())
        quantization = float((error - left).norm() / left.norm())
        assert found["contraction"] == pytest.approx(contraction, rel=1e-5)
        assert found["quantization_error"] == pytest.approx(quantization, rel=1e-4, abs=1e-7)
        assert found["joint_contraction"] == pytest.approx((1 + quantization) * contraction, rel=1e-4)
        assert found["condition_holds"] == (found["joint_contraction"] < 1)
        assert found["share_updated"] == pytest.approx(float(ever.double().mean()))
        previous = window_before[(step - 2) % 10] != 0
        assert found["overlap"] == pytest.approx(float((previous & selected).sum() / selected.sum()))
        ages = torch.tensor([(step - 1 - slot) % 10 for slot in range(10)])
        v_hat = (0.999 ** ages.double()) @ window.square() * (0.001 / (1 - 0.999**step))
        sizes = np.sort((1e-2 / (1e-3 + v_hat[selected].sqrt())).numpy())
        assert found["effective_step_size"] == pytest.approx(sizes[(len(sizes) - 1) // 2], rel=1e-4)


def test_the_optimizer_of_the_paper_breaks_the_theorems_condition():
    """1 % density and 4 bits on noise: q above 0.9, ω about 0.1."""
    torch.manual_seed(1)
    param = torch.nn.Parameter(torch.zeros(32_768))
    optimizer = MicroAdam([param])
    diagnostics = MicroAdamDiagnostics(optimizer, every=20)
    for _ in range(20):
        param.grad = torch.randn(32_768)
        optimizer.step()
    (found,) = diagnostics.take()
    assert 0.9 < found["contraction"] < 1
    assert 0.07 < found["quantization_error"] < 0.13
    assert not found["condition_holds"]


def test_no_selection_between_samples_is_missed_and_groups_are_apart():
    params = parameters()
    optimizer = MicroAdam([{"params": params[:1]}, {"params": params[1:], "window": 4, "density": 0.5}], **OPTIONS)
    twins = parameters()
    watched = MicroAdam([{"params": twins[:1]}, {"params": twins[1:], "window": 4, "density": 0.5}], **OPTIONS)
    sparse, every = MicroAdamDiagnostics(optimizer, every=37), MicroAdamDiagnostics(watched, every=1)
    for step in range(37):
        give_gradients(params, step)
        give_gradients(twins, step)
        optimizer.step()
        watched.step()
        always = every.take()
        found = sparse.take()
        assert (found is not None) == (step == 36)
    assert found == always
    assert [entry["group"] for entry in found] == [0, 1]
    assert sparse.take() is None


def test_watching_changes_no_step():
    params, twins = parameters(), parameters()
    optimizer, plain = MicroAdam(params, **OPTIONS), MicroAdam(twins, **OPTIONS)
    MicroAdamDiagnostics(optimizer, every=2)
    for step in range(7):
        give_gradients(params, step)
        give_gradients(twins, step)
        optimizer.step()
        plain.step()
    assert all(torch.equal(one, other) for one, other in zip(params, twins, strict=True))


def test_closed_diagnostics_no_longer_watch():
    params = parameters()
    optimizer = MicroAdam(params, **OPTIONS)
    diagnostics = MicroAdamDiagnostics(optimizer, every=1)
    diagnostics.close()
    give_gradients(params, 0)
    optimizer.step()
    assert diagnostics.take() is None


def test_other_optimizers_are_refused():
    with pytest.raises(InputError, match="diagnostics_every is 5, but the optimizer is SGD"):
        MicroAdamDiagnostics(torch.optim.SGD(parameters(), lr=0.1), every=5)


def test_diagnostics_are_off_by_default_and_stand_in_metrics_when_asked_for(make_trainer, training_part, validation_part):
    make_trainer(steps=4, run="plain").fit(training_part, validation=validation_part)
    trainer = make_trainer(steps=7, run="watched", diagnostics_every=2, evaluate_every=3)
    trainer.fit(training_part, validation=validation_part)
    plain, watched = (
        [json.loads(line) for line in (trainer.record.path.parent / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("plain", "watched")
    )
    assert not any("diagnostics" in line for line in plain)
    assert [line["step"] for line in watched] == [2, 3, 4, 6, 6, 7]
    measured = [line["diagnostics"][0] for line in watched if "diagnostics" in line]
    assert len(measured) == 3
    assert all(0 < entry["contraction"] < 1 and entry["share_updated"] > 0 for entry in measured)


def test_diagnostics_never_stand_before_the_statement_that_covers_them(make_trainer, training_part, monkeypatch):
    trainer = make_trainer(steps=6, diagnostics_every=1, evaluate_every=4, checkpoint_every=3)
    append = trainer.record.append_metrics

    def checked(values):
        assert json.loads((trainer.record.path / "privacy.json").read_text())["steps_done"] >= values["step"]
        append(values)

    monkeypatch.setattr(trainer.record, "append_metrics", checked)
    trainer.fit(training_part)
    assert sum("diagnostics" in line for line in trainer.record.metrics()) == 6


def test_the_model_card_of_an_exported_run_shows_the_last_figures(tmp_path, capsys):
    from dp_microadam.workbench.command_line.cli import main

    run = tmp_path / "run"
    settings = ["method=dp-microadam", "model=mlp", "steps=5", "batch_size=32", "diagnostics_every=2"]
    assert (
        main(["train", "demo", *(part for key in settings for part in ("--set", key)), "--quiet", "--run-dir", str(run)]) == 0
    )
    assert main(["export", str(run)]) == 0
    card = (run / "export" / "README.md").read_text(encoding="utf-8")
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if "diagnostics" in line][-1]
    assert last["step"] == 4
    assert "| step 4 | group 0 |" in card
    assert f"| contraction | {last['diagnostics'][0]['contraction']:.4g} |" in card
    holds = "yes" if last["diagnostics"][0]["condition_holds"] else "no"
    assert f"| condition holds | {holds} |" in card
