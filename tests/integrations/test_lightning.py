"""``PrivateLightningModule`` in the real Lightning: the same steps as ours, and no way round them."""

import json

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, TensorDataset

from dp_microadam import InputError, PrivacyError, PrivateTrainer
from dp_microadam.integrations.lightning import PrivateLightningModule, PrivateSteps
from dp_microadam.privacy.ledger import read_ledger
from dp_microadam.training.evaluation import class_loss

pytestmark = pytest.mark.filterwarnings("ignore")  # the host warns of its own deprecations, workers and loggers


class Classifier(PrivateLightningModule):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def per_example_loss(self, batch):
        return class_loss(self.network, batch)

    def validation_step(self, batch, batch_idx):
        self.log("validation_loss", self.per_example_loss(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.fixture
def make_steps(plan, train, tmp_path):
    opened = []

    def make(run="run", **options):
        opened.append(PrivateSteps(plan, train, run_dir=tmp_path / run, **options))
        return opened[-1]

    yield make
    for steps in opened:
        steps.close()


@pytest.fixture
def make_trainer(tmp_path):
    def make(**options):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        return pl.Trainer(default_root_dir=tmp_path, accelerator="cpu", **{**quiet, **options})

    return make


def test_weights_are_those_of_our_own_trainer(make_network, make_steps, make_trainer, plan, train, tmp_path):
    module = Classifier(make_network())
    trainer = make_trainer()
    trainer.fit(module, make_steps(seed=4, physical_batch_size=8))
    assert trainer.global_step == plan.steps
    twin = torch.nn.ModuleDict({"network": make_network()})  # noise is drawn by the names of parameters
    ours = PrivateTrainer(
        twin,
        torch.optim.SGD(twin.parameters(), lr=0.5),
        plan,
        lambda model, batch: class_loss(model["network"], batch),
        physical_batch_size=8,
        run_dir=tmp_path / "ours",
        seed=4,
        show_progress=False,
    )
    ours.fit(train)
    for (name, parameter), expected in zip(module.network.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, expected), name


class Spy(Callback):
    """Keeps all the host tells its callbacks of training."""

    def __init__(self):
        self.seen, self.metrics = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append((outputs, batch))
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_the_host_sees_step_numbers_and_epsilon_and_no_training_loss(make_network, make_steps, make_trainer, plan, held_out):
    spy = Spy()
    validation = DataLoader(TensorDataset(*held_out), batch_size=20)
    make_trainer(callbacks=[spy]).fit(Classifier(make_network()), make_steps(), validation)
    assert [batch for _, batch in spy.seen] == list(range(plan.steps))
    assert not any(outputs for outputs, _ in spy.seen)
    assert {name for metrics in spy.metrics for name in metrics} == {"epsilon", "validation_loss"}
    assert spy.metrics[-1]["epsilon"] == pytest.approx(plan.epsilon, rel=1e-6)


def test_validation_runs_once_per_expected_pass_over_the_data(make_network, make_steps, make_trainer, held_out):
    calls = []

    class Counting(Classifier):
        def on_validation_end(self):
            calls.append(self.trainer.global_step)

    loader = DataLoader(TensorDataset(*held_out), batch_size=20)
    make_trainer(num_sanity_val_steps=0).fit(Counting(make_network()), make_steps(), loader)
    assert calls == [4, 8, 9]


def saving(tmp_path, every):
    callback = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=every, save_top_k=-1)
    return {"callbacks": [callback], "enable_checkpointing": True}


def test_resuming_goes_on_with_the_ledger_and_lost_steps_stay_spent(make_network, make_steps, make_trainer, plan, tmp_path):
    make_trainer(max_steps=6, **saving(tmp_path, 3)).fit(Classifier(make_network()), make_steps())
    # As after a crash: three steps were taken after the checkpoint.
    trainer = make_trainer()
    trainer.fit(Classifier(make_network()), make_steps(), ckpt_path=tmp_path / "saved" / "step=3.ckpt", weights_only=True)
    assert trainer.global_step == plan.steps - 3
    assert read_ledger(tmp_path / "run").steps == plan.steps
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["epsilon"] == pytest.approx(plan.epsilon)


def test_resuming_a_finished_run_ends_at_once(make_network, make_steps, make_trainer, plan, tmp_path):
    make_trainer(**saving(tmp_path, plan.steps)).fit(Classifier(make_network()), make_steps())
    trainer = make_trainer(max_epochs=-1)
    trainer.fit(Classifier(make_network()), make_steps(), ckpt_path=tmp_path / "saved" / f"step={plan.steps}.ckpt")
    assert trainer.global_step == plan.steps
    assert read_ledger(tmp_path / "run").steps == plan.steps


def test_checkpoints_that_do_not_match_the_ledger_are_refused(make_network, make_steps, make_trainer, tmp_path):
    make_trainer(max_steps=3, **saving(tmp_path, 3)).fit(Classifier(make_network()), make_steps())
    checkpoint = tmp_path / "saved" / "step=3.ckpt"
    with pytest.raises(InputError, match="no run to go on with"):
        make_trainer().fit(Classifier(make_network()), make_steps(run="new"), ckpt_path=checkpoint)
    with pytest.raises(InputError, match="has a ledger already"):
        make_trainer().fit(Classifier(make_network()), make_steps())
    content = torch.load(checkpoint, weights_only=True)
    del content["dp_microadam"]
    torch.save(content, tmp_path / "foreign.ckpt")
    with pytest.raises(PrivacyError, match="no stamp of a private run"):
        make_trainer().fit(Classifier(make_network()), make_steps(), ckpt_path=tmp_path / "foreign.ckpt")
    ledger = tmp_path / "run" / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(PrivacyError, match="missing from the ledger"):
        make_trainer().fit(Classifier(make_network()), make_steps(), ckpt_path=checkpoint)


def test_a_checkpoint_holds_no_random_states(make_network, make_steps, make_trainer, tmp_path):
    make_trainer(max_steps=3, **saving(tmp_path, 3)).fit(Classifier(make_network()), make_steps())
    content = torch.load(tmp_path / "saved" / "step=3.ckpt", weights_only=True)
    assert not [key for key in content if "rng" in key or "random" in key]
    assert not any(isinstance(value, torch.Tensor) and value.dtype == torch.uint8 for value in content.values())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"precision": "bf16-mixed"}, "norms in half precision"),
        ({"precision": "16-true"}, "norms in half precision"),
        ({"limit_train_batches": 2}, "stop early by max_steps"),
        ({"overfit_batches": 2}, "stop early by max_steps"),
        ({"fast_dev_run": True}, "stop early by max_steps"),
        ({"reload_dataloaders_every_n_epochs": 1}, "leave it at 0"),
        ({"callbacks": [StochasticWeightAveraging(1e-2)]}, "through the training data once more"),
        ({"callbacks": [GradientAccumulationScheduler({0: 2})]}, "noise is added once|not supported"),
        ({"callbacks": [LearningRateFinder()]}, "training loss, which is private"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_settings_that_would_break_the_guarantee_are_refused(
    make_network, make_steps, make_trainer, options, sentence, tmp_path
):
    with pytest.raises((InputError, MisconfigurationException, RuntimeError), match=sentence):
        make_trainer(**options).fit(Classifier(make_network()), make_steps())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [{"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}], ids=str)
def test_clipping_and_accumulation_are_refused_by_the_host_itself(make_network, make_steps, make_trainer, options):
    with pytest.raises(MisconfigurationException, match="not supported for manual optimization"):
        make_trainer(**options).fit(Classifier(make_network()), make_steps())


def test_several_devices_are_refused(make_network, make_steps, make_trainer, monkeypatch):
    trainer = make_trainer()
    monkeypatch.setattr(pl.Trainer, "world_size", property(lambda self: 2))
    with pytest.raises(InputError, match="devices=1"):
        trainer.fit(Classifier(make_network()), make_steps())


def test_a_loader_that_draws_its_own_batches_is_refused(make_network, make_trainer, train):
    with pytest.raises(PrivacyError, match=r"give trainer.fit a PrivateSteps"):
        make_trainer().fit(Classifier(make_network()), DataLoader(TensorDataset(*train), batch_size=30))


def test_logging_from_training_examples_is_refused_before_the_first_step(make_network, make_steps, make_trainer, tmp_path):
    class Telling(Classifier):
        def per_example_loss(self, batch):
            losses = super().per_example_loss(batch)
            self.log("train_loss", losses.mean())
            return losses

    with pytest.raises(PrivacyError, match="'train_loss' was logged from training examples"):
        make_trainer().fit(Telling(make_network()), make_steps())
    assert not (tmp_path / "run").exists()


def test_a_training_step_of_one_s_own_is_refused(make_network, make_steps, make_trainer):
    class Own(Classifier):
        def training_step(self, batch, batch_idx):
            return None

        def on_train_start(self):
            super().on_train_start()

    with pytest.raises(InputError, match="define per_example_loss"):
        make_trainer().fit(Own(make_network()), make_steps())


def test_hyperparameters_that_hold_data_are_refused(make_network, make_steps, make_trainer, train):
    class Keeping(Classifier):
        def __init__(self, network, data):
            super().__init__(network)
            self.save_hyperparameters(ignore=["network"])

    with pytest.raises(InputError, match="written into checkpoints"):
        make_trainer().fit(Keeping(make_network(), train), make_steps())


def test_schedulers_are_stepped_after_each_step(make_network, make_steps, make_trainer, plan):
    class Scheduled(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=plan.steps)]

    trainer = make_trainer()
    trainer.fit(Scheduled(make_network()), make_steps())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_scheduler_that_follows_a_loss_is_refused(make_network, make_steps, make_trainer):
    class Following(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "validation_loss"}}

    with pytest.raises(InputError, match="follows the steps"):
        make_trainer().fit(Following(make_network()), make_steps())


def test_metrics_of_training_data_are_refused(make_network, make_steps, make_trainer, train):
    with pytest.raises(InputError, match="hold it out"):
        make_trainer().fit(Classifier(make_network()), make_steps(), DataLoader(TensorDataset(*train), batch_size=30))
