"""A training method: an optimizer, and what happens around its steps (phases, a scale before the clip, rows that train)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.training.gradients import set_gradients
from dp_microadam.training.masked_rows import freeze_other_rows

GRADIENTS = "gradients"
ROW_NORMS = "row norms"
"""The query a phase runs on the training data: Σ of clipped gradients, or Σ of the norms of their rows."""


class Steps(Protocol):
    """What phases are planned from: any plan has it, private or not."""

    @property
    def dataset_size(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def steps(self) -> int: ...


@dataclass(frozen=True)
class Phase:
    """Consecutive steps that run the same query on the gradients of the same parameters.

    ``trainable`` are names of parameters, all others being frozen meanwhile; None leaves them as the model has them. ``rate``
    multiplies the learning rate; at 0 the optimizer does not step and no weight moves.
    """

    name: str
    steps: int
    trainable: frozenset[str] | None = None
    rate: float = 1.0
    query: str = GRADIENTS

    @property
    def engine_key(self) -> tuple[frozenset[str] | None, str]:
        """Phases that agree here share one gradient engine."""
        return self.trainable, self.query


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """The phase of step number ``step``, counted from 0; the last phase has no end.

    >>> phase_at([Phase("first", 2), Phase("second", 3)], 2).name
    'second'
    """
    return phases_from(phases, step)[0]


def phases_from(phases: Sequence[Phase], step: int) -> Sequence[Phase]:
    """The phase of step number ``step`` and all that follow."""
    for number, phase in enumerate(phases):
        if step < phase.steps:
            return phases[number:]
        step -= phase.steps
    return phases[-1:]


class Method:
    """An optimizer with what a method does around its steps; this one does nothing around them.

    Subclasses override what they need. It is called in this order: once :meth:`phases`, :meth:`calibrate` and
    :meth:`refuse_data`; :meth:`begin` when a phase begins, and again when a run is resumed within it; in each step
    :meth:`scale` and :meth:`row_masks` before the clip, then :meth:`apply`, which calls :meth:`receive`.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> nn.init.zeros_(model.weight).tolist()
    [[0.0, 0.0]]
    >>> Method(torch.optim.SGD(model.parameters(), lr=0.5)).apply(model, {"weight": torch.tensor([[2.0, -4.0]])})
    >>> model.weight.tolist()
    [[-1.0, 2.0]]

    Formal guarantees: a method sees the training data only through ``receive``, which is given privatized means. Whatever
    it computes from them, and returns as scale, masks or gradients, is post-processing and costs nothing. Sampling,
    clipping, noise and accounting are the same in every phase, so one plan covers them all. Subclasses must keep to this: no
    access to training data by another way.
    """

    clipped = "the gradient of each example"
    """What is clipped, in the words of the privacy statement."""

    public: tuple[str, ...] = ()
    """What the method uses without protection, in words."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.phase = Phase("training", 1)

    @classmethod
    def of(cls, method_or_optimizer: Method | torch.optim.Optimizer) -> Method:
        """The method itself, or a torch optimizer wrapped as a method with nothing around its steps."""
        if isinstance(method_or_optimizer, Method):
            return method_or_optimizer
        if isinstance(method_or_optimizer, torch.optim.Optimizer):
            return Method(method_or_optimizer)
        raise InputError(
            f"optimizer is a {type(method_or_optimizer).__name__}; it must be a torch optimizer, or a method of "
            "dp_microadam.methods"
        )

    @property
    def procedure(self) -> Method:
        """Deprecated: a method is one object, passed whole."""
        warnings.warn(
            "Method.procedure is deprecated; pass the method itself: PrivateTrainer(model, method, plan, loss)",
            DeprecationWarning,
            stacklevel=2,
        )
        return self

    @property
    def learning_rate(self) -> float:
        """Of the optimizer's first parameter group in this phase."""
        return float(self.optimizer.param_groups[0]["lr"]) * self.phase.rate

    def phases(self, plan: Steps) -> tuple[Phase, ...]:
        """The phases of a run, which add up to the plan's steps."""
        return (Phase("training", plan.steps),)

    def calibrate(self, noise_deviation: float) -> None:
        """Called once with the noise standard deviation σS/B of each coordinate of a mean; 0 without privacy."""

    def refuse_data(self, train: Any) -> None:
        """Raise an InputError if the method cannot be used on this training data; only its identity may be looked at."""

    def begin(self, phase: Phase) -> None:
        """A phase begins, or is resumed; a second call for the same phase must change nothing."""

    def scale(self) -> Mapping[str, Tensor]:
        """Factors for the gradients before they are clipped, by parameter name; called once per step."""
        return {}

    def row_masks(self) -> Mapping[str, Tensor]:
        """Which rows of weights train, by parameter name; others have neither gradient nor noise and do not move."""
        return {}

    def receive(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients for the optimizer, from the privatized means of a step; both by parameter name."""
        return means

    def refuse_parameters(self, model: nn.Module, plan: Steps) -> None:
        """
        Raises:
            InputError: if the optimizer holds parameters that are not the model's, or lacks some that would be trained.
        """
        owned = {id(parameter) for parameter in model.parameters()}
        held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for parameter in held:
            if id(parameter) not in owned:
                raise InputError(
                    f"optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's; build it from "
                    "model.parameters()"
                )
        known = {id(parameter) for parameter in held}
        trainable = [phase.trainable for phase in self.phases(plan) if phase.rate]
        for name, parameter in model.named_parameters():
            trains = any(parameter.requires_grad if names is None else name in names for names in trainable)
            if trains and id(parameter) not in known:
                raise InputError(
                    f"optimizer does not hold the parameter {name!r}, which requires gradients: clipping and noise would be "
                    "spent on it for nothing; freeze it with requires_grad_(False), or give it to the optimizer"
                )

    def enter(self, phase: Phase) -> None:
        """Make ``phase`` the current one."""
        self.phase = phase
        self.begin(phase)

    def apply(self, model: nn.Module, means: dict[str, Tensor]) -> None:
        """One optimizer step from the privatized means of a private step."""
        self.set_gradients(model, means)
        with self.around_step(model):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def set_gradients(self, model: nn.Module, means: dict[str, Tensor]) -> None:
        """Give each parameter its gradient; in a phase of rate 0 none, so that an optimizer's step moves nothing."""
        gradients = self.receive(means)
        set_gradients(model, gradients if self.phase.rate else {})

    @contextmanager
    def around_step(self, model: nn.Module) -> Iterator[None]:
        """Within the block the optimizer has the phase's learning rates, and rows that do not train stay as they are."""
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if self.phase.rate != 1.0:
            for group in groups:
                group["lr"] = float(group["lr"]) * self.phase.rate
        try:
            with freeze_other_rows(model, self.row_masks()):
                yield
        finally:
            if self.phase.rate != 1.0:
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate

    def hooked(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within the block every step of the optimizer, whoever calls it, is taken as :meth:`around_step` says."""
        return _hooked(self, model)

    def state_dict(self) -> dict[str, Any]:
        """All that :meth:`load_state_dict` needs to go on exactly, beside the optimizer's state; tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that :meth:`state_dict` gave."""


@contextmanager
def _hooked(method: Method, model: nn.Module) -> Iterator[None]:
    step = ExitStack()

    def before(*_: Any) -> None:
        step.enter_context(method.around_step(model))

    def after(*_: Any) -> None:
        step.close()

    hooks = [method.optimizer.register_step_pre_hook(before), method.optimizer.register_step_post_hook(after)]
    try:
        yield
    finally:
        step.close()
        for hook in hooks:
            hook.remove()
