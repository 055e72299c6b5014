"""``PrivateLightningModule`` in the real Lightning: the same steps as ours, and no way round them."""

import importlib.util
import json
from collections import Counter, defaultdict
from contextlib import contextmanager
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
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dp_microadam import InputError, Method, PrivacyError, PrivacyPlan, PrivateTrainer, methods
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


@pytest.fixture
def make_steps(plan, train, tmp_path):
    opened = []

    def make(run="run", **options):
        opened.append(PrivateSteps(options.pop("plan", plan), train, run_dir=tmp_path / run, **flat(**options)))
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
        run_dir=tmp_path / "ours",
        **flat(seed=4, physical_batch_size=8, show_progress=False),
    )
    ours.fit(train)
    for (name, parameter), expected in zip(module.network.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, expected), name


def test_with_users_weights_are_those_of_our_own_trainer(make_network, make_trainer, plan_of_users, users, train, tmp_path):
    module = Classifier(make_network())
    steps = PrivateSteps(plan_of_users, train, users=users, run_dir=tmp_path / "run", **flat(seed=4, physical_batch_size=8))
    make_trainer().fit(module, steps)
    twin = torch.nn.ModuleDict({"network": make_network()})
    ours = PrivateTrainer(
        twin,
        torch.optim.SGD(twin.parameters(), lr=0.5),
        plan_of_users,
        lambda model, batch: class_loss(model["network"], batch),
        run_dir=tmp_path / "ours",
        **flat(seed=4, physical_batch_size=8, show_progress=False),
    )
    ours.fit(train, users=users)
    for (name, parameter), expected in zip(module.network.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, expected), name
    assert "each of 40 users in each step" in (tmp_path / "run" / "privacy.txt").read_text()


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
    spent = [plan.epsilon_after(step) for step in range(1, plan.steps + 1)]
    assert [metrics["epsilon"] for metrics in spy.metrics] == pytest.approx(spent, rel=1e-6), "never less than was spent"


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


def test_with_bands_a_resumed_run_counts_its_sessions_and_ends_within_epsilon(make_network, make_steps, make_trainer, tmp_path):
    banded = PrivacyPlan(120, 30, 1.0, 9, 1e-3, bands=4)
    make_trainer(max_steps=2, **saving(tmp_path, 1)).fit(Classifier(make_network()), make_steps(plan=banded))
    for last, max_steps in ((2, 3), (3, -1)):
        trainer = make_trainer(max_steps=max_steps, **saving(tmp_path, 1))
        trainer.fit(Classifier(make_network()), make_steps(plan=banded), ckpt_path=tmp_path / "saved" / f"step={last}.ckpt")
    record = read_ledger(tmp_path / "run")
    assert (trainer.global_step, record.steps, record.resumed_at) == (7, 7, (2, 3))
    assert float(trainer.logged_metrics["epsilon"]) == pytest.approx(banded.epsilon, rel=1e-6)
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["epsilon"] == record.epsilon() == banded.epsilon


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


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process reaches."""
    return worker.train(tmp_path_factory.mktemp("alone"), 1)


def assert_equal(weights, expected):
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9, msg=name)


def test_a_method_with_phases_trains_as_in_our_own_trainer(alone, tmp_path):
    twin = torch.nn.ModuleDict({"network": worker.Phased().network})  # noise is drawn by the names of parameters
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
    assert_equal(alone["weights"], twin["network"].state_dict())
    assert dict(read_ledger(tmp_path / "ours").phases) == {"head, biases, norms": 2, "scoring": 3, "selected rows": 3}


def test_a_method_s_state_is_in_the_checkpoint(alone, tmp_path):
    assert_equal(worker.train_in_parts(tmp_path, 1), alone["weights"])
    content = torch.load(tmp_path / "saved" / "step=4.ckpt", weights_only=True)["dp_microadam"]
    assert content["method"]["extra"]["totals"]
    assert content["steps_spent"] == 4


def test_parameters_require_gradients_as_before_when_a_run_ends(make_steps, make_trainer, plan):
    module = worker.Phased().float()
    make_trainer().fit(module, make_steps())
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.slow
def test_two_processes_reach_the_weights_of_one(run_group, alone):
    folder = run_group("lightning", 2, WORKER)
    for rank in range(2):
        found = torch.load(folder / f"trained-{rank}.pt")
        assert_equal(found["weights"], alone["weights"])
        assert found["loss"] == pytest.approx(alone["loss"], abs=1e-9), "validation is divided between them"
        assert_equal(torch.load(folder / f"parts-{rank}.pt"), alone["weights"])
        refused = torch.load(folder / f"refused-{rank}.pt")
        assert "strategy is DDPStrategy, which reduces gradients in its own way; it must be PrivateDDPStrategy()" in refused
    for run in ("trained", "parts"):
        record = read_ledger(folder / run / "run")
        assert record.processes == {2: worker.PLAN.steps}
        assert json.loads((folder / run / "run" / "privacy.json").read_text())["steps_done"] == worker.PLAN.steps
    assert not (folder / "ddp").exists()


def test_mixed_precision_reaches_the_clipping_engine(make_network, make_steps, make_trainer, monkeypatch):
    # Products of bfloat16 are not available on every processor: what is asked for is looked at, and nothing is computed.
    asked = {}

    def begin(self, *arguments, **options):
        asked.update(options)
        raise InterruptedError

    monkeypatch.setattr(PrivateSteps, "begin", begin)
    with pytest.raises(InterruptedError):
        make_trainer(precision="bf16-mixed").fit(Classifier(make_network()), make_steps())
    assert asked["autocast"] is torch.bfloat16


class InHalfPrecision(MixedPrecision):
    """Lightning's own mixed precision, with float16 in place of bfloat16."""

    @contextmanager
    def forward_context(self):
        with torch.autocast("cpu", dtype=torch.float16):
            yield


