"""The private training loop: steps, updates, evaluation, checkpoints, callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dp_microadam.errors import InputError
from dp_microadam.plan.plan import PrivacyPlan, UnprotectedPlan
from dp_microadam.training.distributed import ProcessLost, Ranks, ranks_here, refuse_diverged
from dp_microadam.training.evaluation import PerExample, ValidationMetrics, in_words
from dp_microadam.training.given_data import count_examples
from dp_microadam.training.method import Method, WeightAverage
from dp_microadam.training.private_step import PrivateStep
from dp_microadam.training.program import RawInput, RawTensor
from dp_microadam.training.progress import CHECKING, Interruptible, Progress, said_if_slow
from dp_microadam.training.run_folder import RunResult, StepReport, create_folder, default_folder, how_to_go_on
from dp_microadam.training.run_record import RunRecord, sizes
from dp_microadam.training.same_examples import refuse_shared_users, share_examples
from dp_microadam.training.settings import PerformanceSettings, PrivacySettings, RecordSettings

__all__ = ["PrivateTrainer", "RunResult", "StepReport"]


class PrivateTrainer:
    """Private training loop: trains ``model`` with ``method`` under ``plan``, by :class:`~dp_microadam.PrivateStep`.

    Training stops at the last step of the plan. The trainer does not change the training mode of modules: a part of the model
    in ``eval()`` mode stays in it.

    Arguments:
        method: a method of ``dp_microadam.methods``, as ``methods.default(model, plan)`` gives, or a torch optimizer.
        plan: a :class:`~dp_microadam.PrivacyPlan`. With an :class:`~dp_microadam.UnprotectedPlan` it trains
            without clipping and noise, and everything the run writes is marked as not private.
        loss: ``f(model, batch)`` returns one loss per example.
        accuracy: ``f(model, batch)`` returns 1 or 0 per example; reported as accuracy if given.
        run_dir: the run's folder; a new one under ``runs/`` by default.
        privacy, performance: settings of :class:`~dp_microadam.PrivateStep`, as ``prepare`` (for evaluation too), ``augment``,
            ``max_steps`` and ``ranks`` are.
        record: when to evaluate and to write checkpoints, and what to show.
        callbacks: one or several, called with a :class:`StepReport` on every rank: once before the first step, and after each.

    Formal guarantees: those of :class:`~dp_microadam.PrivateStep`, for everything the run writes or shows: weights, averages,
    checkpoints, logs, and metrics on validation data that is not part of the training data. Excepted are timing, whether a
    training batch could be processed at all, and what ``show_private_metrics`` shows. Assumes that validation data, callbacks,
    the method and the choice of hyperparameters depend on the training data only through what the run publishes.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method | torch.optim.Optimizer,
        plan: PrivacyPlan | UnprotectedPlan,
        loss: PerExample,
        *,
        accuracy: PerExample | None = None,
        run_dir: str | Path | None = None,
        privacy: PrivacySettings | None = None,
        performance: PerformanceSettings | None = None,
        record: RecordSettings | None = None,
        prepare: Callable[[Any], Any] | None = None,
        augment: Callable[[Any], Any] | None = None,
        max_steps: int | None = None,
        callbacks: Callable[[StepReport], None] | Iterable[Callable[[StepReport], None]] = (),
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks_here() if ranks is None else ranks
        self.model = model
        self.settings = RecordSettings() if record is None else record
        if not isinstance(self.settings, RecordSettings):
            raise InputError(f"record is a {type(record).__name__}; it must be a RecordSettings")
        self.callbacks = (callbacks,) if callable(callbacks) else tuple(callbacks)
        self.shown = self.settings.show_progress and self.ranks.main
        measures = {"accuracy": accuracy} if accuracy else {}
        folder = self.ranks.from_main(lambda: default_folder("run") if run_dir is None else Path(run_dir))
        self.step = PrivateStep(
            model,
            method,  # type: ignore[arg-type]  # an optimizer becomes one
            plan,
            loss,
            run_dir=folder,
            privacy=privacy,
            performance=performance,
            prepare=prepare,
            augment=augment,
            max_steps=max_steps,
            measures=measures,
            ranks=self.ranks,
        )
        self.method = self.step.method
        self.method.refuse_idle_scheduler()
        self.record = self._record_in(folder)
        self.validation = ValidationMetrics(model, {"loss": loss, **measures}, self.step.loading, self.method, self.ranks)
        self._saved_position = -1
        self._resumed = False
        self._between_steps = True
        self._last_metrics: dict[str, float] = {}

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The method's optimizer."""
        return self.method.optimizer

    @property
    def average(self) -> WeightAverage | None:
        """The moving average of the weights, from the first update on; None without one."""
        return self.method.average

    @property
    def plan(self) -> PrivacyPlan | UnprotectedPlan:
        """The step's plan."""
        return self.step.plan

    @property
    def stamp(self) -> str:
        """``"private"`` or ``"not private"``, with the reason."""
        return self.step.account.stamp

    @property
    def finished(self) -> bool:
        """Whether all steps are taken and the final checkpoint is written."""
        return not self.step.account.remaining and self.step.position == self._saved_position

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

        Afterwards the model has the averaged weights, if the method keeps an average: validation figures are theirs. Within
        ``with trainer.method.last_weights(model):`` it has those of the last step.

        Validation and callbacks are tried once before the first step. An error in one of them, or anywhere else between two
        steps, writes a checkpoint before it leaves, from which the run goes on.
        """
        if self.finished:
            self.method.finish(self.model)
            return self.result()
        account, shows = self.step.account, self.step.settings.show_private_metrics
        with self.ranks.together():
            count_examples("train", train)
            if validation is not None and count_examples("validation", validation) and share_examples(train, validation):
                raise InputError(
                    "validation shares examples with the training data, so its metrics would be private; use held-out data"
                )
        refuse_shared_users(users, validation_users)
        with said_if_slow(CHECKING, shown=self.shown and account.privacy is not None):
            self.step.attach(train, users)
        compared = (account.last_step, self.settings.evaluate_every, validation is None, self.method.averages, shows)
        self.ranks.require_same("max_steps, evaluate_every, validation, average or show_private_metrics", compared)
        self.validation.try_once(validation)
        if not self._resumed:
            self._begin()
        progress = Progress(
            account.last_step,
            account.position,
            self.plan.batch_size,
            account.describe_spent,
            shown=self.shown,
            counted=f"{self.step.settings.unit_name or self.plan.unit}s",
        )
        if account.stamp != "private":
            progress.say(f"this run is {self.stamp}")
        try:
            with Interruptible(shown=self.ranks.main) as interruption, self._saved_on_failure():
                self._call_back(None)
                if not account.remaining:  # resumed after the last step was lost: the run ends with what it has
                    self._call_back(self._evaluate(validation, progress))
                self._loop(validation, progress, interruption)
                if not account.remaining:
                    refuse_diverged(self.ranks, self.model, self.optimizer, self.step.position)
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
        self.method.finish(self.model)
        return self.result()

    def _loop(self, validation: Any, progress: Progress, interruption: Interruptible) -> None:
        saved_at = time.monotonic()
        step = self.step
        while step.account.remaining:
            if self.ranks.any(interruption.requested):
                progress.say(f"stopped at step {step.position}; go on with: {how_to_go_on(self.record.path)}")
                self.record.log(f"interrupted at step {step.position}")
                return
            if step.enter_phase():
                self.record.log(f"phase {step.phase.name!r} begins at step {step.position}")
            self.record.pace.step()
            self._between_steps = False
            self.method.update(self.model, step.take())
            self._between_steps = True
            progress.advance(step.position)
            due = not step.account.remaining or step.position % self.settings.evaluate_every == 0
            metrics = self._evaluate(validation, progress) if due else None
            minutes = (time.monotonic() - saved_at) / 60
            if step.position % self.settings.checkpoint_every == 0 or minutes > self.settings.checkpoint_minutes:
                self._checkpoint()
                saved_at = time.monotonic()
            self._call_back(metrics)

    def result(self) -> RunResult:
        """The current state of the run."""
        account = self.step.account
        return RunResult(
            self.record.path,
            account.stamp == "private",
            not account.remaining,
            account.position,
            account.epsilon(),
            None if account.privacy is None else account.privacy.delta,
            self._last_metrics,
            account.updates,
        )

    def resume(self, run_dir: str | Path | None = None) -> PrivateTrainer:
        """Load the newest intact checkpoint of a run, so that ``fit`` continues it.

        Steps recorded after that checkpoint are lost and stay spent. The world size may differ from before.
        """
        account = self.step.account
        if run_dir is not None:
            self.record = self._record_in(Path(run_dir))
            account.run_dir = self.record.path
        position, content, damaged = self._load_newest()
        end = account.last_step
        account.resume(position, content["updates"], content["ledger_head"])
        self.step.continued()
        if self.finished:
            self.step.close()
            return self
        for name in damaged:
            self.record.log_and_tell(f"checkpoint {name} is damaged and was skipped", shown=self.shown)
        lost = self.step.position - position
        rest = f"; {lost} steps after it were lost and stay spent" if lost else ""
        if account.last_step < end:  # with bands ε counts every session by itself
            rest += f"; to stay within ε, the run ends at step {account.last_step} instead of {end}"
        self.record.log_and_tell(f"resumed at step {position}{rest}", shown=self.shown)
        self.record.forget_metrics_after(position)
        self._resumed = True
        return self

    def peek(self) -> RunResult:
        """Load the newest weights without resuming the run; another process may keep training it."""
        position, content, _ = self._load_newest()
        self.step.account.peek(position, content["updates"])
        self.step.continued()
        return self.result()

    def export(
        self,
        output: str | Path,
        raw: RawInput | Tensor,
        *,
        prepare: Callable[[Tensor], Tensor] | None = None,
        classes: Sequence[str] = (),
        name: str | None = None,
        program: bool = True,
    ) -> Path:
        """Write the model into a new folder: weights, a program for deployment, model card, privacy statement.

        ``raw`` is what the program takes: a tensor of examples, of which nothing is kept but shape and type, or a ``RawInput``
        such as ``RawImages``. ``prepare`` turns a batch of it into the model's input. With ``classes``,
        the names of the model's outputs, the program returns probabilities. ``program=False`` leaves the program out, for
        models that ``torch.export`` cannot trace. Call it after :meth:`fit` or :meth:`peek`.
        """
        from dp_microadam.training.export import Deployment, export_run

        metrics = {**self._last_metrics, "steps": self.step.account.updates}
        if not isinstance(raw, RawInput):
            if not isinstance(raw, Tensor) or not raw.dim():
                raise InputError(
                    f"raw is a {type(raw).__name__}; it must be a RawInput, or a tensor with examples in dimension 0"
                )
            raw = RawTensor(tuple(raw.shape[1:]), str(raw.dtype).removeprefix("torch."))
        deployment = Deployment(raw, prepare, tuple(map(str, classes)))
        named = name or self.record.path.name
        self.ranks.from_main(lambda: export_run(self, Path(output), deployment, name=named, metrics=metrics, program=program))
        return Path(output)

    def _record_in(self, folder: Path) -> RunRecord:
        return RunRecord(folder, keep_checkpoints=self.settings.keep_checkpoints, writes=self.ranks.main)

    def _begin(self) -> None:
        self.ranks.from_main(lambda: create_folder(self.record.path))
        # Before anything else is written: of two runs that begin in the same folder, one is refused here.
        self.step.account.begin()
        self.ranks.from_main(lambda: self.record.begin(self.settings.config, self.stamp))
        self.ranks.from_main(self._checkpoint)

    def _load_newest(self) -> tuple[int, dict[str, Any], list[str]]:
        position, content, damaged = self.ranks.from_main(self.record.checkpoints.newest)
        self.model.load_state_dict(content["model"])
        self.method.load_state_dict(content["method"])
        self._saved_position = position
        return position, content, damaged

    def _checkpoint(self) -> None:
        account = self.step.account
        content = {
            "updates": account.updates,
            "ledger_head": account.head,
            "model": self.model.state_dict(),
            "method": self.method.state_dict(),
        }
        self.record.write_checkpoint(self.step, content, self._sizes())

    @contextmanager
    def _saved_on_failure(self) -> Iterator[None]:
        """Whatever goes wrong between two steps, the weights so far are in a checkpoint when the error leaves.

        Not what goes wrong within a step: a loss that failed may have left private values behind.
        """
        try:
            yield
        except BaseException:
            if self.ranks.main and self._between_steps:
                with suppress(Exception):  # the first error is the one to be told
                    self._checkpoint()
            raise

    def _sizes(self) -> dict[str, Any]:
        average = self.average.state_dict().values() if self.average is not None else ()
        kept = sum(value.numel() * value.element_size() for value in average)
        return {**sizes(self.model, self.optimizer, self.method.extra_state()), "average_bytes": kept}

    def _evaluate(self, validation: Any, progress: Progress) -> dict[str, float]:
        """Validation metrics of the weights and of their average, written and shown."""
        self.record.pace.rest()
        metrics = self.validation(validation)
        of_training = self.step.training_metrics
        self.record.write_evaluation(self.step, metrics, self.method.learning_rate, self._sizes(), of_training)
        self._last_metrics = metrics
        if metrics or of_training:
            progress.say(f"step {self.step.position}: {in_words(metrics, of_training)}")
        return metrics

    def _call_back(self, metrics: dict[str, float] | None) -> None:
        account = self.step.account
        report = StepReport(
            account.position,
            self.plan.steps,
            self.plan.batch_size,
            account.privacy,
            self.method.learning_rate,
            metrics,
            account.resumed_at,
        )
        for callback in self.callbacks:
            callback(report)
