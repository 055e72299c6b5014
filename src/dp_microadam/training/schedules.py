"""Learning-rate schedules: a factor in [0, 1] for every optimizer step, known before training starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
