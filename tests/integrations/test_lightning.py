"""``PrivateLightningModule`` in the real Lightning: the same steps as ours, and no way round them."""

import importlib.util
import json
from collections import Counter, defaultdict
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from flat import flat
from lightning.pytorch.callbacks import (
    Callback,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dp_microadam import InputError, Method, PrivacyError, PrivateTrainer, methods
from dp_microadam.integrations.lightning import PrivateLightningModule, PrivateSteps
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.training.evaluation import class_loss

WORKER = Path(__file__).with_name("lightning_worker.py")
_spec = importlib.util.spec_from_file_location("lightning_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)

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


def trainer_of(folder, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return pl.Trainer(default_root_dir=folder, accelerator="cpu", **{**quiet, **options})


@pytest.fixture
def fit(make_network, plan, train, tmp_path):
    """Trains a module, or one of this class, and returns its trainer; ``steps`` are options of PrivateSteps."""
    opened = []

    def run(module=Classifier, validation=None, *, steps=None, checkpoint=None, **options):
        given = {"plan": plan, "run_dir": tmp_path / "run", **(steps or {})}
        opened.append(PrivateSteps(given.pop("plan"), train, **flat(**given)))
        trainer = trainer_of(tmp_path, **options)
        module = module(make_network()) if isinstance(module, type) else module
        trainer.fit(module, opened[-1], validation, ckpt_path=checkpoint, weights_only=None if checkpoint is None else True)
        return trainer

    yield run
    for steps in opened:
        steps.close()


@pytest.fixture
def ours(make_network, train, tmp_path):
    """The weights that our own trainer reaches with the same network, SGD and seed."""

    def weights(plan, users=None):
        twin = torch.nn.ModuleDict({"network": make_network()})  # noise is drawn by the names of parameters
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
        options = flat(seed=4, physical_batch_size=8, show_progress=False)
        loss = lambda model, batch: class_loss(model["network"], batch)  # noqa: E731
        PrivateTrainer(twin, optimizer, plan, loss, run_dir=tmp_path / "ours", **options).fit(train, users=users)
        return twin.state_dict()

    return weights


def assert_equal(weights, expected, atol=0.0):
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("unit", ["example", "user"])
def test_weights_are_those_of_our_own_trainer(fit, ours, unit, plan, plan_of_users, users, tmp_path):
    plan, users = (plan, None) if unit == "example" else (plan_of_users, users)
    trainer = fit(steps={"plan": plan, "users": users, "seed": 4, "physical_batch_size": 8})
    assert trainer.global_step == plan.steps
    assert_equal(trainer.lightning_module.state_dict(), ours(plan, users))
    assert ("each of 40 users in each step" in (tmp_path / "run" / "privacy.txt").read_text()) == (unit == "user")


class Spy(Callback):
    """Keeps all the host tells its callbacks of training."""

    def __init__(self):
        self.seen, self.metrics = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append((outputs, batch))
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_the_host_sees_step_numbers_and_epsilon_and_no_training_loss(fit, plan, held_out):
    spy, calls = Spy(), []

    class Counting(Classifier):
        def on_validation_end(self):
            calls.append(self.trainer.global_step)

    fit(Counting, DataLoader(TensorDataset(*held_out), batch_size=20), callbacks=[spy], num_sanity_val_steps=0)
    assert [batch for _, batch in spy.seen] == list(range(plan.steps))
    assert not any(outputs for outputs, _ in spy.seen)
    assert {name for metrics in spy.metrics for name in metrics} == {"epsilon", "validation_loss"}
    spent = [plan.epsilon_after(step) for step in range(1, plan.steps + 1)]
    assert [metrics["epsilon"] for metrics in spy.metrics] == pytest.approx(spent, rel=1e-6), "never less than was spent"
    assert calls == [4, 8, 9], "validation runs once per expected pass over the data"


@pytest.fixture
def saved(fit, tmp_path):
    """The checkpoint of step 3 of a run that has taken six steps, as after a crash."""
    callback = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=3, save_top_k=-1)
    fit(max_steps=6, callbacks=[callback], enable_checkpointing=True)
    return tmp_path / "saved" / "step=3.ckpt"


def test_resuming_goes_on_with_the_ledger_and_lost_steps_stay_spent(fit, saved, plan, tmp_path):
    callback = ModelCheckpoint(tmp_path / "last", filename="{step}", every_n_train_steps=6, save_top_k=-1)
    trainer = fit(checkpoint=saved, callbacks=[callback], enable_checkpointing=True)
    assert trainer.global_step == plan.steps - 3
    assert read_ledger(tmp_path / "run").steps == plan.steps
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["epsilon"] == pytest.approx(plan.epsilon)
    again = fit(checkpoint=tmp_path / "last" / "step=6.ckpt", max_epochs=-1)
    assert again.global_step == 6, "a finished run ends at once"
    assert read_ledger(tmp_path / "run").steps == plan.steps


def test_checkpoints_that_do_not_match_the_ledger_are_refused(fit, saved, tmp_path):
    with pytest.raises(InputError, match="no run to go on with"):
        fit(steps={"run_dir": tmp_path / "new"}, checkpoint=saved)
    with pytest.raises(InputError, match="has a ledger already"):
        fit()
    content = torch.load(saved, weights_only=True)
    del content["dp_microadam"]
    torch.save(content, tmp_path / "foreign.ckpt")
    with pytest.raises(PrivacyError, match="no stamp of a private run"):
        fit(checkpoint=tmp_path / "foreign.ckpt")
    ledger = tmp_path / "run" / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(PrivacyError, match="missing from the ledger"):
        fit(checkpoint=saved)


def test_a_checkpoint_holds_no_random_states(saved):
    content = torch.load(saved, weights_only=True)
    assert not [key for key in content if "rng" in key or "random" in key]
    assert not any(isinstance(value, torch.Tensor) and value.dtype == torch.uint8 for value in content.values())


class WithItsOwnStep(Classifier):
    def training_step(self, batch, batch_idx):
        return None

    def on_train_start(self):
        super().on_train_start()


class FollowingALoss(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "validation_loss"}}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"plugins": [MixedPrecision("16-mixed", "cpu")]}, "scales losses and gradients"),
        ({"precision": "16-true"}, "rounded to half precision"),
        ({"limit_train_batches": 2}, "stop early by max_steps"),
        ({"overfit_batches": 2}, "stop early by max_steps"),
        ({"fast_dev_run": True}, "stop early by max_steps"),
        ({"reload_dataloaders_every_n_epochs": 1}, "leave it at 0"),
        ({"callbacks": [StochasticWeightAveraging(1e-2)]}, "through the training data once more"),
        ({"callbacks": [GradientAccumulationScheduler({0: 2})]}, "noise is added once|not supported"),
        ({"callbacks": [LearningRateFinder()]}, "training loss, which is private"),
        ({"callbacks": [DeviceStatsMonitor(False)], "logger": True}, "how large batches were, which is private"),
        ({"profiler": "advanced"}, "profiler is AdvancedProfiler, which counts"),
        ({"gradient_clip_val": 1.0}, "not supported for manual optimization"),
        ({"accumulate_grad_batches": 2}, "not supported for manual optimization"),
        ({"module": WithItsOwnStep}, "define per_example_loss"),
        ({"module": FollowingALoss}, "follows the steps"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_settings_that_would_break_the_guarantee_are_refused(fit, options, sentence, tmp_path):
    with pytest.raises((InputError, MisconfigurationException, RuntimeError), match=sentence):
        fit(**options)
    assert not (tmp_path / "run").exists()


def test_hyperparameters_that_hold_data_are_refused(fit, make_network, train):
    class Keeping(Classifier):
        def __init__(self, network, data):
            super().__init__(network)
            self.save_hyperparameters(ignore=["network"])

    with pytest.raises(InputError, match="written into checkpoints"):
        fit(Keeping(make_network(), train))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process reaches."""
    return worker.train(tmp_path_factory.mktemp("alone"), 1)


def test_a_method_with_phases_and_its_scheduler_train_as_in_our_own_trainer(alone, tmp_path):
    twin = torch.nn.ModuleDict({"network": worker.Phased().network})
    method = methods.sparta(twin, lr=0.1, keep=0.5, first_phase=0.25, scoring_epochs=1.0)
    ours = PrivateTrainer(
        twin,
        Method.of(method).configure(schedule=torch.optim.lr_scheduler.ExponentialLR(method.optimizer, 0.9)),
        worker.PLAN,
        lambda model, batch: class_loss(model["network"], batch),
        run_dir=tmp_path / "ours",
        **flat(seed=4, physical_batch_size=7, show_progress=False),
    )
    ours.fit(worker.examples(60, 0))
    assert_equal(alone["weights"], twin["network"].state_dict(), 1e-9)
    assert dict(read_ledger(tmp_path / "ours").phases) == {"head, biases, norms": 2, "scoring": 3, "selected rows": 3}


def test_a_method_s_state_is_in_the_checkpoint(alone, tmp_path):
    assert_equal(worker.train_in_parts(tmp_path, 1), alone["weights"], 1e-9)
    content = torch.load(tmp_path / "saved" / "step=4.ckpt", weights_only=True)["dp_microadam"]
    assert content["method"]["extra"]["totals"]
    assert content["steps_spent"] == 4


def test_parameters_require_gradients_as_before_when_a_run_ends(fit):
    assert all(parameter.requires_grad for parameter in fit(worker.Phased().float()).lightning_module.parameters())


@pytest.mark.slow
def test_two_processes_reach_the_weights_of_one(run_group, alone):
    folder = run_group("lightning", 2, WORKER)
    for rank in range(2):
        found = torch.load(folder / f"trained-{rank}.pt")
        assert_equal(found["weights"], alone["weights"], 1e-9)
        assert found["loss"] == pytest.approx(alone["loss"], abs=1e-9), "validation is divided between them"
        assert_equal(torch.load(folder / f"parts-{rank}.pt"), alone["weights"], 1e-9)
        refused = torch.load(folder / f"refused-{rank}.pt")
        assert "strategy is DDPStrategy, which reduces gradients in its own way; it must be PrivateDDPStrategy()" in refused
    for run in ("trained", "parts"):
        assert read_ledger(folder / run / "run").processes == {2: worker.PLAN.steps}
        assert json.loads((folder / run / "run" / "privacy.json").read_text())["steps_done"] == worker.PLAN.steps
    assert not (folder / "ddp").exists()


def test_mixed_precision_reaches_the_clipping_engine(fit, monkeypatch):
    # Products of bfloat16 are not available on every processor: what is asked for is looked at, and nothing is computed.
    asked = {}

    def begin(self, *arguments, **options):
        asked.update(options)
        raise InterruptedError

    monkeypatch.setattr(PrivateSteps, "begin", begin)
    with pytest.raises(InterruptedError):
        fit(precision="bf16-mixed")
    assert asked["autocast"] is torch.bfloat16


class InHalfPrecision(MixedPrecision):
    """Lightning's own mixed precision, with float16 in place of bfloat16."""

    @contextmanager
    def forward_context(self):
        with torch.autocast("cpu", dtype=torch.float16):
            yield


def test_lightning_s_autocast_is_not_around_norms_sums_and_noise(fit, ours, plan, monkeypatch):
    monkeypatch.setattr("dp_microadam.integrations.lightning._AUTOCAST", {"bf16-mixed": None})
    trainer = fit(steps={"seed": 4, "physical_batch_size": 8}, plugins=[InHalfPrecision("bf16-mixed", "cpu")])
    assert_equal(trainer.lightning_module.state_dict(), ours(plan))


def test_a_failed_step_is_spent_and_the_run_can_be_resumed_in_the_same_process(fit, plan, tmp_path):
    class Failing(Classifier):
        def per_example_loss(self, batch):
            if self.trainer.global_step == 5:
                raise ValueError(f"secret {batch[0][0]}")
            return super().per_example_loss(batch)

    callback = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=3)
    with pytest.raises(PrivacyError, match="withheld") as caught:
        fit(Failing, callbacks=[callback], enable_checkpointing=True)
    assert "secret" not in str(caught.value)
    assert read_ledger(tmp_path / "run").steps == 6
    assert fit(checkpoint=tmp_path / "saved" / "step=3.ckpt").global_step == plan.steps - 3
    assert read_ledger(tmp_path / "run").steps == plan.steps


