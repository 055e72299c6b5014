"""A private training step: plan → record → sample → clip → noise → update, with values that are made from the plan."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.plan.plan import PrivacyPlan, UnprotectedPlan
from dp_microadam.training.clip import Clip, scatter_rows
from dp_microadam.training.distributed import Ranks, broadcast_start, ranks_here, refuse_diverged
from dp_microadam.training.evaluation import PerExample
from dp_microadam.training.from_plan import account_of, check, mechanism_of, randomness_of, sampled_data
from dp_microadam.training.given_data import refuse_wrapped_model
from dp_microadam.training.method import Method, Phase, phase_at
from dp_microadam.training.rates import RunNoise
from dp_microadam.training.settings import PerformanceSettings, PrivacySettings, settings_of
from dp_microadam.training.training_data import Loading, TrainingData
from dp_microadam.training.withheld import withheld
from dp_microadam.validation import require_integer

_COMPARE_EVERY = 100  # steps: whether all ranks have the same weights and optimizer state


class PrivateStep:
    """Runs the private part of a training step: sampling, clipping, noise and accounting.

    The caller only sees privatized gradients. A training loop of one's own that can be resumed after a crash:

        step = PrivateStep(model, method, plan, loss, train, run_dir="runs/mine")
        if checkpoint is not None:  # saved by the loop: states of model, method and step
            step.load_state_dict(checkpoint["step"])
        for gradients in step:
            method.update(model, gradients)

    Arguments:
        method: a method of ``dp_microadam.methods``, or a torch optimizer.
        plan: a :class:`~dp_microadam.PrivacyPlan`; or an :class:`~dp_microadam.UnprotectedPlan`, without clipping and noise.
        loss: ``f(model, batch)`` returns one loss per example.
        train: a map-style Dataset, or tensors with examples along the first dimension; or later, by :meth:`attach`.
        users: the id of each training example's user, if the plan's unit is the user; only then.
        run_dir: the folder of the ledger and the privacy statement.
        privacy, performance: what the guarantee rests on besides the plan; what changes time and memory alone.
        prepare: applied to a batch on the model's device, for example dtype conversion or normalization by public constants.
        augment: applied to training batches before ``prepare``. It must treat each example independently of the rest of the
            batch and return one row per example; several views of an example are an extra dimension.
        max_steps: stop before the plan's last step.
        measures: functions like the loss, by name, which ``show_private_metrics`` shows beside it.
        ranks: the processes that train together; by default those of torch.distributed, if it is initialised. All must make
            their step at the same point, with the same arguments and data. Rank 0 has the weights and writes ``run_dir``.

    Formal guarantees: whatever is computed from the gradients of the steps taken, and from data that is not the training data,
    is (ε, δ)-differentially private in the training data under adding or removing one example, with ε as the ledger says, if
    there is no seed. If the plan's unit is the user, the same holds for users with all their examples while the others keep
    their numbers, and how many examples a user has shows in nothing but timing. Excepted are timing, whether a training batch
    could be processed at all, and what ``show_private_metrics`` shows. Assumes that ``loss``, ``prepare`` and ``augment`` treat
    examples one by one (checked on synthetic data, as far as :class:`~dp_microadam.ClippedGradients` says), that the Dataset
    does, and that the caller has no other access to the training data. Dropout and augmentation must draw from torch's
    generators, which are made unpredictable for each step. Several processes give the same guarantee to whoever sees what the
    run publishes: each draws from its own part of the examples, with the plan's rate, and adds all noise of its own slice of
    the coordinates from its own entropy. They trust each other and the network between them.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        plan: PrivacyPlan | UnprotectedPlan,
        loss: PerExample,
        train: Any = None,
        *,
        users: Any = None,
        run_dir: str | Path = "",
        privacy: PrivacySettings | None = None,
        performance: PerformanceSettings | None = None,
        prepare: Callable[[Any], Any] | None = None,
        augment: Callable[[Any], Any] | None = None,
        max_steps: int | None = None,
        measures: Mapping[str, PerExample] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if not str(run_dir):
            raise InputError("run_dir is missing; the ledger and the privacy statement are written there, pass a folder")
        if not isinstance(plan, PrivacyPlan | UnprotectedPlan):
            raise InputError(f"plan is a {type(plan).__name__}; it must be a PrivacyPlan, as PrivacyPlan.solve gives")
        refuse_wrapped_model(model)
        self.model, self.method, self._plan = model, Method.of(method), plan
        self.settings, self.performance = settings_of(privacy, performance)
        self.ranks = ranks_here() if ranks is None else ranks
        self.randomness = randomness_of(self.settings)
        self.loading = Loading(self.settings, self.performance, prepare, augment)
        self.training_metrics: dict[str, float] = {}
        """Means of loss and ``measures`` over the last step's sample, with ``show_private_metrics``; they are private."""
        self.method.refuse_parameters(model, plan)  # before anything of the model is frozen
        broadcast_start(self.ranks, model, self.method.optimizer)
        self.phases = self.method.phases(plan)
        self.phase = self.phases[0]
        last = min(plan.steps, plan.steps if max_steps is None else require_integer("max_steps", max_steps, 1))
        measured = {"loss": loss, **(measures or {})} if self.settings.show_private_metrics else {}
        self.clip = Clip(model, loss, self.phase, isinstance(plan, PrivacyPlan), self.settings, self.performance, measured)
        self.mechanism = mechanism_of(self)
        self.account = account_of(self, Path(run_dir), last)
        self._data: TrainingData | None = None
        self._taking = threading.Lock()
        self.method.prepare(RunNoise.of(plan, self.mechanism.noise_deviation), last)
        self.method.enter(self.phase)
        if train is not None:
            self.attach(train, users)

    def take(self) -> dict[str, Tensor]:
        """Spend the next step and return its privatized mean gradient, by parameter name.

        The step is written to the ledger before anything is sampled, and on disk before this returns or raises. A step that
        fails is spent too.

        Raises PrivacyError if all steps of the plan are spent, or if processing training examples failed; the original error
        message may be private and is withheld.
        """
        with self._one_step():
            phase = phase_at(self.phases, self.account.updates).name if len(self.phases) > 1 else None
            index = self.account.record(phase)
            self._prepare_query(index)
            with self.ranks.together():
                with self.account.synced():  # before other ranks hear of a failure, too
                    sums = withheld(lambda: self._sampled_and_clipped(index), shown=self.settings.show_private_metrics)
                noisy_sums = self.mechanism.add_noise(sums, step=index)
            self.ranks.sum_(noisy_sums, self.mechanism.noised)
            means = self.mechanism.mean(noisy_sums, like=sums)
            self.clip.forget()  # the sums without noise
            self.account.updates += 1
            self.training_metrics = self.clip.means(self.ranks)
            return scatter_rows(means, self.clip.row_masks)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """The privatized gradients of the remaining steps, one after the other. Begins the run unless it was resumed."""
        if not self.account.begun:
            self.account.begin()
        while self.account.remaining:
            yield self.take()

    def __len__(self) -> int:
        """The number of steps per epoch, in which each example is sampled once on average."""
        return math.ceil(self.plan.dataset_size / self.plan.batch_size)

    @property
    def plan(self) -> PrivacyPlan | UnprotectedPlan:
        """The plan, which cannot be exchanged: sampler, noise and ledger have read it."""
        return self._plan

    @property
    def position(self) -> int:
        """The number of steps spent, those lost in a crash among them."""
        return self.account.position

    def epsilon(self) -> float | None:
        """ε of the steps spent so far, at the plan's δ; None for a run without a guarantee."""
        return self.account.epsilon()

    def attach(self, train: Any, users: Any = None) -> None:
        """Set the training data. Between steps it may be in another order, and begins a session that counts by itself in ε.

        Raises InputError if it does not match the plan or differs between ranks, or if examples interact in the model.
        """
        if self.account.begin_session():
            self.continued()
        self._data = sampled_data(self, train, users)
        check(self, self._data, users)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run in ``run_dir`` from its checkpoint with this state, or PrivacyError; later steps stay spent."""
        self.account.load_state_dict(state)
        self.continued()

    def state_dict(self) -> dict[str, Any]:
        """The state to save in a checkpoint, with which :meth:`load_state_dict` verifies that it belongs to this run."""
        return self.account.state_dict()

    def enter_phase(self) -> bool:
        """Switch to the phase of the next step, as :meth:`take` does too; returns whether the phase changed."""
        phase = phase_at(self.phases, self.account.updates)
        if changed := phase != self.phase:
            self._enter(phase)
        return changed

    def write_privacy(self, folder: str | Path | None = None, group_size: int = 1) -> None:
        """Write ``privacy.json`` and ``privacy.txt`` for the steps spent so far, with ε for a group if it has a size."""
        if self.ranks.main:
            into = self.account.run_dir if folder is None else Path(folder)
            self.account.write_statement(into, group_size, shows_training=self.settings.show_private_metrics)

    def close(self) -> None:
        """Write what was spent, close the ledger and release model and data. Closing twice is allowed."""
        unwritten, self._data = self.account.begun and None not in (self._data, self.account.privacy), None
        self.clip.close()
        self.mechanism.forget_noise()
        self.account.close()
        if unwritten:
            self.write_privacy()

    def _prepare_query(self, index: int) -> None:
        """The phase of step ``index``, and by what its gradients are multiplied before they are clipped."""
        if self._data is None:
            raise InputError("no training data is attached; pass it as train, or call attach")
        if index == 1 or index % _COMPARE_EVERY == 0:
            refuse_diverged(self.ranks, self.model, self.method.optimizer, self.position)
        self.enter_phase()
        self.clip.scale = {}
        if type(self.method).scale is not Method.scale:
            with self.loading.stream(self.model, index, self.ranks.rank):
                self.clip.scale = self.method.scale()
        # A scale from public examples may differ in the last bits between devices; all ranks must use the same.
        self.ranks.broadcast_(self.clip.scale)
        self.clip.row_masks = self.method.row_masks()

    def _sampled_and_clipped(self, index: int) -> dict[str, Tensor]:
        assert self._data is not None
        with self._data.step(index) as chunks:
            return self.clip(chunks)

    def continued(self) -> None:
        """Take up the position of the account, as a resumed run has to."""
        self.mechanism.forget_noise()
        self._enter(phase_at(self.phases, self.account.updates))
        if self._data is not None:
            self._data.continue_at(self.position)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.clip.enter(phase)
        self.method.enter(phase)

    @contextmanager
    def _one_step(self) -> Iterator[None]:
        """One thread at a time. A step that fails, fails on all ranks, of which some drew its noise: all begin a new chain."""
        if not self._taking.acquire(blocking=False):
            raise PrivacyError("another thread is taking a step, and two would add up their examples; take one after the other")
        try:
            with self.account.synced():
                yield
        except BaseException:
            self.mechanism.forget_noise()
            raise
        finally:
            self._taking.release()