def test_lightning_s_autocast_is_not_around_norms_sums_and_noise(make_network, make_steps, make_trainer, monkeypatch):
    monkeypatch.setattr("dp_microadam.integrations.lightning._AUTOCAST", {"bf16-mixed": None, "32-true": None})
    weights = []
    for run, options in (("mixed", {"plugins": [InHalfPrecision("bf16-mixed", "cpu")]}), ("full", {})):
        module = Classifier(make_network())
        make_trainer(**options).fit(module, make_steps(run=run, seed=4))
        weights.append(module.network.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_options_of_the_private_step_are_reachable(make_network, make_steps, make_trainer, plan, tmp_path):
    seen = []

    def augment(batch):
        seen.append(len(batch[1]))
        return batch

    steps = make_steps(
        augment=augment,
        clipping="per-layer",
        **flat(autocast=torch.float16),
        max_steps=3,
        public=("the seasons",),
    )
    trainer = make_trainer()
    trainer.fit(Classifier(make_network()), steps)
    assert trainer.global_step == read_ledger(tmp_path / "run").steps == 3
    assert seen
    assert "the seasons" in (tmp_path / "run" / "privacy.txt").read_text()


def test_a_failed_step_is_spent_and_the_run_can_be_resumed_in_the_same_process(
    make_network, make_steps, make_trainer, plan, tmp_path
):
    class Failing(Classifier):
        fail_at = 5

        def per_example_loss(self, batch):
            if self.trainer.global_step == self.fail_at:
                raise ValueError(f"secret {batch[0][0]}")
            return super().per_example_loss(batch)

    with pytest.raises(PrivacyError, match="withheld") as caught:
        make_trainer(**saving(tmp_path, 3)).fit(Failing(make_network()), make_steps())
    assert "secret" not in str(caught.value)
    assert read_ledger(tmp_path / "run").steps == 6
    trainer = make_trainer()
    trainer.fit(Classifier(make_network()), make_steps(), ckpt_path=tmp_path / "saved" / "step=3.ckpt", weights_only=True)
    assert trainer.global_step == plan.steps - 3
    assert read_ledger(tmp_path / "run").steps == plan.steps


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


class Measured(Classifier):
    """Updates metrics inside the loss and logs them at the end of an epoch, as Lightning's own guides do in training_step."""

    def __init__(self, network, update):
        super().__init__(network)
        self.accuracy = torchmetrics.classification.BinaryAccuracy()
        self.several = torchmetrics.MetricCollection([torchmetrics.SumMetric(), torchmetrics.MeanMetric()])
        self.listed = [torchmetrics.SumMetric()]
        self.update = update

    def per_example_loss(self, batch):
        self.update(self, self.network(batch[0]).argmax(1), batch[1])
        return super().per_example_loss(batch)

    def on_train_epoch_end(self):
        self.log("train_accuracy", self.accuracy.compute())
        self.log("train_count", self.several.compute()["SumMetric"])
        self.log("listed_count", self.listed[0].compute())


UPDATES = {
    "update": lambda module, guess, label: module.accuracy.update(guess, label),
    "forward": lambda module, guess, label: module.accuracy(guess, label),
    "a collection": lambda module, guess, label: module.several.update(torch.ones(len(label))),
    "a metric in a list": lambda module, guess, label: module.listed[0].update(len(label)),
}


@pytest.mark.parametrize("way", UPDATES)
def test_metrics_updated_in_the_loss_reach_no_logger(make_network, make_steps, make_trainer, tmp_path, way):
    logger = CSVLogger(tmp_path / "csv", flush_logs_every_n_steps=1)
    with pytest.raises(PrivacyError, match="was changed by the loss"):
        make_trainer(logger=logger, log_every_n_steps=1).fit(Measured(make_network(), UPDATES[way]), make_steps())
    logger.save()
    assert not (tmp_path / "run").exists(), "refused before the first step"
    assert not any("train_accuracy" in path.read_text() for path in (tmp_path / "csv").rglob("*.csv"))


def test_metrics_of_held_out_examples_are_logged_as_ever(make_network, make_steps, make_trainer, held_out, tmp_path):
    class Validated(Classifier):
        def __init__(self, network):
            super().__init__(network)
            self.accuracy = torchmetrics.classification.BinaryAccuracy()

        def validation_step(self, batch, batch_idx):
            self.accuracy(self.network(batch[0]).argmax(1), batch[1])
            self.log("validation_accuracy", self.accuracy)

    logger = CSVLogger(tmp_path / "csv", flush_logs_every_n_steps=1)
    loader = DataLoader(TensorDataset(*held_out), batch_size=20)
    make_trainer(logger=logger).fit(Validated(make_network()), make_steps(), loader)
    (written,) = (path.read_text() for path in (tmp_path / "csv").rglob("metrics.csv"))
    assert "validation_accuracy" in written
    assert "epsilon" in written


class Gathering(Classifier):
    """Keeps figures of its losses in attributes of its own."""

    def __init__(self, network, gather):
        super().__init__(network)
        self.losses, self.history, self.seen = [], defaultdict(list, loss=[]), {"examples": 0}
        self.calls, self.total, self.sums, self.count = 0, 0.0, torch.zeros(2), Counter()
        self.gather = gather

    def per_example_loss(self, batch):
        losses = super().per_example_loss(batch)
        self.gather(self, losses.detach())
        return losses


def _assign(module, name, value):
    setattr(module, name, value)


GATHERED = {
    "losses": lambda module, losses: module.losses.append(losses),
    "history": lambda module, losses: module.history["loss"].append(losses.mean()),
    "seen": lambda module, losses: module.seen.update(examples=module.seen["examples"] + len(losses)),
    "calls": lambda module, losses: _assign(module, "calls", module.calls + 1),
    "total": lambda module, losses: _assign(module, "total", module.total + float(losses.sum())),
    "sums": lambda module, losses: module.sums.add_(losses.sum()),
    "count": lambda module, losses: module.count.update({"examples": len(losses)}),
}


@pytest.mark.parametrize("name", GATHERED)
def test_figures_gathered_in_attributes_by_the_loss_are_refused_and_put_back(
    make_network, make_steps, make_trainer, name, tmp_path
):
    module = Gathering(make_network(), GATHERED[name])
    with pytest.raises(PrivacyError, match=f"attribute '{name}' was changed by the loss"):
        make_trainer().fit(module, make_steps())
    assert not (tmp_path / "run").exists()
    assert (module.losses, dict(module.history), module.seen, module.calls, module.total) == (
        [],
        {"loss": []},
        {"examples": 0},
        0,
        0,
    )
    assert not module.sums.any()
    assert not module.count


def test_a_cache_of_the_loss_works_and_keeps_nothing(make_network, make_steps, make_trainer, plan):
    class Caching(Classifier):
        def __init__(self, network):
            super().__init__(network)
            self.mask, self.masks, self.ready = None, {}, False

        def per_example_loss(self, batch):
            self.mask = self.masks[len(batch[1])] = torch.ones(len(batch[1]))
            self.last_batch, self.ready = batch, True
            return super().per_example_loss(batch) * self.mask

    module = Caching(make_network())
    trainer = make_trainer()
    trainer.fit(module, make_steps())
    assert trainer.global_step == plan.steps
    assert (module.mask, module.masks, module.ready) == (None, {}, False)
    assert not hasattr(module, "last_batch")


@pytest.mark.parametrize(
    "tell",
    [
        lambda module: module.logger.log_metrics({"train_loss": 1.0}),
        lambda module: module.loggers[0].log_metrics({"train_loss": 1.0}),
        lambda module: module.log_dict({"train_loss": 1.0}),
        lambda module: module.trainer.callback_metrics.update(train_loss=torch.ones(())),
        lambda module: module.trainer.logger.log_metrics({"train_loss": 1.0}),
        lambda module: module.trainer.loggers[0].experiment.log_metrics({"train_loss": 1.0}),
        lambda module: module.trainer._logger_connector.log_metrics({"train_loss": torch.ones(())}),
        lambda module: super(PrivateLightningModule, module).log("train_loss", 1.0),
        lambda module: module.trainer._results.log("training_step", "train_loss", torch.ones(()), True, False, batch_size=1),
        lambda module: module.own_logger.log_metrics({"train_loss": 1.0}),
        lambda module: module.trainer.callbacks[0].seen.append(1.0),
        lambda module: module.trainer.__dict__.update(log_every_n_steps=7),
        lambda module: module.optimizers().param_groups[0].update(lr=module.trainer.global_step + 0.25),
        lambda module: setattr(module.tracker, "total", module.tracker.total + 1.0),
        lambda module: module.tracker.seen.append(1.0),
    ],
    ids=[
        "logger", "loggers", "log_dict", "callback_metrics", "trainer's logger", "experiment", "connector", "super", "results",
        "its own logger", "callbacks", "trainer's attribute", "rate", "tracker's number", "tracker's list",
    ],
)  # fmt: skip
def test_no_way_to_a_logger_leads_out_of_the_loss(make_network, make_steps, make_trainer, tmp_path, tell):
    class Telling(Classifier):
        def __init__(self, network, logger):
            super().__init__(network)
            self.own_logger, self.tracker = logger, SimpleNamespace(total=0.0, seen=[])

        def per_example_loss(self, batch):
            tell(self)
            return super().per_example_loss(batch)

    spy = Spy()
    trainer = make_trainer(logger=CSVLogger(tmp_path / "csv"), callbacks=[spy])
    module = Telling(make_network(), CSVLogger(tmp_path / "csv", "own"))
    before = dict(trainer.__dict__)
    with pytest.raises(PrivacyError, match=r"training examples|changed by the loss"):
        trainer.fit(module, make_steps())
    trainer.logger.save()
    module.own_logger.save()
    assert spy.seen == module.tracker.seen == []
    assert (module.tracker.total, trainer.log_every_n_steps) == (0, before["log_every_n_steps"])
    assert "train_loss" not in trainer.callback_metrics
    assert not any("train_loss" in path.read_text() for path in (tmp_path / "csv").rglob("*.csv"))


def test_no_loss_decides_how_long_a_run_is_or_what_its_checkpoints_hold(make_network, make_steps, make_trainer, plan):
    class Deciding(Classifier):
        def per_example_loss(self, batch):
            self.trainer.should_stop = True
            self.trainer.optimizers[0].param_groups[0]["seen"] = self.trainer.optimizers[0].state["seen"] = len(batch[0])
            return super().per_example_loss(batch)

    trainer = make_trainer()
    trainer.fit(Deciding(make_network()), make_steps())
    assert trainer.global_step == plan.steps
    assert "seen" not in str(trainer.optimizers[0].state_dict())


@pytest.mark.parametrize("part", [lambda train: Views(train[0][:16], train[1][:16])], ids=["views"])
def test_metrics_of_views_of_training_data_are_refused(make_network, make_steps, make_trainer, train, part):
    with pytest.raises(InputError, match="hold it out"):
        make_trainer().fit(Classifier(make_network()), make_steps(), DataLoader(part(train), batch_size=30))


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
def test_whatever_is_evaluated_on_it_is_held_out(make_network, make_steps, make_trainer, train, kind, look):
    module = Told(make_network())
    if look == "fit":
        with pytest.raises(InputError, match="hold it out"):
            make_trainer().fit(module, make_steps(), LOADERS[kind](train))
    else:
        make_trainer(max_steps=1).fit(module, make_steps())
        for trainer in (make_trainer(), module.trainer):
            with pytest.raises(InputError, match="hold it out"):
                getattr(trainer, look)(module, LOADERS[kind](train), weights_only=True)
    assert not module.told


def test_held_out_data_is_evaluated_on_whatever_the_loader(make_network, make_steps, make_trainer, held_out):
    module = Told(make_network())
    make_trainer(max_steps=1).fit(module, make_steps(), LOADERS["its own"](held_out))
    for look in ("validate", "test", "predict"):
        for kind in ("DataLoader", "its own", "generator"):
            module.told.clear()
            getattr(make_trainer(), look)(module, LOADERS[kind](held_out), weights_only=True)
            assert module.told, (look, kind)


def test_a_validation_loader_that_appears_later_is_looked_at_too(make_network, make_steps, make_trainer, train):
    module = Told(make_network())

    class Late(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.fit_loop.epoch_loop.val_loop._combined_loader = None
            module.later = LOADERS["DataLoader"](train)

    with pytest.raises(InputError, match="hold it out"):
        make_trainer(callbacks=[Late()]).fit(module, make_steps())
    assert not module.told


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
