"""Learning-rate schedules: a factor in [0, 1] for every optimizer step, known before training starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dp_microadam.errors import InputError
from dp_microadam.validation import require_in_closed_open, require_integer, require_one_of

SHAPES = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class Schedule:
    """A learning rate schedule: linear warm-up, then constant, or decaying to zero along a cosine or a line.

    ``warmup`` is a fraction of all steps. With w warm-up steps, step number s (from 0) has factor (s+1)/w. The factor depends
    on the step alone, so resuming needs no state.

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

    def all_factors(self) -> list[float] | None:
        """The factors of all steps, for coefficients of correlated noise that suit them; None if all are 1."""
        if self.shape == "constant" and not self.warmup_steps:
            return None
        return [self.factor(step) for step in range(self.steps)]


class LearningRates:
    """Sets an optimizer's learning rates during a run, and restores them afterwards.

    ``schedule`` is a :class:`Schedule`, which scales the optimizer's own rates; a torch scheduler of this optimizer, which is
    stepped after each optimizer step; or None, which leaves the rates unchanged.

    Raises:
        InputError: for a torch scheduler of another optimizer, for one that needs a loss or ends before ``steps``, for anything
            else that is no schedule, or if the optimizer has a torch scheduler that was not passed as ``schedule``.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Schedule | LRScheduler | None, steps: int | None = None
    ) -> None:
        if schedule is not None and not isinstance(schedule, Schedule | LRScheduler):
            raise InputError(
                f"schedule is a {type(schedule).__name__}; it must be a Schedule, or a torch scheduler of the optimizer, as "
                "LambdaLR(optimizer, function) is"
            )
        if isinstance(schedule, ReduceLROnPlateau):
            raise InputError("schedule is a ReduceLROnPlateau, which needs a loss; use a schedule that depends on steps alone")
        if isinstance(schedule, LRScheduler):
            if schedule.optimizer is not optimizer:
                raise InputError(
                    f"schedule is a {type(schedule).__name__} of another optimizer; make one for the optimizer that trains"
                )
            last = getattr(schedule, "total_steps", None)
            if last is not None and steps is not None and last < steps:
                raise InputError(
                    f"schedule is a {type(schedule).__name__} of {last} steps and cannot go on after them; make it for the "
                    f"{steps} steps of the run"
                )
        elif any("initial_lr" in group for group in optimizer.param_groups):
            raise InputError(
                "optimizer has a torch learning-rate scheduler that would never be stepped; pass it as schedule=scheduler"
            )
        self._optimizer = optimizer
        self._schedule = schedule
        self._own = [group["lr"] for group in optimizer.param_groups]
        self._units = [_unit(group) for group in optimizer.param_groups]

    def before_step(self, updates: int) -> None:
        """Set the learning rates of optimizer step number ``updates``, counted from 0."""
        if isinstance(self._schedule, Schedule):
            factor = self._schedule.factor(updates)
            for group, rate in zip(self._optimizer.param_groups, self._own, strict=True):
                group["lr"] = float(rate) * factor

    def after_step(self) -> None:
        """Step a torch scheduler."""
        if isinstance(self._schedule, LRScheduler):
            self._schedule.step()

    def restore(self) -> None:
        """Restore the optimizer's own rates, so that it can be used again; a torch scheduler keeps its state."""
        if not isinstance(self._schedule, LRScheduler):
            for group, rate in zip(self._optimizer.param_groups, self._own, strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: that of a torch scheduler, otherwise empty."""
        return {"schedule": self._schedule.state_dict()} if isinstance(self._schedule, LRScheduler) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, after the optimizer's state was loaded."""
        if isinstance(self._schedule, LRScheduler):
            if "schedule" not in state:
                raise InputError(
                    "the checkpoint has no state of a torch scheduler; resume with the schedule that the run began with"
                )
            self._schedule.load_state_dict(state["schedule"])
            return
        # A rate of another unit than the run began with would be another rate: the run keeps its own then.
        groups = self._optimizer.param_groups
        differ = [_unit(group) != unit for group, unit in zip(groups, self._units, strict=True)]
        if any(differ) and isinstance(self._schedule, Schedule) and self._schedule.all_factors() is not None:
            raise InputError(
                f"lr_unit is {self._units[differ.index(True)]!r}, but the run began with another, and its schedule changes the "
                "rate; resume with the lr_unit and learning rate that it began with"
            )
        self._own = [group["lr"] if other else own for group, own, other in zip(groups, self._own, differ, strict=True)]
        self.restore()


def _unit(group: Mapping[str, Any]) -> str:
    """The unit of a group's learning rate."""
    return str(group.get("lr_unit", "absolute"))
