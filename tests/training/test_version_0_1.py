"""Runs of version 0.1, left half-way: this version goes on with them and reaches the weights that 0.1 itself reached.

``version_0_1/`` was written by 0.1.0 with a fixed seed, which makes all that follows repeatable: ``reached_by_0_1.pt`` holds
the weights after the last of its twelve steps.
"""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from dp_microadam import MicroAdam, PrivacyPlan, PrivateStep, PrivateTrainer, methods
from dp_microadam.privacy.ledger import read_ledger

WRITTEN = Path(__file__).parent / "version_0_1"

PLAN = PrivacyPlan.solve(dataset_size=60, batch_size=12, delta=1e-3, noise_multiplier=1.0, steps=12, accountant="rdp")


def examples():
    inputs = torch.rand(60, 6, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs[:, 0] > 0.5).long()


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


METHODS = {
    "microadam": lambda model: MicroAdam(model.parameters(), lr=1e-2, density=0.1, seed=0),
    "sparta": lambda model: methods.sparta(model, lr=0.1, keep=0.5, first_phase=0.25, scoring_epochs=1.0),
    "delayed": lambda model: methods.scale_then_privatize(model, source="delayed", interval=4, lr=0.1),
}


def assert_reached(model, run):
    for name, expected in torch.load(WRITTEN / run / "reached_by_0_1.pt").items():
        torch.testing.assert_close(model.state_dict()[name], expected)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_of_version_0_1_goes_on_to_the_same_weights(tmp_path, name):
    shutil.copytree(WRITTEN / name, tmp_path / "run")
    model = network()
    trainer = PrivateTrainer(
        model,
        METHODS[name](model),
        PLAN,
        loss,
        run_dir=tmp_path / "run",
        seed=7,
        physical_batch_size=8,
        show_progress=False,
        ema_decay=0.9,
        evaluate_every=3,
    )
    result = trainer.resume().fit(examples())
    assert (result.steps_done, result.updates) == (12, 12)
    assert result.epsilon == pytest.approx(PLAN.epsilon)
    assert read_ledger(tmp_path / "run").steps == 12
    assert_reached(model, name)


def test_a_host_s_checkpoint_of_version_0_1_goes_on_to_the_same_weights(tmp_path):
    shutil.copytree(WRITTEN / "steps", tmp_path / "run")
    saved = torch.load(tmp_path / "run" / "host.pt")
    model = network()
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.load_state_dict(saved["optimizer"])
    method = methods.Method(optimizer)
    step = PrivateStep(model, loss, PLAN, examples(), run_dir=tmp_path / "run", method=method, physical_batch_size=8, seed=7)
    step.load_state_dict(saved["dp_microadam"])
    for _ in step:
        method.apply(model, step.take())
    step.close()
    assert step.position == 12
    assert_reached(model, "steps")


def test_a_procedure_of_version_0_1_still_trains(tmp_path):
    with pytest.deprecated_call():
        from dp_microadam.training.procedure import Phase, Procedure

        class Halved(Procedure):
            def phases(self, plan):
                return Phase("weights", 3, frozenset({"2.weight"})), Phase("both", plan.steps - 3)

            def receive(self, means):
                return {name: mean / 2 for name, mean in means.items()}

    trained = []
    for form in ("procedure=", "Method(optimizer, procedure)", "subclass of Method"):
        torch.manual_seed(0)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"run_dir": tmp_path / form, "seed": 1, "show_progress": False}
        if form == "subclass of Method":
            method = type("Halved", (methods.Method,), {"phases": Halved.phases, "receive": Halved.receive})(optimizer)
            trainer = PrivateTrainer(model, method, PLAN, loss, **options)
        elif form == "procedure=":
            with pytest.deprecated_call():
                trainer = PrivateTrainer(model, optimizer, PLAN, loss, procedure=Halved(), **options)
        else:
            with pytest.deprecated_call():
                method = methods.Method(optimizer, Halved())
            trainer = PrivateTrainer(model, method, PLAN, loss, **options)
        trainer.fit(examples())
        trained.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(trained[0], trained[2])
    assert torch.equal(trained[1], trained[2])
