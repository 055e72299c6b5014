"""One update of the model from the means of a step: learning rate, method, weight average; and its state in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from dp_microadam.training.ema import WeightAverage
from dp_microadam.training.evaluation import moved
from dp_microadam.training.method import Method
from dp_microadam.training.run_statistics import sizes
from dp_microadam.training.schedules import LearningRates, Schedule


class ModelUpdate:
    """Updates a model with a method, a schedule of the learning rate and a moving average of the weights.

    All of it is post-processing of the means it is given. ``steps`` is how many there will be, for schedules that end.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        schedule: Schedule | LRScheduler | None = None,
        ema_decay: float = 0.0,
        steps: int | None = None,
    ) -> None:
        self.model = model
        self.method = method
        self.rates = LearningRates(method.optimizer, schedule, steps)
        self.average = WeightAverage(model, ema_decay) if ema_decay else None

    def apply(self, means: dict[str, Tensor], updates: int) -> None:
        """Apply the means of update number ``updates``, counted from 1."""
        self.rates.before_step(updates - 1)
        self.method.apply(self.model, means)
        self.rates.after_step()
        if self.average is not None:
            self.average.update(self.model, updates)

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes in an update, for a checkpoint."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.method.optimizer.state_dict(),
            "method": self.method.state_dict(),
            **self.rates.state_dict(),
        }
        if self.average is not None:
            state["average"] = self.average.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.method.optimizer.load_state_dict(state["optimizer"])
        self.rates.load_state_dict(state)
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.method.load_state_dict(moved(state["method"], self.model))

    def sizes(self) -> dict[str, Any]:
        """The number of parameters and the bytes of state, for the run's statistics."""
        return sizes(self.model, self.method.optimizer, self.method.state_dict())
