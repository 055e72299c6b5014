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
    """Warm-up over a fraction of all steps, then constant, or falling to zero along a cosine or a line.

    The factor rises from the first step on: with w warm-up steps, step number s (from 0) has factor (s+1)/w. It depends on
    the step alone, so a resumed run needs no state of it.

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
        """What the learning rate of optimizer step number ``step``, counted from 0, is multiplied by."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        if self.shape == "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        return 1 - progress if self.shape == "linear" else 1.0


class LearningRates:
    """Sets the learning rates of an optimizer over the steps of a run; its own, which are the maxima, come back afterwards.

    ``schedule`` is a :class:`Schedule`, a torch scheduler of this optimizer, which is stepped after each optimizer step, or
    None, which leaves the rates alone.

    Raises:
        InputError: for a torch scheduler of another optimizer, one that waits for a loss, or one that the optimizer has and
            nobody would step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule | LRScheduler | None) -> None:
        if isinstance(schedule, ReduceLROnPlateau):
            raise InputError("schedule is a ReduceLROnPlateau, which waits for a loss; it must be one that follows the steps")
        if isinstance(schedule, LRScheduler):
            if schedule.optimizer is not optimizer:
                raise InputError(
                    f"schedule is a {type(schedule).__name__} of another optimizer; make it for the one that trains"
                )
        elif any("initial_lr" in group for group in optimizer.param_groups):
            raise InputError(
                "optimizer has a torch learning-rate scheduler that nobody would step; pass it as schedule=scheduler"
            )
        self._optimizer = optimizer
        self._schedule = schedule
        self._own = [group["lr"] for group in optimizer.param_groups]

    def before_step(self, updates: int) -> None:
        """Set the rates of the optimizer step after ``updates`` others."""
        if isinstance(self._schedule, Schedule):
            factor = self._schedule.factor(updates)
            for group, rate in zip(self._optimizer.param_groups, self._own, strict=True):
                group["lr"] = float(rate) * factor

    def after_step(self) -> None:
        """Step a torch scheduler."""
        if isinstance(self._schedule, LRScheduler):
            self._schedule.step()

    def restore(self) -> None:
        """Give the optimizer its own rates back, so that it can be used again; a torch scheduler keeps its own account."""
        if not isinstance(self._schedule, LRScheduler):
            for group, rate in zip(self._optimizer.param_groups, self._own, strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold; nothing, unless a torch scheduler counts its own steps."""
        return {"schedule": self._schedule.state_dict()} if isinstance(self._schedule, LRScheduler) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, after the optimizer's state was loaded."""
        if isinstance(self._schedule, LRScheduler):
            if "schedule" not in state:
                raise InputError(
                    "the checkpoint has no state of a torch scheduler; resume with the schedule the run began with"
                )
            self._schedule.load_state_dict(state["schedule"])
        else:
            self.restore()