def test_a_loader_that_draws_its_own_batches_is_refused(make_network, train, tmp_path):
    with pytest.raises(PrivacyError, match=r"give trainer.fit a PrivateSteps"):
        trainer_of(tmp_path).fit(Classifier(make_network()), DataLoader(TensorDataset(*train), batch_size=30))


def test_metrics_of_held_out_examples_are_logged_as_ever(fit, held_out, tmp_path):
    class Validated(Classifier):
        def __init__(self, network):
            super().__init__(network)
            self.accuracy = torchmetrics.classification.BinaryAccuracy()

        def validation_step(self, batch, batch_idx):
            self.accuracy(self.network(batch[0]).argmax(1), batch[1])
            self.log("validation_accuracy", self.accuracy)

    logger = CSVLogger(tmp_path / "csv", flush_logs_every_n_steps=1)
    fit(Validated, DataLoader(TensorDataset(*held_out), batch_size=20), logger=logger)
    (written,) = (path.read_text() for path in (tmp_path / "csv").rglob("metrics.csv"))
    assert "validation_accuracy" in written
    assert "epsilon" in written


class Telling(Classifier):
    """Has whatever modules keep figures in, tells one of them in its loss, and logs metrics at the end of an epoch."""

    def __init__(self, network, logger, tell):
        super().__init__(network)
        self.accuracy = torchmetrics.classification.BinaryAccuracy()
        self.several = torchmetrics.MetricCollection([torchmetrics.SumMetric(), torchmetrics.MeanMetric()])
        self.listed = [torchmetrics.SumMetric(), torchmetrics.MetricCollection([torchmetrics.SumMetric()]), nn.BatchNorm1d(2)]
        self.nested = {"a": {"b": {"c": [nn.Sequential(torchmetrics.SumMetric())]}}}
        self.losses, self.history, self.seen = [], defaultdict(list, loss=[]), {"examples": 0}
        self.calls, self.total, self.sums, self.count = 0, 0.0, torch.zeros(2), Counter()
        self.own_logger, self.tracker, self.tell = logger, SimpleNamespace(total=0.0, seen=[]), tell

    def gathered(self):
        figures = self.losses, dict(self.history), self.seen, self.calls, self.total, self.sums.tolist(), self.count
        modules = nn.ModuleList((self.accuracy, self.several, *self.listed, *self.nested["a"]["b"]["c"])).modules()
        counts = [module._update_count for module in modules if isinstance(module, torchmetrics.Metric)]
        return deepcopy(
            (figures, vars(self.tracker), counts, self.listed[2].weight.tolist(), self.listed[2].running_mean.tolist())
        )

    def per_example_loss(self, batch):
        losses = super().per_example_loss(batch)
        self.tell(self, losses.detach())
        return losses

    def on_train_epoch_end(self):
        self.log("train_loss", self.accuracy.compute() + self.several.compute()["SumMetric"] + self.listed[0].compute())


