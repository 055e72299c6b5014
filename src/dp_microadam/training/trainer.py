"""The private training loop: sample, clip, sum, add noise, step, and account for all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, default_collate

from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.clipping.row_norms import ClippedRowNorms
from dp_microadam.clipping.transform_check import check_transform
from dp_microadam.errors import DPMicroAdamError, InputError, PrivacyError
from dp_microadam.privacy.ledger import PrivacyLedger, RunSettings, read_ledger
from dp_microadam.privacy.mechanism import GaussianMechanism
from dp_microadam.privacy.plan import PrivacyPlan
from dp_microadam.privacy.randomness import Randomness
from dp_microadam.privacy.sampling import LogicalStep, PoissonSampler
from dp_microadam.privacy.statement import PRIVACY_NAME, STATEMENT_NAME, round_up, statement_in_words
from dp_microadam.training.checkpoint import CheckpointFolder
from dp_microadam.training.data_digest import data_digest
from dp_microadam.training.diagnostics import MicroAdamDiagnostics
from dp_microadam.training.distributed import ProcessLost, Ranks, ranks_here
from dp_microadam.training.ema import WeightAverage
from dp_microadam.training.evaluation import PerExample, batches, evaluate
from dp_microadam.training.gradients import GradientSums, UnclippedGradients, set_gradients
from dp_microadam.training.held_out import share_examples
from dp_microadam.training.interrupts import Interruptible
from dp_microadam.training.masked_rows import other_rows_unmoved, selected_rows, whole_again
from dp_microadam.training.procedure import ROW_NORMS, Phase, Procedure, phase_at, phases_from
from dp_microadam.training.progress import Progress, tell
from dp_microadam.training.run_folder import (
    CHECKPOINTS,
    CONFIG,
    EVENTS,
    PRIVATE_METRICS_SHOWN,
    VITAL_SIGNS,
    RunFolder,
    default_folder,
    how_to_go_on,
    privacy_of,
)
from dp_microadam.training.schedules import Schedule
from dp_microadam.training.tensorboard import Events
from dp_microadam.training.torch_randomness import seeded_torch, unpredictable_torch, unpredictable_worker
from dp_microadam.training.vital_signs import Pace, peak_memory, sizes
from dp_microadam.training.withheld import withheld
from dp_microadam.validation import require_integer, require_one_of, require_positive

_NO_BOUND = 1e12
"""Clipping that never clips, for runs without privacy that need each example's gradient."""

_COMPARE_EVERY = 100
"""Steps between proofs that all processes of a run have the same weights and optimizer state."""


@dataclass(frozen=True)
class UnprotectedPlan:
    """What a run without privacy does: the same Poisson sampling and number of steps, no noise, no guarantee."""

    dataset_size: int
    batch_size: int
    steps: int


@dataclass(frozen=True)
class StepReport:
    """What callbacks are told after each step. All of it is public, given a private run."""

    step: int
    steps: int
    epsilon: float | None
    learning_rate: float
    metrics: dict[str, float] | None


@dataclass(frozen=True)
class RunResult:
    """How a call of ``fit`` ended.

    ``steps_done`` were spent; ``updates`` of them are in the weights, fewer if steps were lost in a crash.
    """

    run_dir: Path
    private: bool
    finished: bool
    steps_done: int
    epsilon: float | None
    delta: float | None
    metrics: dict[str, float]
    updates: int


