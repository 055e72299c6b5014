"""Learning rates of a run: the optimizer's own or a distance that follows from the noise, and schedules that multiply them.

What a distance is, and why noise determines it, is derived in ``plan/learning_rate.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dp_microadam.errors import InputError
from dp_microadam.optimizers.micro_adam import MicroAdam
from dp_microadam.optimizers.tensor_adam import TensorAdam
from dp_microadam.optimizers.threshold_adam import ThresholdAdam
from dp_microadam.plan.learning_rate import walk_scale
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.validation import require_in_closed_open, require_integer, require_one_of, require_positive

SHAPES = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class Schedule:
    """A learning rate schedule: linear warm-up, then constant, or decaying to zero along a cosine or a line.

    ``warmup`` is a fraction of all steps. With w warm-up steps, step number s (from 0) has factor (s+1)/w.

    >>> schedule = Schedule("linear", steps=8, warmup=0.25)
    >>> [round(schedule.factor(step), 3) for step in range(8)]
    [0.5, 1.0, 1.0, 0.833, 0.667, 0.5, 0.333, 0.167]
    """

    shape: str
    steps: int
    warmup: float = 0.0

    def __post_init__(self) -> None:
        require_one_of("schedule", self.shape, SHAPES)
        require_integer("steps", self.steps, 1)
        require_in_closed_open("warmup", self.warmup, 0.0, 1.0)

    @property
    def warmup_steps(self) -> int:
        return math.ceil(self.warmup * self.steps)

    def factor(self, step: int) -> float:
        """The factor of the learning rate at optimizer step number ``step``, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        if self.shape == "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        return 1 - progress if self.shape == "linear" else 1.0


@dataclass(frozen=True)
class RunNoise:
    """The noise of a run in each coordinate of a mean. Public.

    ``deviation`` is its standard deviation in one step, 0 without privacy. ``effective_steps`` is the number of steps over
    which independent noise of that deviation adds up to what the whole run leaves in the sum of its means: all ``steps`` with
    one band, fewer with correlated noise. ``growth`` is the noise of a single step relative to one band with the same ε.
    """

    deviation: float
    steps: int
    effective_steps: float
    growth: float = 1.0

    @classmethod
    def of(cls, plan: Any, deviation: float) -> RunNoise:
        """The noise of a run with this plan and this deviation in single steps."""
        if not isinstance(plan, PrivacyPlan):
            return cls(0.0, plan.steps, plan.steps)
        ratios = plan.noise_ratios
        effective = plan.steps * (ratios.running_sum / ratios.single_step) ** 2
        return cls(deviation, plan.steps, effective, plan.single_step_growth)


class StepUnderNoise(NamedTuple):
    """How an optimizer answers gradients that are nothing but noise.

    ``length`` is the root mean square of what a step with rate 1 adds to a coordinate, None if it is not known. A
    rate is multiplied by the growth of single steps to ``power_of_growth``, so that one chosen for one band serves any number.
    """

    length: float | None
    power_of_growth: float


_DIVIDE_BY_SIZE = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, TensorAdam, ThresholdAdam)
"""Optimizers that divide by the size of what they see, AdamW among them: noise of any size moves them by ``lr`` a step."""


def step_under_noise(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], deviation: float) -> StepUnderNoise | None:
    """For noise of this deviation and a parameter group's options; None for an optimizer of which it is not known.

    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    >>> round(step_under_noise(sgd, sgd.param_groups[0], 0.5).length, 6)
    5.0
    """
    if isinstance(optimizer, _DIVIDE_BY_SIZE):
        return StepUnderNoise(1.0, 1.0)
    if isinstance(optimizer, MicroAdam):
        # Steps are signs of sums of about a hundred gradients, in which most of correlated noise has cancelled.
        return StepUnderNoise(None, 0.5)
    if isinstance(optimizer, torch.optim.SGD):
        # Momentum repeats every gradient β, β², … times; dampening, if given, takes its place.
        repeated = (1 - group["dampening"] if group["momentum"] else 1) / (1 - group["momentum"])
        return StepUnderNoise(deviation * repeated, 0.0)
    return None