def _assign(owner, name, value):
    setattr(owner, name, value)


WAYS = {
    "update of a metric": lambda module, losses: module.accuracy.update((losses > 1).long(), (losses > 2).long()),
    "call of a metric": lambda module, losses: module.accuracy((losses > 1).long(), (losses > 2).long()),
    "metrics in a collection": lambda module, losses: module.several.update(torch.ones(len(losses))),
    "metric in a list": lambda module, losses: module.listed[0].update(len(losses)),
    "collection in a list": lambda module, losses: module.listed[1].update(len(losses)),
    "buffer in a list": lambda module, losses: module.listed[2].running_mean.add_(1.0),
    "parameter in a list": lambda module, losses: module.listed[2].weight.detach().mul_(2.0),
    "module in dicts": lambda module, losses: module.nested["a"]["b"]["c"][0][0].update(len(losses)),
    "list": lambda module, losses: module.losses.append(losses),
    "list in a dict": lambda module, losses: module.history["loss"].append(losses.mean()),
    "number in a dict": lambda module, losses: module.seen.update(examples=module.seen["examples"] + len(losses)),
    "counter": lambda module, losses: _assign(module, "calls", module.calls + 1),
    "sum": lambda module, losses: _assign(module, "total", module.total + float(losses.sum())),
    "tensor": lambda module, losses: module.sums.add_(losses.sum()),
    "Counter": lambda module, losses: module.count.update({"examples": len(losses)}),
    "tracker's number": lambda module, losses: _assign(module.tracker, "total", module.tracker.total + 1.0),
    "tracker's list": lambda module, losses: module.tracker.seen.append(1.0),
    "log": lambda module, losses: module.log("train_loss", 1.0),
    "log_dict": lambda module, losses: module.log_dict({"train_loss": 1.0}),
    "super": lambda module, losses: super(PrivateLightningModule, module).log("train_loss", 1.0),
    "logger": lambda module, losses: module.logger.log_metrics({"train_loss": 1.0}),
    "loggers": lambda module, losses: module.loggers[0].log_metrics({"train_loss": 1.0}),
    "its own logger": lambda module, losses: module.own_logger.log_metrics({"train_loss": 1.0}),
    "trainer's logger": lambda module, losses: module.trainer.logger.log_metrics({"train_loss": 1.0}),
    "experiment": lambda module, losses: module.trainer.loggers[0].experiment.log_metrics({"train_loss": 1.0}),
    "connector": lambda module, losses: module.trainer._logger_connector.log_metrics({"train_loss": torch.ones(())}),
    "callback_metrics": lambda module, losses: module.trainer.callback_metrics.update(train_loss=torch.ones(())),
    "results": lambda module, losses: module.trainer._results.log(
        "training_step", "train_loss", torch.ones(()), True, False, batch_size=1
    ),
    "callbacks": lambda module, losses: module.trainer.callbacks[0].seen.append(1.0),
    "trainer's attribute": lambda module, losses: module.trainer.__dict__.update(log_every_n_steps=7),
    "rate": lambda module, losses: module.optimizers().param_groups[0].update(lr=module.trainer.global_step + 0.25),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_leads_from_the_loss_to_a_logger(fit, make_network, tmp_path, way):
    """It is refused before the first step, and put back."""
    spy, loggers = Spy(), [CSVLogger(tmp_path / "csv", name, flush_logs_every_n_steps=1) for name in ("host's", "own")]
    module = Telling(make_network(), loggers[1], WAYS[way])
    before = module.gathered()
    with pytest.raises(PrivacyError, match=r"training examples|changed by the loss"):
        fit(module, logger=loggers[0], log_every_n_steps=1, callbacks=[spy])
    for logger in loggers:
        logger.save()
    assert module.gathered() == before
    assert spy.seen == []
    assert module.trainer.log_every_n_steps == 1
    assert "train_loss" not in module.trainer.callback_metrics
    assert not any("train_loss" in path.read_text() for path in (tmp_path / "csv").rglob("*.csv"))
    assert way == "results" or not (tmp_path / "run").exists()  # there are none before the first step


def test_a_cache_of_the_loss_works_and_keeps_nothing(fit, plan):
    class Caching(Classifier):
        def __init__(self, network):
            super().__init__(network)
            self.mask, self.masks, self.ready = None, {}, False

        def per_example_loss(self, batch):
            self.mask = self.masks[len(batch[1])] = torch.ones(len(batch[1]))
            self.last_batch, self.ready = batch, True
            return super().per_example_loss(batch) * self.mask

    trainer = fit(Caching)
    module = trainer.lightning_module
    assert trainer.global_step == plan.steps
    assert (module.mask, module.masks, module.ready) == (None, {}, False)
    assert not hasattr(module, "last_batch")


def test_no_loss_decides_how_long_a_run_is_or_what_its_checkpoints_hold(fit, plan):
    class Deciding(Classifier):
        def per_example_loss(self, batch):
            self.trainer.should_stop = True
            self.trainer.optimizers[0].param_groups[0]["seen"] = self.trainer.optimizers[0].state["seen"] = len(batch[0])
            return super().per_example_loss(batch)

    trainer = fit(Deciding)
    assert trainer.global_step == plan.steps
    assert "seen" not in str(trainer.optimizers[0].state_dict())


class Views(Dataset):
    """Tensors in a Dataset of one's own."""

    def __init__(self, inputs, labels):
        self.inputs, self.labels = inputs, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


class Iterated:
    """A loader that is no DataLoader."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter([self.data[0].split(20)[0], self.data[1].split(20)[0]] for _ in range(2))

    def __len__(self):
        return 2


LOADERS = {
    "DataLoader": lambda data: DataLoader(TensorDataset(*data), batch_size=30),
    "views": lambda data: DataLoader(Views(data[0][:16], data[1][:16]), batch_size=30),
    "its own": Iterated,
    "around another": lambda data: Iterated([DataLoader(TensorDataset(*data)), DataLoader(TensorDataset(*data))]),
    "by name": lambda data: {"seen": DataLoader(TensorDataset(*data), batch_size=30)},
    "generator": lambda data: (tuple(part[rows] for part in data) for rows in torch.arange(40).split(20)),
}


class Told(Classifier):
    """Says what it was given to evaluate on, and overrides every hook, as people do, without the base class's."""

    def __init__(self, network):
        super().__init__(network)
        self.told, self.later = [], None

    def on_validation_start(self):
        pass

    on_test_start = on_predict_start = on_validation_model_eval = on_test_model_eval = on_validation_start

    def setup(self, stage):
        pass

    def val_dataloader(self):
        return [] if self.later is None else self.later

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.told.append(batch)

    test_step = predict_step = validation_step


@pytest.mark.parametrize("look", ["validate", "test", "predict", "fit"])
@pytest.mark.parametrize("kind", LOADERS)
def test_whatever_is_evaluated_on_it_is_held_out(fit, make_network, train, kind, look, tmp_path):
    module = Told(make_network())
    if look == "fit":
        with pytest.raises(InputError, match="hold it out"):
            fit(module, LOADERS[kind](train))
    else:
        fit(module, max_steps=1)
        for trainer in (trainer_of(tmp_path), module.trainer):
            with pytest.raises(InputError, match="hold it out"):
                getattr(trainer, look)(module, LOADERS[kind](train), weights_only=True)
    assert not module.told


def test_held_out_data_is_evaluated_on_whatever_the_loader(fit, make_network, held_out, tmp_path):
    module = Told(make_network())
    fit(module, LOADERS["its own"](held_out), max_steps=1)
    for look in ("validate", "test", "predict"):
        for kind in ("DataLoader", "its own", "generator"):
            module.told.clear()
            getattr(trainer_of(tmp_path), look)(module, LOADERS[kind](held_out), weights_only=True)
            assert module.told, (look, kind)


def test_a_validation_loader_that_appears_later_is_looked_at_too(fit, make_network, train):
    module = Told(make_network())

    class Late(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.fit_loop.epoch_loop.val_loop._combined_loader = None
            module.later = LOADERS["DataLoader"](train)

    with pytest.raises(InputError, match="hold it out"):
        fit(module, callbacks=[Late()])
    assert not module.told
