"""The common part of private and unprotected training steps: sampling, sums of gradients, phases, distributed training."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.noise.randomness import Randomness
from dp_microadam.plan.band_choice import DEFAULT_NOISE_MEMORY_GIB
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.sampling.poisson import PoissonSampler, alone
from dp_microadam.sampling.users import Units
from dp_microadam.training.distributed import Ranks, broadcast_start, ranks_here, refuse_diverged
from dp_microadam.training.engines import Engines
from dp_microadam.training.evaluation import PerExample
from dp_microadam.training.given_data import refuse_wrapped_model, require_norm
from dp_microadam.training.gradients import GradientSums
from dp_microadam.training.masked_rows import scatter_rows, selected_rows
from dp_microadam.training.method import Method, Phase, Steps, phase_at
from dp_microadam.training.rate_units import RunNoise
from dp_microadam.training.same_examples import require_same_data, share_examples
from dp_microadam.training.training_data import Loading, TrainingData
from dp_microadam.training.withheld import LOSS, at_stage
from dp_microadam.validation import refuse_unknown, require_integer

Result = TypeVar("Result")

_COMPARE_EVERY = 100
"""Steps between checks that all ranks have the same weights and optimizer state."""


CLIPPING_OPTIONS = ("autocast", "synthetic_batch", "strategy")
"""What ``clipping_options`` may have: the arguments of the clipping engine that no other option or the step itself decides."""


class StepOptions(TypedDict, total=False):
    """Options of a training step, as :class:`PrivateStep` documents them, which trainers and adapters pass on as they are."""

    max_grad_norm: float
    clipping: str
    clipping_options: Mapping[str, Any]
    physical_batch_size: int
    prepare: Callable[[Any], Any] | None
    augment: Callable[[Any], Any] | None
    num_workers: int
    loader_options: Mapping[str, Any]
    max_steps: int | None
    public: Iterable[str]
    unit_name: str
    noise_history: str
    noise_memory_gib: float
    secure: bool
    seed: int | None
    ranks: Ranks | None


class TrainingStep(ABC):
    """Base class of training steps: samples a batch, sums the gradients and divides by the expected batch size.

    ``position`` counts all steps taken, including those lost in a crash. ``updates`` counts the steps whose means were
    returned; phases and schedules follow it.
    """

    def __init__(
        self,
        model: nn.Module,
        per_example_loss: PerExample,
        plan: Steps,
        train: Any = None,
        *,
        users: Any = None,
        run_dir: str | Path = "",
        method: Method | None = None,
        training_measures: Mapping[str, PerExample] | None = None,
        max_grad_norm: float = 1.0,
        clipping: str = "flat",
        clipping_options: Mapping[str, Any] | None = None,
        physical_batch_size: int = 256,
        prepare: Callable[[Any], Any] | None = None,
        augment: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        loader_options: Mapping[str, Any] | None = None,
        max_steps: int | None = None,
        public: Iterable[str] = ("normalization constants of the input",),
        unit_name: str = "",
        noise_history: str = "device",
        noise_memory_gib: float = DEFAULT_NOISE_MEMORY_GIB,
        secure: bool = False,
        seed: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if not str(run_dir):
            raise InputError(
                f"run_dir is missing; {type(self).__name__} writes ledger and privacy statement there, pass a folder"
            )
        refuse_wrapped_model(model)
        self.run_dir = Path(run_dir)
        self.model = model
        self._plan = plan
        refuse_unknown("clipping_options", clipping_options or (), CLIPPING_OPTIONS)
        self.ranks = ranks_here() if ranks is None else ranks
        self.last_step = min(plan.steps, plan.steps if max_steps is None else require_integer("max_steps", max_steps, 1))
        self.position = 0
        self.resumed_at: tuple[int, ...] = ()
        """The steps before which the run was resumed, or given its data anew; with bands ε counts each session by itself."""
        self.updates = 0
        self.loading = Loading(physical_batch_size, prepare, augment, num_workers, loader_options or {}, seed)
        self.training_metrics: dict[str, float] = {}
        """Means of ``training_measures`` over the last step's sample; they are private."""
        self._loss = per_example_loss
        self._method = method
        self._clipping_options = {
            "max_grad_norm": require_norm(max_grad_norm),
            "clipping": clipping,
            **(clipping_options or {}),
        }
        self._public, self._unit_name = tuple(public), unit_name
        self._noise_history, self._noise_memory_gib = noise_history, noise_memory_gib
        self._randomness = Randomness.from_entropy(secure=secure) if seed is None else Randomness.seeded(seed, secure=secure)
        self._training_measures = dict(training_measures or {})
        self._totals: list[float] = []
        self._data: TrainingData | None = None
        self._units: Units | None = None
        broadcast_start(self.ranks, model, None if method is None else method.optimizer)
        self.phases: Sequence[Phase] = (Phase("training", plan.steps),) if method is None else method.phases(plan)
        self.phase = self.phases[0]
        self._engines = Engines(model, self._make_engine, self.phase)
        self._set_up_noise()
        if method is not None:
            method.calibrate(self.noise_deviation)
            method.correlate(1.0 if self.privacy is None else self.privacy.single_step_growth)
            method.measure(self._run_noise())
            method.enter(self.phase)
        if train is not None:
            self.attach(train, users)

    @property
    def plan(self) -> Steps:
        """The plan, which cannot be exchanged: sampler, noise and ledger have read it."""
        return self._plan

    @property
    def unit_name(self) -> str:
        """What a unit is called: example or user, or by its own name, such as patient."""
        return self._unit_name or self.plan.unit

    @property
    @abstractmethod
    def noise_deviation(self) -> float:
        """Noise standard deviation of each coordinate of a mean."""

    def _run_noise(self) -> RunNoise:
        if self.privacy is None:
            return RunNoise(0.0, self.plan.steps)
        ratios = self.privacy.noise_ratios
        horizon = self.plan.steps * (ratios.running_sum / ratios.single_step) ** 2
        return RunNoise(self.noise_deviation, horizon, self.plan.steps)

    @property
    def noise_memory(self) -> int:
        """Bytes of past noise that this process keeps for the next steps."""
        return 0

    @abstractmethod
    def _set_up_noise(self) -> None:
        """Create the mechanism that adds noise, for the sensitivity of the first engine."""

    @property
    @abstractmethod
    def private(self) -> bool:
        """Whether what :meth:`take` returns is differentially private."""

    @property
    @abstractmethod
    def stamp(self) -> str:
        """``"private"`` or ``"not private"``, with the reason."""

    @property
    def warnings(self) -> list[str]:
        """What the user is told before training: that nothing is guaranteed, if that is so."""
        return [] if self.private else [f"this run is {self.stamp}"]

    @property
    @abstractmethod
    def privacy(self) -> PrivacyPlan | None:
        """The plan whose ε the run reports; None for a run without a guarantee."""

    @property
    def delta(self) -> float | None:
        """The plan's δ; None for a run without a guarantee."""
        return None if self.privacy is None else self.privacy.delta

    @property
    @abstractmethod
    def begun(self) -> bool:
        """Whether steps can be taken."""

    @abstractmethod
    def begin(self) -> None:
        """Start a new run at step 0."""

    @abstractmethod
    def resume(self, position: int, updates: int, ledger_head: str | None = None) -> None:
        """Continue a run whose checkpoint holds ``updates`` steps and was written when ``position`` had been taken."""

    @property
    @abstractmethod
    def ledger_head(self) -> str | None:
        """The hash of the ledger's last line, which is stored in checkpoints; None without a ledger."""

    @abstractmethod
    def take(self) -> dict[str, Tensor]:
        """The mean gradient of the next step, by parameter name."""

    @abstractmethod
    def epsilon(self) -> float | None:
        """ε of the steps taken so far; None for a run without a guarantee."""

    @abstractmethod
    def describe_spent(self, steps: int) -> str:
        """The privacy spent by ``steps`` steps, in a few words for a progress bar."""

    @abstractmethod
    def peek(self, position: int, updates: int) -> None:
        """Set the position from a checkpoint without opening the ledger, so that another process can keep training."""

    @abstractmethod
    def write_privacy(self, folder: str | Path | None = None, group_size: int = 1) -> None:
        """Write ``privacy.json`` and ``privacy.txt`` for the steps taken so far into ``folder``, by default ``run_dir``."""

    @abstractmethod
    def _make_engine(self, phase: Phase) -> GradientSums:
        """The engine that sums gradients in this phase."""

    @abstractmethod
    def _check_model(self, data: TrainingData) -> None:
        """Check the model before the first step."""

    @abstractmethod
    def _guarded(self, work: Callable[[], Result]) -> Result:
        """What ``work`` on training examples returns; error messages that may be private are withheld."""

    @property
    def remaining(self) -> int:
        """The number of steps left."""
        return max(0, self.last_step - self.position)

    def __len__(self) -> int:
        """The number of steps per epoch, in which each example is sampled once on average."""
        return math.ceil(self.plan.dataset_size / self.plan.batch_size)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the numbers of the remaining steps; call :meth:`take` for each. Begins the run unless it was resumed."""
        if not self.begun:
            self.begin()
        while self.remaining:
            yield self.position

    def attach(self, train: Any, users: Any = None) -> None:
        """Set the training data: a map-style Dataset, or tensors with examples along the first dimension.

        ``users`` has the id of each example's user, if users are the plan's unit.

        Raises:
            InputError: if the data does not match the plan or differs between ranks, or if examples interact in the model.
        """
        with self.ranks.together():
            self._units = units_of(self.plan, users)
            self._data = TrainingData(
                train, self._sampler_from, self.position, self.loading, self.model, self.ranks.rank, self._units
            )
            if self._method is not None:
                self._method.refuse_data(train)
            self._check_model(self._data)
        if self.ranks.world_size > 1:
            self.ranks.require_same("plan, phases, clipping or randomness", self._rules())
            require_same_data(self.ranks, train)
            self.ranks.require_same("users, the ids of the examples", self._units and self._units.digest())

    def _sampler_from(self, first_step: int) -> PoissonSampler:
        return PoissonSampler(
            self.plan.dataset_size,
            self.plan.batch_size,
            steps=self.last_step,
            physical_batch_size=self.loading.physical_batch_size,
            first_step=min(first_step, self.last_step),
            shard=self.ranks.shard(self.plan.dataset_size),
            bands=self.plan.bands,
            randomness=self._randomness,
            units=self._units,
            max_batch_size=self.plan.max_batch_size,
            exchange=alone if self.ranks.world_size == 1 else lambda own: (self.ranks.gather(own), self.ranks.rank),
        )

    def shares_examples(self, data: Any) -> bool:
        """Whether ``data`` shares examples with the training data, as far as that is visible without comparing values."""
        return self._data is not None and share_examples(self._data.data, data)

    def enter_phase(self) -> bool:
        """Switch to the phase of the next step, as :meth:`take` does too; returns whether the phase changed."""
        phase = phase_at(self.phases, self.updates)
        changed = phase != self.phase
        if changed:
            self._switch_to(phase)
        return changed

    def close(self) -> None:
        """Release model and data. Closing twice is allowed."""
        self._engines.close()
        self._data = self._units = None

    def _rules(self) -> tuple[Any, ...]:
        """Settings that must be the same on all ranks."""
        return self.plan, tuple(self.phases), self.stamp, self._randomness.description

    def _switch_to(self, phase: Phase) -> None:
        self._engines.enter(phase)
        self.phase = phase
        if self._method is not None:
            self._method.enter(phase)

    def _continue_at(self, position: int, updates: int) -> None:
        self.position, self.updates = position, updates
        self._switch_to(phase_at(self.phases, updates))
        if self._data is not None:
            self._data.continue_at(position)

    def _prepare_query(self, index: int) -> None:
        """Prepare the engine for step ``index``: its phase, sums of zero, and the method's scale and row masks."""
        if index == 1 or index % _COMPARE_EVERY == 0:
            self.refuse_diverged()
        self.position = index + 1  # counts as taken from here on, even if it fails
        self.enter_phase()
        engine = self._engines.current
        engine.reset()
        if self._method is None:
            return
        scale: Mapping[str, Tensor] = {}
        if type(self._method).scale is not Method.scale:
            with self.loading.stream(self.model, index, self.ranks.rank):
                scale = self._method.scale()
        # A scale from public examples may differ in the last bits between devices; all ranks must use the same.
        self.ranks.broadcast_(scale)
        engine.scale = scale
        engine.row_masks = self._method.row_masks()

    def refuse_diverged(self) -> None:
        """Raise an error unless all ranks have the same weights and optimizer state."""
        optimizer = None if self._method is None else self._method.optimizer
        refuse_diverged(self.ranks, self.model, optimizer, self.position)

    def _sums(self, index: int) -> dict[str, Tensor]:
        """The sum over this rank's part of the sample of step ``index``, for the rows that train."""
        if self._data is None:
            raise InputError("no training data is attached; pass it as train, or call attach")
        data = self._data
        self._totals = self._guarded(lambda: self._accumulate(data, index))
        return selected_rows(self._engines.current.sums, self._row_masks())

    def _accumulate(self, data: TrainingData, index: int) -> list[float]:
        """Sum up the gradients of the sample; returns totals of the training measures, and the count of examples with them.

        Of users, the totals are over the means of each, and the count is that of users.
        """
        totals = [0.0] * len(self._training_measures)
        count = 0
        with data.step(index) as chunks:
            for examples, weights in chunks:
                with at_stage(LOSS):
                    self._engines.current.accumulate(examples, weights)
                for number, values in enumerate(self._measured(examples)):
                    values = values if weights is None else (values.view_as(weights) * weights).sum(1)
                    totals[number] += float(values.sum())
                    count += len(values) if number == 0 else 0
        return [*totals, count]

    def _finish(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Finish the step: return its means, with zeros in the rows that do not train; forget the sums without noise."""
        self.updates += 1
        self._engines.current.reset()
        self.training_metrics = self._training_means()
        return scatter_rows(means, self._row_masks())

    def _row_masks(self) -> Mapping[str, Tensor]:
        return {} if self._method is None else self._method.row_masks()

    @torch.no_grad()
    def _measured(self, batch: Any) -> list[Tensor]:
        return [measure(self.model, batch) for measure in self._training_measures.values()]

    def _training_means(self) -> dict[str, float]:
        if not self._training_measures:
            return {}
        *sums, count = self.ranks.total(self._totals)
        names = self._training_measures
        return {f"training_{name}": total / count for name, total in zip(names, sums, strict=True)} if count else {}


def units_of(plan: Steps, users: Any) -> Units | None:
    """The users of a plan of users, None for a plan of examples.

    Raises:
        InputError: if the plan's unit is the user and there are no ids, or the other way round.
    """
    if plan.unit == "user" and users is None:
        raise InputError("the plan's unit is the user, but users is missing; pass one id per training example as users")
    if plan.unit == "example" and users is not None:
        raise InputError(
            "users is given, but the plan's unit is the example; solve a plan with unit='user' and examples_per_user"
        )
    return None if users is None else Units(users, plan.examples_per_user or 1)


def phases_in_words(phases: Sequence[Phase]) -> list[str]:
    """The phases of a run with several, in words for its privacy statement."""
    if len(phases) == 1:
        return []
    steps: dict[str, int] = {}
    for phase in phases:
        steps[phase.name] = steps.get(phase.name, 0) + phase.steps
    return ["steps of each phase (" + ", ".join(f"{name} {count}" for name, count in steps.items()) + ")"]
