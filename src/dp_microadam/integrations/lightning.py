"""Lightning with a privacy plan: its trainer, callbacks, validation and checkpoints around private steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset

from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.integrations.isolated_loss import IsolatedLoss
from dp_microadam.integrations.private_steps import PrivateSteps
from dp_microadam.methods.defaults import default
from dp_microadam.training.distributed import broadcast_start, ranks_here
from dp_microadam.training.method import Method
from dp_microadam.validation import explicit

try:
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.profilers import PassThroughProfiler
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError("PrivateLightningModule needs lightning; run pip install 'dp-microadam[lightning]'") from error

__all__ = ["PrivateDDPStrategy", "PrivateLightningModule", "PrivateSteps"]

_STAMP_KEY = "dp_microadam"

_AUTOCAST = {"32-true": None, "64-true": None, "bf16-mixed": torch.bfloat16}
"""Precisions of Lightning that private steps have, and what the forward and backward pass run in then."""

_HIDDEN = ("_loggers", "callbacks")
"""Attributes of the trainer that lead to loggers."""

_WHY_NOT_PRECISION = {
    "16-mixed": "it scales losses and gradients against underflow, which is not done for gradients of single examples",
    "16-true": "weights and noise would be rounded to half precision",
    "bf16-true": "weights and noise would be rounded to half precision",
}

_REFUSED_CALLBACKS = {
    "StochasticWeightAveraging": "it goes through the training data once more; average weights by WeightAveraging",
    "GradientAccumulationScheduler": "noise is added once per step; large batches are cut into chunks by PrivateSteps",
    "BatchSizeFinder": "its trial steps would be spent; choose performance=PerformanceSettings(physical_batch_size=…)",
    "DeviceStatsMonitor": "memory in use tells how large batches were, which is private",
    "LearningRateFinder": "it looks at the training loss, which is private; the default method needs no search",
}


class PrivateDDPStrategy(DDPStrategy):
    """Several processes with one device each: ``Trainer(devices=2, strategy=PrivateDDPStrategy())``.

    The module is not wrapped in ``DistributedDataParallel``, whose reducer would average gradients on its own: the private step
    sums up clipped gradients and noise over all processes. Rank 0 keeps the ledger. Validation is divided as with
    ``DDPStrategy``, whose arguments it takes; those about gradients have no effect.
    """

    @explicit(*inspect.signature(DDPStrategy).parameters, *inspect.signature(nn.parallel.DistributedDataParallel).parameters)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)

    def configure_ddp(self) -> None:
        """Give all processes the weights of rank 0, as ``DistributedDataParallel`` would."""
        model = self.model
        assert model is not None
        broadcast_start(ranks_here(), model, None)


class PrivateLightningModule(LightningModule):
    """A LightningModule whose training steps are private. Define :meth:`per_example_loss` in place of ``training_step``.

    Validation, test and prediction steps are as ever, and so is ``configure_optimizers``; where it names an optimizer, it may
    also name a method of ``dp_microadam.methods`` as a whole. Learning-rate schedulers are stepped after each step. Give
    ``trainer.fit`` a :class:`PrivateSteps` as training data:

        trainer.fit(module, PrivateSteps(plan, train, run_dir="runs/mine"), validation_loader)

    An epoch is as many steps as take each example once on average; training stops with the plan. ε is logged as ``epsilon``
    in every step.
    Several processes train with :class:`PrivateDDPStrategy`. With ``precision="bf16-mixed"`` forward and backward passes run in
    bfloat16; norms, sums and noise are float32.

    Formal guarantees: those of :class:`~dp_microadam.PrivateStep`; Lightning's loops, callbacks and loggers see step numbers in
    place of batches. Nothing can be logged from within :meth:`per_example_loss`, nor be left in
    metrics and attributes of the module, as far as
    :class:`~dp_microadam.integrations.isolated_loss.IsolatedLoss` sees it. Settings of the
    trainer that would break the guarantee, or would not be used, are refused. Only checkpoints of the ledger's own run are
    resumed. The module must not hold training data itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._stamp: dict[str, Any] | None = None
        self._method: Method | None = None
        self._steps: PrivateSteps | None = None

    @LightningModule.trainer.setter  # type: ignore[attr-defined]
    def trainer(self, trainer: Any) -> None:
        """Attach the trainer, which then looks at the data of every evaluation, whichever hooks a module overrides."""
        LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]
        if trainer is not None and not any(isinstance(one, _HeldOut) and one.module is self for one in trainer.callbacks):
            trainer.callbacks.insert(0, _HeldOut(self))

    def __init_subclass__(cls, **options: Any) -> None:
        """Lightning calls ``configure_optimizers`` itself and knows optimizers only."""
        super().__init_subclass__(**options)
        if "configure_optimizers" in cls.__dict__:
            setattr(cls, "configure_optimizers", _keeping_the_method(cls.__dict__["configure_optimizers"]))  # noqa: B010

    def __getstate__(self) -> dict[str, Any]:
        """Copies of the module have neither optimizer nor training data."""
        return {**super().__getstate__(), "_method": None, "_steps": None}

    def per_example_loss(self, batch: Any) -> Tensor:
        """One loss per example of the batch."""
        raise NotImplementedError(f"{type(self).__name__} must define per_example_loss(self, batch), one loss per example")

    def configure_optimizers(self) -> Any:
        """The method of ``methods.default``, unless a module names another; the plan gets its bands."""
        steps = self.trainer.fit_loop._data_source.instance
        if not isinstance(steps, PrivateSteps):
            return None  # refused by name when training begins
        method, steps.plan = default(self, steps.plan)
        return self._optimizer_of(method)

    def setup(self, stage: str) -> None:
        if stage == TrainerFn.FITTING:
            self._refuse_settings()  # before callbacks that would train on their own

    def on_train_start(self) -> None:
        self._begin()

    def training_step(self, step: Any, batch_idx: int) -> None:
        """One private step: gradients, optimizer, schedulers, ε."""
        steps = self._begin()
        optimizer = self.optimizers()
        with torch.autocast(self.device.type, enabled=False):  # Lightning's own would be around norms and sums too
            with self._nothing_logged(steps):
                steps.take()
            optimizer.step()  # type: ignore[union-attr]
            optimizer.zero_grad()  # type: ignore[union-attr]
        schedulers = self.lr_schedulers() or []
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            scheduler.step()  # type: ignore[call-arg]
        # In every step, though it takes milliseconds: whatever reads it at any time must not find less than was spent.
        self.log("epsilon", steps.epsilon(), prog_bar=True, batch_size=1)
        if not steps.remaining:
            self.trainer.should_stop = True

    def on_train_end(self) -> None:
        self._begin().close()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        steps = self.trainer.train_dataloader
        if isinstance(steps, PrivateSteps) and steps.step is not None:
            steps.write_privacy()  # before what it covers
            checkpoint[_STAMP_KEY] = steps.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trainer = getattr(self, "_trainer", None)
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:  # elsewhere weights are read and nothing goes on
            self._stamp = checkpoint.get(_STAMP_KEY, {})

    def log(self, name: str, value: Any, *arguments: Any, **options: Any) -> None:
        """As ever, but not from within :meth:`per_example_loss`."""
        if self._steps is not None and self._steps.looking:
            raise PrivacyError(
                f"{name!r} was logged from training examples, and is private; log in validation_step, on held-out examples"
            )
        super().log(name, value, *arguments, **options)

    @contextmanager
    def _nothing_logged(self, steps: PrivateSteps) -> Iterator[None]:
        """Refuse new metrics of the trainer, which callbacks, loggers and the progress bar read, and put the old ones back."""
        names = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
        before = {name: dict(getattr(self.trainer, name)) for name in names}
        changed = []
        try:
            try:
                yield
            finally:
                for name, kept in before.items():
                    now = getattr(self.trainer, name)
                    if str(now) != str(kept):
                        now.clear()
                        now.update(kept)
                        changed.append(name)
            if changed:
                raise PrivacyError(
                    f"trainer.{changed[0]} was changed while training examples were read, whose losses and metrics are "
                    "private; log metrics in validation_step, on held-out examples"
                )
        except BaseException:
            steps.close()  # a run that failed may be resumed in this process
            raise

    def _begin(self) -> PrivateSteps:
        """The steps of this fit, begun."""
        steps = self.trainer.train_dataloader
        if not isinstance(steps, PrivateSteps):
            raise PrivacyError(
                f"the training data is a {type(steps).__name__}, which draws its own batches; give trainer.fit a PrivateSteps"
            )
        if not steps.begun:
            self._refuse_settings()
            self._steps = steps
            self._refuse_training_data(self.trainer.fit_loop.epoch_loop.val_loop)
            with self._nothing_logged(steps):
                loss = IsolatedLoss(lambda module, batch: cast(Any, module).per_example_loss(batch), self._host, _HIDDEN)
                method = self._method_of(self.trainer.optimizers[0])
                autocast = _AUTOCAST[str(self.trainer.precision)]
                steps.begin(self, loss, method, self._resumed_from(), autocast=autocast)
            self.trainer.should_stop = not steps.remaining  # a finished run that is resumed
        return steps

    def _host(self) -> dict[str, Any]:
        """What of the host must not change while a loss looks at examples."""
        return {"trainer": self.trainer, "trainer.fit_loop": self.trainer.fit_loop, "optimizer": self.trainer.optimizers[0]}

    def _refuse_training_data(self, loop: Any) -> None:
        """Refuse an evaluation on training examples, those of this module's last training."""
        steps = self._steps or self.trainer.fit_loop._data_source.instance  # the latter before training begins
        loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
        if isinstance(steps, PrivateSteps) and any(map(steps.holds, loaders)):
            raise InputError(
                "the data to evaluate on shares examples with the training data; its metrics would be private, hold it out"
            )

    def _optimizer_of(self, configured: Any) -> Any:
        if not isinstance(configured, Method):
            return configured
        self._method = configured
        return configured.optimizer

    def _method_of(self, optimizer: torch.optim.Optimizer) -> Method:
        known = self._method is not None and self._method.optimizer is optimizer
        return self._method if known else Method(optimizer)  # type: ignore[return-value]

    def _resumed_from(self) -> Mapping[str, Any] | None:
        stamp, self._stamp = self._stamp, None
        if stamp is not None and not stamp:
            raise PrivacyError(
                "the checkpoint carries no stamp of a private run, so what its weights have spent is unknown; resume from a "
                "checkpoint of this run, or begin a new run"
            )
        return stamp

    def _refuse_settings(self) -> None:
        trainer, precision = self.trainer, str(self.trainer.precision)
        schedulers = [one.scheduler for one in trainer.lr_scheduler_configs]
        refused = {
            "training_step or automatic_optimization is overridden; define per_example_loss instead": (
                type(self).training_step is not PrivateLightningModule.training_step or self.automatic_optimization
            ),
            f"precision is {precision!r}: {_WHY_NOT_PRECISION.get(precision, 'private steps do not have it')}; it must be "
            f"{', '.join(map(repr, _AUTOCAST))}": precision not in _AUTOCAST,
            f"strategy is {type(trainer.strategy).__name__}, which reduces gradients in its own way; it must be "
            "PrivateDDPStrategy() for several processes, or one device, devices=1": (
                not isinstance(trainer.strategy, SingleDeviceStrategy | PrivateDDPStrategy)
            ),
            "limit_train_batches, overfit_batches or fast_dev_run is set; stop early by max_steps, every step counts": (
                isinstance(trainer.limit_train_batches, int)  # 1 is one batch, 1.0 all
                or (trainer.limit_train_batches, trainer.overfit_batches) != (1.0, 0.0)
            ),
            "reload_dataloaders_every_n_epochs is set; a run has one PrivateSteps, leave it at 0": (
                trainer.reload_dataloaders_every_n_epochs != 0
            ),
            f"profiler is {type(trainer.profiler).__name__}, which counts and times what is done for each example of a batch, "
            "and its size is private; leave it None, and profile made-up data": (
                not isinstance(trainer.profiler, PassThroughProfiler)
            ),
            f"there are {len(trainer.optimizers)} optimizers; a private step has one": len(trainer.optimizers) > 1,
            "a scheduler is ReduceLROnPlateau, which waits for a loss; use one that follows the steps": (
                any(isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau) for one in schedulers)
            ),
            "hyperparameters hold tensors or data, and are written into checkpoints; use save_hyperparameters(ignore=…)": (
                any(isinstance(leaf, Tensor | Dataset | DataLoader | PrivateSteps) for leaf in tree_leaves(dict(self.hparams)))
            ),
        }
        for sentence, wrong in refused.items():
            if wrong:
                raise InputError(sentence)
        for callback in trainer.callbacks:
            for kind in type(callback).__mro__:
                if kind.__name__ in _REFUSED_CALLBACKS:
                    raise InputError(f"callback {kind.__name__} is in use: {_REFUSED_CALLBACKS[kind.__name__]}")


class _HeldOut(Callback):
    """Looks at the data of each evaluation when it starts."""

    def __init__(self, module: PrivateLightningModule) -> None:
        self.module = module

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.module._refuse_training_data(trainer.fit_loop.epoch_loop.val_loop if fitting else trainer.validate_loop)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self.module._refuse_training_data(trainer.test_loop)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self.module._refuse_training_data(trainer.predict_loop)


def _keeping_the_method(configure: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``configure_optimizers`` that remembers a Method on the module and returns its optimizer in its place."""

    @wraps(configure)
    def configured(module: PrivateLightningModule) -> Any:
        return tree_map(module._optimizer_of, configure(module))

    return configured
