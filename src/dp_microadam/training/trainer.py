"""The private training loop: steps, optimizer, schedule, weight average, evaluation and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from dp_microadam.errors import InputError
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.training.diagnostics import MicroAdamDiagnostics
from dp_microadam.training.distributed import ProcessLost, ranks_here
from dp_microadam.training.ema import WeightAverage
from dp_microadam.training.evaluation import PerExample, ValidationMetrics, in_words
from dp_microadam.training.given_data import count_examples
from dp_microadam.training.interrupts import Interruptible
from dp_microadam.training.method import Method, Steps
from dp_microadam.training.model_update import ModelUpdate
from dp_microadam.training.plain_step import PlainStep, UnprotectedPlan
from dp_microadam.training.private_step import PrivateStep
from dp_microadam.training.progress import CHECKING, Progress, said_if_slow
from dp_microadam.training.raw_inputs import RawInput
from dp_microadam.training.run_folder import default_folder, how_to_go_on
from dp_microadam.training.run_record import RunRecord
from dp_microadam.training.run_result import RunResult, StepReport
from dp_microadam.training.same_examples import refuse_shared_users, share_examples
from dp_microadam.training.schedules import Schedule
from dp_microadam.training.training_step import StepOptions, TrainingStep
from dp_microadam.validation import explicit, require_integer, require_positive

__all__ = ["PrivateTrainer", "RunResult", "StepReport", "UnprotectedPlan"]


class PrivateTrainer:
    """Private training loop: trains ``model`` with ``optimizer`` under ``plan``, by :class:`~dp_microadam.PrivateStep`.

    Training stops at the last step of the plan. The trainer does not change the training mode of modules: a part of the model
    in ``eval()`` mode stays in it.

    Arguments:
        optimizer: a torch optimizer, or a method of ``dp_microadam.methods``.
        per_example_loss: ``f(model, batch)`` returns one loss per example.
        per_example_accuracy: ``f(model, batch)`` returns 1 or 0 per example; reported as accuracy if given.
        private: False trains without clipping and noise; everything the run writes is then marked as not private.
        schedule: the learning rate schedule: a :class:`Schedule`, which scales the optimizer's own rates, or a torch scheduler
            of the optimizer, which is stepped after each optimizer step. None leaves the rates unchanged.
        ema_decay: decay of a moving average of the weights, which is evaluated in addition to the weights; 0 for none.
        run_dir: the run's folder; a new one under ``runs/`` by default.
        config: text that is saved in the folder as ``config.toml``.
        diagnostics_every: steps between :mod:`~dp_microadam.training.diagnostics` of MicroAdam in the metrics; None for none.
        callbacks: called with a :class:`StepReport` after each step, on every rank.
        show_private_metrics: also report loss and accuracy on training batches, and the text of errors raised while processing
            them. All of that is outside the guarantee.
        step_options: options of :class:`~dp_microadam.PrivateStep`: ``max_grad_norm``, ``clipping``, ``clipping_options``,
            ``physical_batch_size``, ``prepare`` (for evaluation too), ``augment``, ``num_workers``, ``loader_options``,
            ``max_steps``, ``public``, ``unit_name``, ``noise_history``, ``noise_memory_gib``, ``secure``, ``seed``, ``ranks``.

    Formal guarantees: those of :class:`~dp_microadam.PrivateStep`, for everything the run writes or shows, if ``private`` is
    True and ``seed`` None: weights, averages, checkpoints, logs, and metrics on validation data that is not part of the
    training data. Excepted are timing, whether a training batch could be processed at all, and what ``show_private_metrics``
    shows. Assumes that validation data, callbacks, the method and the choice of hyperparameters depend on the training data
    only through what the run publishes.
    """

    @explicit(*StepOptions.__annotations__)
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Method,
        plan: PrivacyPlan | UnprotectedPlan,
        per_example_loss: PerExample,
        *,
        per_example_accuracy: PerExample | None = None,
        private: bool = True,
        schedule: Schedule | LRScheduler | None = None,
        ema_decay: float = 0.0,
        evaluate_every: int = 100,
        checkpoint_every: int = 100,
        checkpoint_minutes: float = 5.0,
        keep_checkpoints: int = 2,
        diagnostics_every: int | None = None,
        run_dir: str | Path | None = None,
        config: str | None = None,
        callbacks: Iterable[Callable[[StepReport], None]] = (),
        show_progress: bool = True,
        show_private_metrics: bool = False,
        **step_options: Unpack[StepOptions],
    ) -> None:
        ranks = step_options.get("ranks")
        self.ranks = step_options["ranks"] = ranks_here() if ranks is None else ranks
        self.model = model
        self.method = Method.of(optimizer)
        self.method.refuse_parameters(model, plan)  # before anything of the model is frozen
        self.evaluate_every = require_integer("evaluate_every", evaluate_every, 1)
        self.checkpoint_every = require_integer("checkpoint_every", checkpoint_every, 1)
        self.checkpoint_seconds = 60 * require_positive("checkpoint_minutes", checkpoint_minutes)
        self.callbacks = tuple(callbacks)
        self.show_progress = show_progress and self.ranks.main
        self._config = config
        self._shows_private_metrics = show_private_metrics
        self._keep_checkpoints = keep_checkpoints
        measures = {"loss": per_example_loss, **({"accuracy": per_example_accuracy} if per_example_accuracy else {})}
        folder = self.ranks.from_main(lambda: default_folder("run") if run_dir is None else Path(run_dir))
        self.record = self._record_in(folder)
        of_training = measures if show_private_metrics else None
        kind: type[TrainingStep] = PrivateStep if private else PlainStep
        self.step = kind(
            model, per_example_loss, plan, run_dir=folder, method=self.method, training_measures=of_training, **step_options
        )
        self._update = ModelUpdate(model, self.method, schedule, ema_decay, self.step.last_step)
        self._validate = ValidationMetrics(model, measures, self.step.loading, self.average, self.ranks)
        self.diagnostics = MicroAdamDiagnostics(self.optimizer, diagnostics_every) if diagnostics_every is not None else None
        self._saved_position = -1
        self._resumed = False
        self._last_metrics: dict[str, float] = {}

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The method's optimizer."""
        return self.method.optimizer

    @property
    def average(self) -> WeightAverage | None:
        """The moving average of the weights; None without ``ema_decay``."""
        return self._update.average

    @property
    def plan(self) -> Steps:
        """The step's plan."""
        return self.step.plan

    @property
    def stamp(self) -> str:
        """``"private"`` or ``"not private"``, with the reason."""
        return self.step.stamp

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics on validation data."""
        return self._validate.names

    @property
    def shows_private_metrics(self) -> bool:
        """Whether metrics of training batches are shown, which are outside the guarantee."""
        return self._shows_private_metrics

    @property
    def finished(self) -> bool:
        """Whether all steps are taken and the final checkpoint is written."""
        return not self.step.remaining and self.step.position == self._saved_position

    def fit(
        self,
        train: Dataset[Any] | Tensor | tuple[Tensor, ...] | dict[str, Tensor],
        validation: Any = None,
        *,
        users: Any = None,
        validation_users: Any = None,
    ) -> RunResult:
        """Train until the plan's steps are spent, ``max_steps`` is reached, or Ctrl-C is pressed.

        ``train`` and ``validation`` are map-style Datasets, or tensors with examples along the first dimension. With several
        ranks, each needs all of the data in the same order. If that cannot be verified from a Dataset's attributes, the
        Dataset needs ``example_ids``: a name or number for each example. ``users`` has the id of each training example's user,
        an integer or a string, if the plan's unit is the user. ``validation_users`` are those of ``validation``, if known; who
        is in both is refused.
        """
        if self.finished:
            return self.result()
        self._refuse_shared(train, validation)
        refuse_shared_users(users, validation_users)
        with said_if_slow(CHECKING, shown=self.show_progress and self.step.private):
            self.step.attach(train, users)
        self._require_same_settings(validation)
        self._validate.try_once(validation)
        if not self._resumed:
            self._begin()
        progress = Progress(
            self.step.last_step,
            self.step.position,
            self.plan.batch_size,
            self.step.describe_spent,
            shown=self.show_progress,
            counted=f"{self.step.unit_name}s",
        )
        for warning in self.step.warnings:
            progress.say(warning)
        try:
            with Interruptible(shown=self.ranks.main) as interruption:
                self._loop(validation, progress, interruption)
                if not self.step.remaining:
                    self.step.refuse_diverged()
                    self._evaluate(validation, progress)
                self.ranks.from_main(self._checkpoint)
                self._saved_position = self.step.position
        except ProcessLost as error:
            raise ProcessLost(
                f"{error}; the steps recorded so far stay spent; go on with: {how_to_go_on(self.record.path)}"
            ) from error
        finally:
            progress.close()
            self.record.close()
            self.step.close()
            self._update.rates.restore()
        return self.result()

    def _loop(self, validation: Any, progress: Progress, interruption: Interruptible) -> None:
        saved_at = time.monotonic()
        for _ in self.step:
            if self.ranks.any(interruption.requested):
                progress.say(f"stopped at step {self.step.position}; go on with: {how_to_go_on(self.record.path)}")
                self.record.log(f"interrupted at step {self.step.position}")
                return
            if self.step.enter_phase():
                self.record.log(f"phase {self.step.phase.name!r} begins at step {self.step.position}")
            self.record.pace.step()
            means = self.step.take()  # record, sample and clip, add noise, all-reduce, mean
            self._update.apply(means, self.step.updates)  # learning rate, method, weight average
            progress.advance(self.step.position)
            if self.diagnostics is not None:
                self.record.keep_diagnostics(self.step.position, self.diagnostics.take())
            due = self.step.position % self.evaluate_every == 0 and self.step.remaining
            metrics = self._evaluate(validation, progress) if due else None
            if self.step.position % self.checkpoint_every == 0 or time.monotonic() - saved_at > self.checkpoint_seconds:
                self._checkpoint()
                saved_at = time.monotonic()
            self._call_back(metrics)

    def result(self) -> RunResult:
        """The current state of the run."""
        step = self.step
        return RunResult(
            self.record.path,
            step.private,
            not step.remaining,
            step.position,
            step.epsilon(),
            step.delta,
            self._last_metrics,
            step.updates,
        )

    def resume(self, run_dir: str | Path | None = None) -> PrivateTrainer:
        """Load the newest intact checkpoint of a run, so that ``fit`` continues it.

        Steps recorded after that checkpoint are lost and stay spent. The world size may differ from before.
        """
        if run_dir is not None:
            self.record = self._record_in(Path(run_dir))
            self.step.run_dir = self.record.path
        position, content, damaged = self._load_newest()
        end = self.step.last_step
        self.step.resume(position, content["updates"], content.get("ledger_head"))
        if self.finished:
            self.step.close()
            return self
        for name in damaged:
            self.record.log_and_tell(f"checkpoint {name} is damaged and was skipped", shown=self.show_progress)
        lost = self.step.position - position
        rest = f"; {lost} steps after it were lost and stay spent" if lost else ""
        if self.step.last_step < end:  # with bands ε counts every session by itself
            rest += f"; to stay within ε, the run ends at step {self.step.last_step} instead of {end}"
        self.record.log_and_tell(f"resumed at step {position}{rest}", shown=self.show_progress)
        self.record.forget_metrics_after(position)
        self._resumed = True
        return self

    def peek(self) -> RunResult:
        """Load the newest weights without resuming the run; another process may keep training it."""
        position, content, _ = self._load_newest()
        self.step.peek(position, content["updates"])
        return self.result()

    def export(
        self,
        output: str | Path,
        raw: RawInput | Tensor | tuple[Tensor, ...],
        *,
        prepare: Callable[[Tensor], Tensor] | None = None,
        classes: Sequence[str] = (),
        name: str | None = None,
        program: bool = True,
    ) -> Path:
        """Write the model into a new folder: weights, a program for deployment, model card, privacy statement.

        ``raw`` is what the program takes: an example batch of it, or a :class:`~dp_microadam.RawInput` such as
        ``RawImages``, which ``dp-microadam predict`` can read from files. ``prepare`` turns a batch of it into the model's
        input. With ``classes``, the names of the model's outputs, the program returns probabilities. ``program=False`` leaves
        the program out, for models that ``torch.export`` cannot trace. Call it after :meth:`fit` or :meth:`peek`.
        """
        from dp_microadam.training.deployment import Deployment, export_run

        metrics = {**self._last_metrics, "steps": self.step.updates}
        deployment = Deployment.of(raw, prepare, classes)
        named = name or self.record.path.name
        self.ranks.from_main(lambda: export_run(self, Path(output), deployment, name=named, metrics=metrics, program=program))
        return Path(output)

    def write_privacy(self, folder: Path | None = None, group_size: int = 1) -> None:
        """Write ``privacy.json`` and ``privacy.txt`` for the steps recorded so far, with ε for a group if it has a size."""
        self.step.write_privacy(folder, group_size)

    def _record_in(self, folder: Path) -> RunRecord:
        return RunRecord(folder, keep_checkpoints=self._keep_checkpoints, writes=self.ranks.main)

    def _begin(self) -> None:
        self.ranks.from_main(self.record.create)
        # Before anything else is written: of two runs that begin in the same folder, one is refused here.
        self.step.begin()
        self.ranks.from_main(lambda: self.record.begin(self._config, self.stamp))
        self.ranks.from_main(self._checkpoint)

    def _load_newest(self) -> tuple[int, dict[str, Any], list[str]]:
        position, content, damaged = self.ranks.from_main(self.record.checkpoints.newest)
        self._update.load_state_dict(content)
        self._saved_position = position
        return position, content, damaged

    def _checkpoint(self) -> None:
        content = {"updates": self.step.updates, "ledger_head": self.step.ledger_head, **self._update.state_dict()}
        self.record.write_checkpoint(self.step, content, self._update.sizes())

    def _evaluate(self, validation: Any, progress: Progress) -> dict[str, float]:
        """Validation metrics of the weights and of their average, written and shown."""
        self.record.pace.rest()
        metrics = self._validate(validation)
        of_training = self.step.training_metrics
        self.record.write_evaluation(self.step, metrics, self.method.learning_rate, self._update.sizes(), of_training)
        self._last_metrics = metrics
        if metrics or of_training:
            progress.say(f"step {self.step.position}: {in_words(metrics, of_training)}")
        return metrics

    def _call_back(self, metrics: dict[str, float] | None) -> None:
        step, rate = self.step, self.method.learning_rate
        report = StepReport(step.position, self.plan.steps, step.privacy, rate, metrics, step.resumed_at)
        for callback in self.callbacks:
            callback(report)

    def _refuse_shared(self, train: Any, validation: Any) -> None:
        with self.ranks.together():
            count_examples("train", train)
            if validation is not None:
                count_examples("validation", validation)
            if validation is not None and share_examples(train, validation):
                raise InputError(
                    "validation shares examples with the training data, so its metrics would be private; use held-out data"
                )

    def _require_same_settings(self, validation: Any) -> None:
        shown = (
            self.step.last_step,
            self.evaluate_every,
            validation is None,
            self.average is None,
            self._shows_private_metrics,
        )
        self.ranks.require_same("max_steps, evaluate_every, validation, ema_decay or show_private_metrics", shown)