class LearningRates:
    """The learning rates of an optimizer's parameter groups in a run.

    A group with a ``"distance"`` has the rate at which the noise of the run walks that far; others have their own ``"lr"``.
    ``schedule`` multiplies both: a :class:`Schedule`, or a torch scheduler of this optimizer, which is stepped after each
    optimizer step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._schedule: Schedule | LRScheduler | None = None
        self._noise: RunNoise | None = None

    def configure(self, distance: float | None, schedule: Schedule | LRScheduler | None) -> None:
        """Set the distance of all groups that have none of their own, and the schedule, where they are given."""
        if schedule is not None:
            self._refuse_schedule(schedule)
            self._schedule = schedule
        if distance is not None:
            require_positive("distance", distance)
            for group in self._optimizer.param_groups:
                group.setdefault("distance", distance)

    def of(self, group: Mapping[str, Any], updates: int) -> float:
        """The rate of a parameter group at optimizer step number ``updates``, counted from 0."""
        factor = self._schedule.factor(updates) if isinstance(self._schedule, Schedule) else 1.0
        rate = float(group["lr"])
        if "distance" not in group:
            return rate * factor * self._growth(group)
        scheduled = rate / float(group["initial_lr"]) if "initial_lr" in group else 1.0  # by a torch scheduler
        return float(group["distance"]) * self._rate_of_distance(group) * scheduled * factor

    def prepare(self, noise: RunNoise, steps: int) -> None:
        """Called once before the first step, with the noise of the run and its number of steps.

        Raises InputError for a distance of an optimizer whose steps under noise are unknown, or a schedule that ends early.
        """
        self._noise = noise
        last = getattr(self._schedule, "total_steps", None)
        if last is not None and last < steps:
            raise InputError(
                f"schedule is a {type(self._schedule).__name__} of {last} steps and cannot go on after them; make it for the "
                f"{steps} steps of the run"
            )
        for group in self._optimizer.param_groups:
            self.of(group, 0)

    def refuse_idle_scheduler(self) -> None:
        """Raise an InputError for a torch scheduler of the optimizer that nobody would step."""
        if self._schedule is None and any("initial_lr" in group for group in self._optimizer.param_groups):
            raise InputError(
                "optimizer has a torch learning-rate scheduler that would never be stepped; pass Method(optimizer, "
                "schedule=scheduler)"
            )

    @contextmanager
    def in_force(self, updates: int, phase_rate: float) -> Iterator[None]:
        """Within the block, one optimizer step, groups have the rates of this step; a torch scheduler is stepped at its end."""
        groups = self._optimizer.param_groups
        own = [group["lr"] for group in groups]
        for group in groups:
            rate = self.of(group, updates) * phase_rate
            if rate != group["lr"]:  # a rate that is a tensor stays one
                group["lr"] = rate
        try:
            yield
        finally:
            for group, rate in zip(groups, own, strict=True):
                group["lr"] = rate
        if isinstance(self._schedule, LRScheduler):
            self._schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of a torch scheduler for a checkpoint; empty without one."""
        return self._schedule.state_dict() if isinstance(self._schedule, LRScheduler) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, after the optimizer's state was loaded."""
        if isinstance(self._schedule, LRScheduler):
            if not state:
                raise InputError(
                    "the checkpoint has no state of a torch scheduler; resume with the schedule that the run began with"
                )
            self._schedule.load_state_dict(dict(state))

    def _growth(self, group: Mapping[str, Any]) -> float:
        """Optimizers that divide by the size of single noisy gradients step less with correlated noise, by its growth, although
        the noise of sums is smaller; a rate chosen for one band serves any number if it is multiplied by it."""
        growth = 1.0 if self._noise is None else self._noise.growth
        response = step_under_noise(self._optimizer, group, 1.0)
        return 1.0 if response is None else float(growth**response.power_of_growth)

    def _rate_of_distance(self, group: Mapping[str, Any]) -> float:
        """The rate at which noise alone moves the weights by d^¼ in the whole run, for the d parameters that train."""
        if self._noise is None:
            raise InputError("a distance is measured by the noise of a run, and none has begun; take steps with PrivateStep")
        groups = self._optimizer.param_groups
        trained = sum(parameter.numel() for one in groups for parameter in one["params"] if parameter.requires_grad)
        response = step_under_noise(self._optimizer, group, self._noise.deviation)
        if response is None or response.length is None:
            raise InputError(
                f"distance is {group['distance']}, but the optimizer is {type(self._optimizer).__name__}; it is defined "
                "for SGD, Adam, AdamW, ThresholdAdam and TensorAdam, so use one of these, or a learning rate"
            )
        if not response.length:
            raise InputError(
                f"distance is {group['distance']}, which measures SGD's learning rate by the noise, but this run adds none; "
                "give a learning rate"
            )
        return walk_scale(max(1, trained)) / math.sqrt(self._noise.effective_steps) / response.length

    def _refuse_schedule(self, schedule: object) -> None:
        if isinstance(schedule, ReduceLROnPlateau):
            raise InputError("schedule is a ReduceLROnPlateau, which needs a loss; use a schedule that depends on steps alone")
        if isinstance(schedule, LRScheduler) and schedule.optimizer is not self._optimizer:
            raise InputError(
                f"schedule is a {type(schedule).__name__} of another optimizer; make one for the optimizer that trains"
            )
        if not isinstance(schedule, Schedule | LRScheduler):
            raise InputError(
                f"schedule is a {type(schedule).__name__}; it must be a Schedule, or a torch scheduler of the optimizer, as "
                "LambdaLR(optimizer, function) is"
            )