class PrivateTrainer:
    """Trains ``model`` with ``optimizer`` under ``plan``.

    Each step is recorded in the ledger; then the training data is sampled with the plan's rate, in chunks of at most
    ``physical_batch_size``; every example's gradient is clipped to ``max_grad_norm`` and summed; noise is added to the sum,
    which is divided by the expected batch size and handed to the optimizer. It stops at the last step that fits the plan.
    Modules stay in the mode they are given in, so a part in ``eval()`` stays so.

    Arguments:
        per_example_loss: ``f(model, batch)`` returns one loss per example.
        per_example_accuracy: ``f(model, batch)`` returns 1 or 0 per example; reported as accuracy if given.
        method: ``"private"``, or ``"non-private"`` to train the same way without clip and noise, stamped so everywhere.
        procedure: what the method does around the steps, for those that are more than an optimizer: phases, frozen
            parameters, a scale before the clip. ``dp_microadam.methods`` has them.
        prepare: what happens to a batch before the model sees it, for training and evaluation: types, normalization by public
            constants. Batches are moved to the model's device first.
        augment: what happens to training batches before that; one example at a time, whatever the batch, and one row for each:
            several views of an example are a dimension of their own.
        schedule: of the learning rate, over optimizer steps; the optimizer's own learning rates are its maxima.
        ema_decay: of the weight average that is evaluated beside the weights; 0 for none.
        max_steps: stop early, changing nothing else.
        run_dir: the run's folder; a new one under ``runs/`` by default.
        config: kept in the folder as ``config.toml``.
        public: what else the run declares public, in words; it stands in the statement and cannot change on resume.
        diagnostics_every: steps between :mod:`~dp_microadam.training.diagnostics` of MicroAdam in the metrics; None: never.
        callbacks: called with a :class:`StepReport` after each step, in every process.
        secure: draw noise and samples from a cryptographic generator.
        seed: for tests only: makes all randomness repeatable, and the run not private.
        show_private_metrics: also report loss and accuracy on training batches, and the text of errors that processing them
            raises. All that is outside the guarantee.
        ranks: the processes that train together; by default those of torch.distributed, if it is initialised. Each makes its
            trainer at the same point and gives it the same arguments and the same data; weights and the optimizer's settings
            are taken from rank 0, which keeps the run's folder.

    Formal guarantees: with a plan, ``method="private"`` and no seed, everything the run writes or shows — weights, averages,
    checkpoints, metrics on validation data that is not part of the training data, logs — is (ε, δ)-differentially private
    in the training data under adding or removing one example, with ε as the ledger says. Excepted are timing, whether a
    training batch could be processed at all, and what ``show_private_metrics`` shows. Assumes that ``per_example_loss``,
    ``prepare`` and ``augment`` (checked on synthetic data, as far as :class:`ClippedGradients` says) and the Dataset treat
    examples one by one, and that validation data, callbacks, ``procedure`` and the choice of hyperparameters do not depend on
    the training data but through what the run publishes. Dropout and augmentation must draw from torch's generators, which are
    made unpredictable for each step. Several processes give the same guarantee to whoever sees what the run publishes: each
    draws from a part of the examples, disjoint from the others', with the plan's rate, and adds its part of the noise's
    variance from its own entropy. They trust each other and the network between them: what one sends has its own part of the
    noise only.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: PrivacyPlan | UnprotectedPlan,
        per_example_loss: PerExample,
        *,
        per_example_accuracy: PerExample | None = None,
        method: str = "private",
        procedure: Procedure | None = None,
        max_grad_norm: float = 1.0,
        clipping: str = "flat",
        physical_batch_size: int = 256,
        prepare: Callable[[Any], Any] | None = None,
        augment: Callable[[Any], Any] | None = None,
        schedule: Schedule | None = None,
        ema_decay: float = 0.0,
        max_steps: int | None = None,
        evaluate_every: int = 100,
        checkpoint_every: int = 100,
        checkpoint_minutes: float = 5.0,
        keep_checkpoints: int = 2,
        diagnostics_every: int | None = None,
        run_dir: str | Path | None = None,
        config: str | None = None,
        public: Iterable[str] = ("normalization constants of the input",),
        callbacks: Iterable[Callable[[StepReport], None]] = (),
        num_workers: int = 0,
        secure: bool = False,
        seed: int | None = None,
        show_progress: bool = True,
        show_private_metrics: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        require_one_of("method", method, ("private", "non-private"))
        if method == "private" and not isinstance(plan, PrivacyPlan):
            raise InputError(f"plan is a {type(plan).__name__}; a private run needs a PrivacyPlan, as PrivacyPlan.solve gives")
        self.ranks = ranks_here() if ranks is None else ranks
        self.model = model
        self.optimizer = optimizer
        self._take_from_main()
        self.plan = plan
        self.private = method == "private"
        self.physical_batch_size = require_integer("physical_batch_size", physical_batch_size, 1)
        self.schedule = schedule or Schedule("constant", plan.steps)
        self.average = WeightAverage(model, ema_decay) if ema_decay else None
        self.last_step = min(plan.steps, require_integer("max_steps", plan.steps if max_steps is None else max_steps, 1))
        self.evaluate_every = require_integer("evaluate_every", evaluate_every, 1)
        self.checkpoint_every = require_integer("checkpoint_every", checkpoint_every, 1)
        self.checkpoint_seconds = 60 * require_positive("checkpoint_minutes", checkpoint_minutes)
        self.diagnostics = MicroAdamDiagnostics(optimizer, diagnostics_every) if diagnostics_every is not None else None
        self._unwritten_diagnostics: list[dict[str, Any]] = []
        self.callbacks = tuple(callbacks)
        self.num_workers = require_integer("num_workers", num_workers, 0)
        self.show_progress = show_progress and self.ranks.main
        self.folder = RunFolder(self.ranks.from_main(lambda: default_folder("run") if run_dir is None else Path(run_dir)))
        self.checkpoints = CheckpointFolder(self.folder.path / CHECKPOINTS, keep_checkpoints)
        self._config = config
        self.procedure = procedure or Procedure()
        if getattr(optimizer, "procedure", self.procedure) is not self.procedure:
            raise InputError("optimizer is that of a method that does more than step; pass its procedure=method.procedure too")
        self._phases = self.procedure.phases(plan)
        self._public = ("clipping norm", *public, *self.procedure.public, *_in_words(self._phases))
        self._events = Events(self.folder.path / EVENTS)
        self._measures: dict[str, PerExample] = {"loss": per_example_loss}
        if per_example_accuracy is not None:
            self._measures["accuracy"] = per_example_accuracy
        self._prepare = prepare
        self._augment = augment
        self._show_private_metrics = show_private_metrics
        self._seed = seed
        self._randomness = Randomness.from_entropy(secure=secure) if seed is None else Randomness.seeded(seed, secure=secure)
        self._base_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._refuse_foreign_parameters()  # before anything of the model is frozen
        self._max_grad_norm = max_grad_norm
        self._clipping = clipping
        self._trainable_before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        self._phase = self._phases[0]
        self._proved: dict[tuple[frozenset[str] | None, str], GradientSums] = {}
        self._gradients = self._gradients_of(self._phase)
        self._mechanism: GaussianMechanism | None = None
        if self.private:
            assert isinstance(self._gradients, ClippedGradients)
            self._mechanism = GaussianMechanism.from_plan(
                plan,  # type: ignore[arg-type]
                self._gradients.sensitivity,
                noise_share=self._noise_share(),
                randomness=self._randomness,
            )
        self.procedure.calibrate(self._mechanism.noise_deviation if self._mechanism else 0.0)
        self.procedure.begin(self._phase)
        self._ledger: PrivacyLedger | None = None
        self._position = 0
        self._saved_position = -1
        self._updates = 0
        self._resumed = False
        self._last_metrics: dict[str, float] = {}
        self._pace = Pace()

    @property
    def stamp(self) -> str:
        """``"private"`` or ``"not private"``, with the reason."""
        if not self.private:
            return "not private: trained without clipping and noise"
        return "private" if self._randomness.private else "not private: all randomness comes from a fixed seed"

    def fit(
        self,
        train: Dataset[Any] | Tensor | tuple[Tensor, ...] | dict[str, Tensor],
        validation: Any = None,
    ) -> RunResult:
        """Train until the plan's steps are spent, ``max_steps`` is reached, or Ctrl-C asks to stop.

        ``train`` and ``validation`` are map-style Datasets, or tensors with examples along the first dimension; all of them in
        every process, in the same order.
        """
        if self.finished:
            return self.result()
        with self.ranks.together():
            steps = self._steps_of(train, validation)
        self._require_same_run(train, validation)
        if not self._resumed:
            self.ranks.from_main(self._begin)
        progress = Progress(
            self.last_step, self._position, self.plan.batch_size, self._describe_spent, shown=self.show_progress
        )
        if not self.private or not self._randomness.private:
            progress.say(f"this run is {self.stamp}")
        try:
            with Interruptible(shown=self.ranks.main) as interruption:
                self._loop(steps, validation, progress, interruption)
                if self._position >= self.last_step:
                    self._evaluate(validation, progress)
                self.ranks.from_main(self._checkpoint)
                self._saved_position = self._position
        except ProcessLost as error:
            raise ProcessLost(
                f"{error}; the steps recorded so far stay spent; go on with: {how_to_go_on(self.folder.path)}"
            ) from error
        finally:
            progress.close()
            self._events.close()
            self._gradients.close()
            self._proved.clear()
            self._freeze_all_but(None)
            if self._ledger is not None:
                self._ledger.close()
        return self.result()

    @property
    def finished(self) -> bool:
        """Whether no step is left and the last one's checkpoint is written."""
        return self._position >= self.last_step and self._position == self._saved_position

    def result(self) -> RunResult:
        """Where the run stands."""
        return RunResult(
            self.folder.path,
            self.private and self._randomness.private,
            self._position >= self.last_step,
            self._position,
            self._epsilon(),
            self.plan.delta if isinstance(self.plan, PrivacyPlan) and self.private else None,
            self._last_metrics,
            self._updates,
        )

    def resume(self, run_dir: str | Path | None = None) -> PrivateTrainer:
        """Take up a run where its newest whole checkpoint left it; ``fit`` then goes on.

        Steps recorded after that checkpoint are lost and stay spent. The number of processes may be another than before.
        """
        if run_dir is not None:
            self.folder = RunFolder(run_dir)
            self.checkpoints = CheckpointFolder(self.folder.path / CHECKPOINTS, self.checkpoints.keep)
            self._events = Events(self.folder.path / EVENTS)
        position, damaged = self._load_newest()
        if self.private:
            self._position = self.ranks.from_main(lambda: self._resume_ledger(position))
        if self.finished:
            if self._ledger is not None:
                self._ledger.close()
            return self
        for name in damaged:
            self._tell(f"checkpoint {name} is damaged and was passed over")
        lost = self._position - position
        self._tell(f"resumed at step {position}" + (f"; {lost} steps after it were lost and stay spent" if lost else ""))
        if self.ranks.main:
            self.folder.forget_metrics_after(position)
        self._resumed = True
        return self

    def _resume_ledger(self, position: int) -> int:
        assert isinstance(self.plan, PrivacyPlan)
        self._ledger = PrivacyLedger.resume(self.folder.path, self.plan, self._settings(), position=position)
        return self._ledger.steps

    def peek(self) -> RunResult:
        """Load the newest weights to look at them; another process may go on training meanwhile."""
        self._load_newest()
        if self.private:
            self._position = read_ledger(self.folder.path).steps
        return self.result()

    def _load_newest(self) -> tuple[int, list[str]]:
        position, content, damaged = self.ranks.from_main(self.checkpoints.newest)
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(content["average"])
        self.procedure.load_state_dict(self._move(content["procedure"]))
        self._updates, self._position, self._saved_position = content["updates"], position, position
        self._enter(phase_at(self._phases, self._updates))
        return position, damaged

    def _steps_of(self, train: Any, validation: Any) -> Iterator[LogicalStep]:
        """The steps ahead, with this process' part of the training data; refuses what cannot be trained on."""
        sampler = PoissonSampler(
            self.plan.dataset_size,
            self.plan.batch_size,
            steps=self.last_step,
            physical_batch_size=self.physical_batch_size,
            first_step=min(self._position, self.last_step),
            shard=self.ranks.shard(self.plan.dataset_size),
            randomness=self._randomness,
        )
        if validation is not None and share_examples(train, validation):
            raise InputError("validation shares examples with the training data; its metrics would be private, hold it out")
        seed_workers = unpredictable_worker if self._seed is None and self.num_workers else None
        steps = sampler.load(train, num_workers=self.num_workers, worker_init_fn=seed_workers)
        self.procedure.refuse_data(train)
        self._prove(train)
        return steps

    def _take_from_main(self) -> None:
        """All processes start from the weights of rank 0, and with its optimizer's settings, the rounding seed included."""
        if self.ranks.size == 1:
            return
        shapes = [(name, tuple(value.shape), value.dtype) for name, value in self.model.state_dict().items()]
        groups = [len(group["params"]) for group in self.optimizer.param_groups]
        self.ranks.require_same("model or optimizer", (shapes, type(self.optimizer).__name__, groups))
        self.ranks.broadcast_(self.model.state_dict().values())
        for group in self.optimizer.param_groups:
            own = {name: value for name, value in group.items() if name != "params"}
            group.update(self.ranks.from_main(lambda own=own: own))  # type: ignore[misc]

    def _noise_share(self) -> float:
        """Of the noise's variance, what this process adds: all alike; from a fixed seed rank 0 adds all, to be repeatable."""
        if self._randomness.private:
            return 1 / self.ranks.size
        return 1.0 if self.ranks.main else 0.0

    def _require_same_run(self, train: Any, validation: Any) -> None:
        """Refuse processes that would not do the same, or whose parts of the data could overlap."""
        if self.ranks.size == 1:
            return
        rules = (self.plan, self._phases, self._max_grad_norm, self._clipping, self.stamp, self._randomness.description)
        self.ranks.require_same("plan, phases, clipping or randomness", rules)
        shown = (self.last_step, self.evaluate_every, validation is None, self.average is None, self._show_private_metrics)
        self.ranks.require_same("max_steps, evaluate_every, validation, ema_decay or show_private_metrics", shown)
        self.ranks.require_same("the training data or its order", data_digest(train))

    def _require_alike(self) -> None:
        """Every so many steps: the processes have taken the same steps, or the run ends."""
        due = self._updates == 1 or self._position % _COMPARE_EVERY == 0 or self._position == self.last_step
        if self.ranks.size == 1 or not due:
            return
        state = [value for values in self.optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
        if not self.ranks.alike([*self.model.parameters(), *state]):
            raise DPMicroAdamError(
                f"after step {self._position} the processes of this run have different weights or optimizer states; they must "
                "compute alike: use the same devices and library versions"
            )

    def _begin(self) -> None:
        self.folder.create()
        if self.private:
            # First of all: of two processes that begin in the same folder, one is refused here.
            assert isinstance(self.plan, PrivacyPlan)
            self._ledger = PrivacyLedger.create(self.folder.path, self.plan, self._settings())
        if self._config is not None:
            self.folder.write(CONFIG, self._config)
        self.folder.log(f"began; this run is {self.stamp}")
        self._checkpoint()

    def _loop(self, steps: Iterator[LogicalStep], validation: Any, progress: Progress, interruption: Interruptible) -> None:
        saved_at = time.monotonic()
        while self._position < self.last_step:
            if self.ranks.any(interruption.requested):
                progress.say(f"stopped at step {self._position}; go on with: {how_to_go_on(self.folder.path)}")
                self._log(f"interrupted at step {self._position}")
                return
            phase = phase_at(self._phases, self._updates)
            if phase != self._phase:
                self._enter(phase)
                self._log(f"phase {phase.name!r} begins at step {self._position}")
            self._pace.step()
            index = self.ranks.from_main(self._record_step)
            self._agree_on_scale(index)
            with self.ranks.together():
                training_totals = self._accumulate(steps, index)
                noisy_sums = self._noisy_sums(index)
            self._take_step(index, noisy_sums)
            self._require_alike()
            private_metrics = self._over_all_ranks(training_totals)
            progress.advance(self._position)
            if self.ranks.main and self.diagnostics is not None and (found := self.diagnostics.take()) is not None:
                self._unwritten_diagnostics.append({"step": self._position, "diagnostics": found})
            metrics = None
            if self._position % self.evaluate_every == 0 and self._position < self.last_step:
                metrics = self._evaluate(validation, progress, private_metrics)
            due = self._position % self.checkpoint_every == 0 or time.monotonic() - saved_at > self.checkpoint_seconds
            if due and self.ranks.main:
                self._checkpoint()
                saved_at = time.monotonic()
            for callback in self.callbacks:
                rate = float(self.optimizer.param_groups[0]["lr"])
                callback(StepReport(self._position, self.plan.steps, self._epsilon(), rate, metrics))

    def _enter(self, phase: Phase) -> None:
        if phase.asks != self._phase.asks:
            self._take_up(phase)
        self._phase = phase
        self.procedure.begin(phase)

    def _take_up(self, phase: Phase) -> None:
        self._gradients.close()
        proved = self._proved.pop(phase.asks, None)
        self._gradients = self._gradients_of(phase) if proved is None else proved
        self._freeze_all_but(phase.trainable)

    def _gradients_of(self, phase: Phase) -> GradientSums:
        """What sums up the answers to what the phase asks of the training data."""
        self._freeze_all_but(phase.trainable)
        loss = self._measures["loss"]
        if not self.private and phase.query != ROW_NORMS:
            return UnclippedGradients(self.model, loss)
        bound = self._max_grad_norm if self.private else _NO_BOUND
        kind = ClippedRowNorms if phase.query == ROW_NORMS else ClippedGradients
        return kind(self.model, loss, max_grad_norm=bound, clipping=self._clipping)

    def _freeze_all_but(self, trainable: frozenset[str] | None) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self._trainable_before[name] if trainable is None else name in trainable)

    def _record_step(self) -> int:
        """Spend the next step before anything of it is drawn: a step that fails is spent all the same."""
        if self._ledger is None:
            return self._position
        phase = self._phase.name if len(self._phases) > 1 else None
        index = self._ledger.record_step(phase, processes=self.ranks.size)
        if index != self._position:
            raise PrivacyError(f"the ledger is at step {index} and the run at {self._position}; they must agree")
        return index

    def _accumulate(self, steps: Iterator[LogicalStep], index: int) -> dict[str, float]:
        """Sum the clipped gradients of this process' part of the next step.

        What it returns, totals on training examples and their count, is empty unless private metrics are asked for.
        """
        with self._withheld():  # after an error the run stops and the step stays spent
            with self._torch_stream(index):  # workers, too, are seeded from it
                step = next(steps)
            if step.index != index:
                raise PrivacyError(f"the sampler is at step {step.index} and the ledger at {index}; they must agree")
            with self._torch_stream(index):
                return self._accumulate_chunks(step.chunks)

    def _withheld(self) -> AbstractContextManager[None]:
        return withheld("show it with show_private_metrics", shown=not self.private or self._show_private_metrics)

    def _torch_stream(self, step: int) -> AbstractContextManager[None]:
        return unpredictable_torch() if self._seed is None else seeded_torch(self._seed, step, self.ranks.rank)

    def _accumulate_chunks(self, chunks: Iterable[Any]) -> dict[str, float]:
        totals = dict.fromkeys([*self._measures, "count"], 0.0) if self._show_private_metrics else {}
        for chunk in chunks:
            batch = self._training_batch(chunk)
            self._gradients.accumulate(batch)
            if self._show_private_metrics:
                with torch.no_grad():
                    for name, measure in self._measures.items():
                        values = measure(self.model, batch)
                        totals[name] += float(values.sum())
                totals["count"] += len(values)
        return totals

    def _over_all_ranks(self, totals: dict[str, float]) -> dict[str, float]:
        """Means on the training examples of a step, from totals of every process."""
        if not totals:
            return {}
        *sums, count = self.ranks.total(list(totals.values()))
        return {f"training_{name}": total / count for name, total in zip(self._measures, sums, strict=True)} if count else {}

    def _training_batch(self, chunk: Any) -> Any:
        batch = self._move(chunk)
        return self._finish(self._augment(batch) if self._augment else batch)

    def _prove(self, train: Any) -> None:
        """Refuse a model in which examples interact before anything is written. Only the shapes of examples are used."""
        if not self.private:
            self._take_up(self._phase)  # a fit before this one has closed what it used
            return
        count = min(self.physical_batch_size, self.plan.dataset_size)
        with self._withheld():
            if isinstance(train, Dataset):
                sample = default_collate([train[i] for i in range(count)])
            else:
                sample = next(batches(train, count))
        transforms = [name for name in ("augment", "prepare") if getattr(self, f"_{name}") is not None]
        if transforms:
            check_transform(self._training_batch, sample, self.model, what=" or ".join(transforms))
        with self._withheld(), torch.random.fork_rng():
            sample = self._training_batch(sample)
        # For all phases now: a run must not fail half-way for what could be known before. Each proof is kept for its phase.
        for phase in {phase.asks: phase for phase in phases_from(self._phases, self._updates)}.values():
            gradients = self._gradients_of(phase)
            assert isinstance(gradients, ClippedGradients)
            with torch.random.fork_rng():
                gradients.prove(sample)
            self._proved[phase.asks] = gradients
        self._take_up(self._phase)

    def _agree_on_scale(self, index: int) -> None:
        with self._torch_stream(index):
            scale = self.procedure.scale()
        # A scale from public examples may differ in the last bits from device to device, and must not.
        self.ranks.broadcast_(scale.values())
        self._gradients.scale = scale
        self._gradients.row_masks = self.procedure.row_masks()

    def _take_step(self, index: int, noisy_sums: dict[str, Tensor]) -> None:
        masks = self.procedure.row_masks()
        gradients = self.procedure.receive(self._means(noisy_sums, masks))
        self._gradients.reset()
        factor = self.schedule.factor(self._updates) * self._phase.rate
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * factor
        if self._phase.rate:
            set_gradients(self.model, gradients)
            with other_rows_unmoved(self.model, masks):
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self._updates += 1
        self._position = index + 1
        if self.average is not None:
            self.average.update(self.model, self._updates)

    def _noisy_sums(self, index: int) -> dict[str, Tensor]:
        """What was summed here, with this process' part of the noise, in the rows that train."""
        sums = selected_rows(self._gradients.sums, self.procedure.row_masks())
        return sums if self._mechanism is None else self._mechanism.add_noise(sums, step=index)

    def _means(self, noisy_sums: dict[str, Tensor], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Means over the expected batch of what all processes summed, with nothing in rows that do not train."""
        self.ranks.sum_(noisy_sums)
        if self._mechanism is not None:
            means = self._mechanism.mean(noisy_sums, like=self._gradients.sums)
        else:
            means = {name: total / self.plan.batch_size for name, total in noisy_sums.items()}
        return whole_again(means, masks)

    def _evaluate(
        self, validation: Any, progress: Progress, private_metrics: dict[str, float] | None = None
    ) -> dict[str, float]:
        """Validation metrics of the weights and of their average, written down and told."""
        pace = self._pace.take()
        metrics: dict[str, float] = {}
        if validation is not None:
            metrics.update(self._measure(validation, "validation"))
            if self.average is not None:
                with self.average.in_place_of(self.model):
                    metrics.update(self._measure(validation, "ema_validation"))
        record: dict[str, Any] = {"step": self._position, "epsilon": self._epsilon(), **metrics}
        record["learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        if pace is not None:
            record["steps_per_second"] = pace
        if private_metrics:
            record["outside_the_guarantee"] = private_metrics
        if self.ranks.main:
            self.write_privacy()  # before what it covers
            self._write_diagnostics()
            self._write_vital_signs()
            self.folder.append_metrics(record)
            self._events.write(self._position, {**metrics, "epsilon": record["epsilon"]})
        self._last_metrics = metrics
        words = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items()]
        words += [
            f"{name.replace('_', ' ')} {value:.4f} (private, outside the guarantee)"
            for name, value in (private_metrics or {}).items()
        ]
        if words:
            progress.say(f"step {self._position}: " + ", ".join(words))
        return metrics

    def _measure(self, data: Any, prefix: str) -> dict[str, float]:
        self.ranks.broadcast_(self.model.buffers())  # without privacy, those of batch normalization follow a process' own part
        found = evaluate(
            self.model,
            data,
            self._measures,
            prepare=lambda batch: self._finish(self._move(batch)),
            num_workers=self.num_workers,
            ranks=self.ranks,
        )
        return {f"{prefix}_{name}": value for name, value in found.items()}

    def _checkpoint(self) -> None:
        self._pace.rest()
        content: dict[str, Any] = {
            "updates": self._updates,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "procedure": self.procedure.state_dict(),
        }
        if self.average is not None:
            content["average"] = self.average.state_dict()
        self.write_privacy()  # before what it covers
        self._write_diagnostics()
        self._write_vital_signs()
        self.checkpoints.write(self._position, content)

    def _write_vital_signs(self) -> None:
        signs: dict[str, Any] = {
            **sizes(self.model, self.optimizer, self.procedure.state_dict()),
            **peak_memory(),
            "dataset_size": self.plan.dataset_size,
            "expected_batch_size": self.plan.batch_size,
            "steps_done": self._position,
            "updates": self._updates,
            "last_step": self.last_step,
        }
        self.folder.write_json(VITAL_SIGNS, signs)

    def _write_diagnostics(self) -> None:
        for record in self._unwritten_diagnostics:
            self.folder.append_metrics(record)
        self._unwritten_diagnostics.clear()

    def write_privacy(self, folder: Path | None = None) -> None:
        """Write ``privacy.json`` and the statement in words, as of the steps recorded so far."""
        target = self.folder if folder is None else RunFolder(folder)
        if not self.private:
            report: dict[str, Any] = {
                "private": False,
                "epsilon": None,
                "delta": None,
                "steps_planned": self.plan.steps,
                "steps_done": self._position,
                "accountant": None,
                "reason": self.stamp,
            }
            words = f"NOT PRIVATE: {self.stamp}. No guarantee of any kind holds for this model.\n"
        else:
            if self._show_private_metrics:
                self.folder.write(PRIVATE_METRICS_SHOWN, "This run showed loss and accuracy on training batches.\n")
            report = privacy_of(self.folder.path)
            words = statement_in_words(report)
        target.write_json(PRIVACY_NAME, report)
        target.write(STATEMENT_NAME, words)

    def _settings(self) -> RunSettings:
        assert self._mechanism is not None
        return RunSettings.of_run(
            self._randomness, self._mechanism.sensitivity, self.procedure.clipped, self._clipping, self._public
        )

    def _epsilon(self) -> float | None:
        if not self.private or self._position == 0:
            return None if not self.private else 0.0
        assert isinstance(self.plan, PrivacyPlan)
        return self.plan.epsilon_after(self._position)

    def _describe_spent(self, steps: int) -> str:
        if not self.private:
            return "not private"
        assert isinstance(self.plan, PrivacyPlan)
        return f"ε {round_up(self.plan.epsilon_after(max(1, steps)))}" + ("" if self._randomness.private else " (not private)")

    def _move(self, batch: Any) -> Any:
        device = next(self.model.parameters()).device
        return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)

    def _finish(self, batch: Any) -> Any:
        return self._prepare(batch) if self._prepare else batch

    def _log(self, text: str) -> None:
        if self.ranks.main:
            self.folder.log(text)

    def _tell(self, text: str) -> None:
        self._log(text)
        if self.show_progress:
            tell(text)

    def _refuse_foreign_parameters(self) -> None:
        owned = {id(parameter) for parameter in self.model.parameters()}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in owned:
                    raise InputError(
                        f"optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's; build it from "
                        "model.parameters()"
                    )


def _in_words(phases: Sequence[Phase]) -> list[str]:
    """The phases of a run that has several."""
    if len(phases) == 1:
        return []
    steps: dict[str, int] = {}
    for phase in phases:
        steps[phase.name] = steps.get(phase.name, 0) + phase.steps
    return ["steps of each phase (" + ", ".join(f"{name} {count}" for name, count in steps.items()) + ")"]
