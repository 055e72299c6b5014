"""One private training step: record, sample and clip, add noise, all-reduce, mean."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dp_microadam.clipping.checks.transform import check_transform
from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.clipping.row_norms import ClippedRowNorms
from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.ledger.ledger import LEDGER_NAME, PrivacyLedger, RunSettings, read_ledger
from dp_microadam.ledger.statement import round_up, statement_in_words, unit_in_words, write_privacy_report
from dp_microadam.noise.mechanism import GaussianMechanism
from dp_microadam.plan.band_choice import refuse_memory
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.sampling.users import widths
from dp_microadam.training.gradients import GradientSums
from dp_microadam.training.method import ROW_NORMS, Method, Phase, phase_at, phases_from
from dp_microadam.training.run_folder import note_private_metrics, privacy_of
from dp_microadam.training.same_examples import refuse_repeats
from dp_microadam.training.torch_randomness import forked_torch
from dp_microadam.training.training_data import TrainingData
from dp_microadam.training.training_step import Result, TrainingStep, phases_in_words
from dp_microadam.training.withheld import withheld


class PrivateStep(TrainingStep):
    """Runs the private part of a training step: sampling, clipping, noise and accounting.

    The caller only sees privatized gradients. A custom training loop that can be resumed after a crash:

        step = PrivateStep(model, per_example_loss, plan, train, run_dir="runs/mine", method=method)
        if checkpoint is not None:  # saved by the loop: states of model and optimizer, and step.state_dict()
            step.load_state_dict(checkpoint["step"])
        for _ in step:
            method.apply(model, step.take())

    Arguments:
        per_example_loss: ``f(model, batch)`` returns one loss per example.
        train: a map-style Dataset, or tensors with examples along the first dimension. It may be given later with
            :meth:`attach`.
        users: the id of each training example's user, an integer or a string, if the plan's unit is the user; only then.
        run_dir: the folder of the ledger and the privacy statement.
        method: a method of ``dp_microadam.methods``, which may have phases, scaling before clipping, or masks of rows that
            train. Not needed for a plain optimizer.
        max_grad_norm: the clipping norm C of each example's gradient.
        clipping: ``"flat"`` or ``"per-layer"``.
        clipping_options: further arguments of :class:`~dp_microadam.clipping.engine.ClippedGradients`: ``autocast``,
            ``synthetic_batch``, ``strategy``.
        physical_batch_size: examples that go through the model at once; affects memory and speed only. With users, at least the
            plan's ``examples_per_user``.
        prepare: applied to a batch before the model, for example dtype conversion or normalization by public constants.
            Batches are moved to the model's device first.
        augment: applied to training batches before ``prepare``. It must treat each example independently of the rest of the
            batch and return one row per example; several views of an example are an extra dimension.
        num_workers, loader_options: options of torch's DataLoader, for Datasets: ``collate_fn``, ``pin_memory``,
            ``prefetch_factor``. ``collate_fn`` must treat each example independently; only its number of rows is checked.
        max_steps: stop before the plan's last step.
        public: what else the run declares public, in words; part of the privacy statement, cannot change on resume.
        unit_name: what a unit is called in the statement, such as ``"patient"``. If the plan's unit is the example it says that
            there is one example of each.
        noise_history: where a plan with bands keeps the noise of the last steps: ``"device"``, beside the model, or ``"cpu"``.
        noise_memory_gib: the largest size of that noise; a plan that needs more is refused.
        secure: draw noise and samples from a cryptographic generator.
        seed: for tests only: makes all randomness reproducible, and the run not private.
        training_measures: functions like ``per_example_loss``, by name, evaluated on training examples;
            :attr:`training_metrics` has their means after each step. They are outside the guarantee, and so is the text of
            errors, which is shown then.
        ranks: the processes that train together; by default those of torch.distributed, if it is initialised. Every rank
            must construct its step at the same point, with the same arguments and data. Weights are broadcast from rank 0,
            which also writes ``run_dir``.

    Formal guarantees: whatever is computed from the gradients of the steps taken, and from data that is not the training data,
    is (ε, δ)-differentially private in the training data under adding or removing one example, with ε as the ledger says, if
    ``seed`` is None. If the plan's unit is the user, the same holds under adding or removing a user with all their examples
    while the others keep their numbers, and how many examples a user has shows in nothing but timing. Excepted are timing,
    whether a training batch could be processed at all, and what ``training_measures`` shows. Assumes that
    ``per_example_loss``, ``prepare`` and ``augment`` treat examples one by one (checked on synthetic data, as far as
    :class:`~dp_microadam.clipping.engine.ClippedGradients` says), that the Dataset does, and that the caller has no other
    access to the training data. Dropout and augmentation must draw from torch's generators, which are made unpredictable for
    each step. Several processes give the same guarantee to whoever sees what the run publishes: each draws from a part of the
    examples, disjoint from the others', with the plan's rate, and adds all noise of its own slice of the coordinates from its
    own entropy. They trust each other and the network between them: what one sends has noise in its own slice only.
    """

    _plan: PrivacyPlan

    _ledger: PrivacyLedger | None = None
    _begun = False

    @property
    def plan(self) -> PrivacyPlan:
        """The plan, which cannot be exchanged: sampler, noise and ledger have read it."""
        return self._plan

    def take(self) -> dict[str, Tensor]:
        """Spend the next step and return its privatized mean gradient, by parameter name.

        The step is written to the ledger before anything is sampled, and on disk before this returns or raises. A step that
        fails is spent too.

        Raises:
            PrivacyError: if all steps of the plan are spent, or if processing training examples failed; the original error
                message may be private and is withheld.
        """
        with self._one_at_a_time(), self._synced_at_the_end(), self._forgetting_noise_on_failure():
            index = self.ranks.from_main(self._record)
            self._prepare_query(index)
            with self.ranks.together():
                with self._synced_at_the_end():  # before other ranks hear of a failure, too
                    sums = self._sums(index)
                noisy_sums = self._mechanism.add_noise(sums, step=index)
            self.ranks.sum_(noisy_sums, self._mechanism.noised)
            means = self._mechanism.mean(noisy_sums, like=sums)
            return self._finish(means)

    @property
    def private(self) -> bool:
        """Whether all randomness is unpredictable, that is, not from a fixed seed."""
        return self._randomness.private

    @property
    def stamp(self) -> str:
        """``"private"`` or ``"not private"``, with the reason."""
        return "private" if self.private else "not private: all randomness comes from a fixed seed"

    @property
    def privacy(self) -> PrivacyPlan:
        return self.plan

    @property
    def noise_deviation(self) -> float:
        """Standard deviation of the noise in each coordinate of the privatized mean: σ·S/B."""
        return self._mechanism.noise_deviation

    @property
    def noise_memory(self) -> int:
        """Bytes of the noise that this process keeps for the next steps; 0 unless the plan has bands and a step was taken."""
        return self._mechanism.noise_memory

    def _set_up_noise(self) -> None:
        self._taking = threading.Lock()
        self._refuse_noise_memory()
        self._mechanism = GaussianMechanism.from_plan(
            self.plan,
            self._engines.current.sensitivity,  # type: ignore[attr-defined]
            noise_slice=partial(self.ranks.noise_slice, private=self._randomness.private),
            randomness=self._randomness,
            noise_history=self._noise_history,
        )

    def _refuse_noise_memory(self) -> None:
        named = frozenset().union(*(phase.trainable for phase in self.phases if phase.trainable is not None))
        trained = [p for name, p in self.model.named_parameters() if p.requires_grad or name in named]
        wide = self._randomness.secure or any(parameter.dtype == torch.float64 for parameter in trained)
        count = max(1, sum(parameter.numel() for parameter in trained))
        refuse_memory(self.plan.bands, count, self._noise_memory_gib, wide=wide)

    @property
    def sensitivity(self) -> float:
        """Sensitivity: the largest change of the clipped sum that one example can cause, in L2 norm."""
        return self._mechanism.sensitivity

    @property
    def ledger_head(self) -> str | None:
        """The hash of the ledger's last line, on rank 0; None on other ranks."""
        return None if self._ledger is None else self._ledger.head

    @property
    def begun(self) -> bool:
        """Whether the run was begun or resumed, so that steps can be taken."""
        return self._begun

    def epsilon(self) -> float:
        """ε of the steps spent so far, at the plan's δ."""
        return self.plan.epsilon_after(self.position, self.resumed_at) if self.position else 0.0

    def describe_spent(self, steps: int) -> str:
        spent = round_up(self.plan.epsilon_after(max(1, steps), self.resumed_at))
        return f"ε {spent}" + ("" if self.private else " (not private)")

    def begin(self) -> None:
        """Start a new run: create its ledger.

        Raises:
            InputError: if ``run_dir`` already has a ledger.
        """
        self.ranks.from_main(self._create_ledger)
        self._begun = True

    def resume(self, position: int, updates: int, ledger_head: str | None = None) -> None:
        """Continue the run in ``run_dir`` from a checkpoint with ``updates`` updates, written at ledger ``position``.

        Steps recorded after that checkpoint are lost and stay spent. ``ledger_head`` is the one stored in the checkpoint.

        Raises:
            PrivacyError: if the ledger does not belong to the checkpoint, is shorter, is open in another process, or has
                another plan or other settings.
        """
        spent, resumed_at = self.ranks.from_main(lambda: self._open_ledger(position, ledger_head))
        self._continue_session(spent, resumed_at, updates)
        self._begun = True

    def peek(self, position: int, updates: int) -> None:
        record = read_ledger(self.run_dir)
        self._continue_session(record.steps, record.resumed_at, updates)

    def attach(self, train: Any, users: Any = None) -> None:
        """Set the training data. Between steps it may be in another order, and begins a session that counts by itself in ε."""
        if self._begun and self.position > max(self.resumed_at, default=0):
            self._continue_session(self.position, (*self.resumed_at, self.position), self.updates)
        if self._ledger is not None:
            self._ledger.begin_session()
        super().attach(train, users)

    def _continue_session(self, position: int, resumed_at: tuple[int, ...], updates: int) -> None:
        self._mechanism.forget_noise()
        self.resumed_at = resumed_at
        self.last_step = min(self.last_step, self.plan.last_step(resumed_at))
        self._continue_at(position, updates)

    def state_dict(self) -> dict[str, Any]:
        """The state to save in a checkpoint, with which :meth:`load_state_dict` verifies that it belongs to this run."""
        run, head = self.ranks.from_main(lambda: (self._run_id(), self.ledger_head))
        return {"run": run, "steps_spent": self.position, "updates": self.updates, "ledger_head": head}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of the checkpoint that this state was saved in.

        Raises:
            PrivacyError: if that is not the run in ``run_dir``, or its ledger cannot be continued.
        """
        self.ranks.from_main(lambda: self._refuse_foreign(state))
        spent = int(state["steps_spent"])
        self.resume(spent, int(state["updates"]), state["ledger_head"])

    def write_privacy(self, folder: str | Path | None = None, group_size: int = 1) -> None:
        """Write ``privacy.json`` and ``privacy.txt`` for the steps spent so far into ``folder``, by default ``run_dir``.

        With a ``group_size`` they also say ε for somebody with up to so many examples, or for so many users together.
        """
        if self.ranks.main:
            if self._training_measures:
                note_private_metrics(self.run_dir)
            report = privacy_of(self.run_dir, group_size)
            write_privacy_report(self.run_dir if folder is None else folder, report, statement_in_words(report))

    def close(self) -> None:
        """Close the ledger and release model and data. Closing twice is allowed."""
        super().close()
        self._begun = False
        self._mechanism.forget_noise()
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def _run_id(self) -> str | None:
        """The random identifier of the run, from its ledger."""
        return read_ledger(self.run_dir).run

    def _refuse_foreign(self, state: Mapping[str, Any]) -> None:
        if not (self.run_dir / LEDGER_NAME).is_file():
            raise InputError(f"run_dir is {str(self.run_dir)!r}, which has no run to go on with; pass the folder it began in")
        if state.get("run") != self._run_id():
            raise PrivacyError(
                f"the checkpoint is from another run than the ledger in {self.run_dir}, so what its weights have spent is "
                "unknown; resume from a checkpoint of this run, or start a new run in a new folder"
            )

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._taking.acquire(blocking=False):
            raise PrivacyError("another thread is taking a step, and two would add up their examples; take one after the other")
        try:
            yield
        finally:
            self._taking.release()

    @contextmanager
    def _synced_at_the_end(self) -> Iterator[None]:
        """The ledger syncs its file while gradients are computed; whatever leaves the block, an error too, waits for it."""
        try:
            yield
        finally:
            self._wait_for_ledger()

    def _wait_for_ledger(self) -> None:
        if self._ledger is not None:
            self._ledger.wait_until_synced()

    @contextmanager
    def _forgetting_noise_on_failure(self) -> Iterator[None]:
        """A step that fails, fails on all ranks, but some may have drawn its noise: all of them begin a new chain."""
        try:
            yield
        except BaseException:
            self._mechanism.forget_noise()
            raise

    def _record(self) -> int:
        """Spend the next step before anything of it is drawn."""
        if self._ledger is None:
            raise PrivacyError("no ledger is open, so no step can be taken; call begin or resume first")
        if self._ledger.remaining and not self.remaining:
            raise InputError(f"max_steps is {self.last_step}, and that many steps are taken; make a step with a larger one")
        phase = phase_at(self.phases, self.updates).name if len(self.phases) > 1 else None
        index = self._ledger.record_step(phase, processes=self.ranks.world_size, wait=False)
        if index != self.position:
            raise PrivacyError(f"the ledger is at step {index}, but the run is at step {self.position}; they must agree")
        return index

    def _create_ledger(self) -> None:
        self._ledger = PrivacyLedger.create(self.run_dir, self.plan, self._settings())

    def _open_ledger(self, position: int, head: str | None) -> tuple[int, tuple[int, ...]]:
        self._ledger = PrivacyLedger.resume(self.run_dir, self.plan, self._settings(), position=position, head=head)
        return self._ledger.steps, self._ledger.resumed_at

    def _settings(self) -> RunSettings:
        clipped, own = (Method.clipped, ()) if self._method is None else (self._method.clipped, self._method.public)
        public = ("clipping norm", *self._public, *own, *phases_in_words(self.phases))
        name = self._unit_name
        if self.plan.unit == "user":
            whose = f"the mean gradient of each {name or 'user'}'s examples"
            clipped = clipped.replace("the gradient of each example", whose, 1)
        settings = RunSettings.of_run(self._randomness, self.sensitivity, clipped, self._clipping, public)
        return replace(settings, unit=unit_in_words(self.plan.unit, name), unit_name=name)

    @property
    def _clipping(self) -> str:
        return str(self._clipping_options["clipping"])

    def _make_engine(self, phase: Phase) -> GradientSums:
        if not isinstance(self.plan, PrivacyPlan):
            kind = type(self.plan).__name__
            raise InputError(f"plan is a {kind}; a private run needs a PrivacyPlan, as PrivacyPlan.solve gives")
        engine = ClippedRowNorms if phase.query == ROW_NORMS else ClippedGradients
        return engine(self.model, self._loss, **self._clipping_options)

    def _check_model(self, data: TrainingData) -> None:
        refuse_repeats(data.data)
        sample = self._guarded(data.sample)
        if self.loading.transforms:
            check_transform(self._transformed, sample, self.model, what=self.loading.transforms)
        prepared = self._guarded(lambda: self._transformed_apart(sample))
        numbers_of_rows = [] if self._units is None else widths(self._units.most)
        self._engines.check_independence(phases_from(self.phases, self.updates), prepared, numbers_of_rows)

    def _transformed(self, batch: Any) -> Any:
        return self.loading.transformed(batch, self.model)

    def _transformed_apart(self, batch: Any) -> Any:
        with forked_torch(self.model):
            return self._transformed(batch)

    def _guarded(self, work: Callable[[], Result]) -> Result:
        return work() if self._training_measures else withheld(work)

    def _rules(self) -> tuple[Any, ...]:
        return (*super()._rules(), self.sensitivity, self._clipping)
