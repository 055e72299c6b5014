"""A training method: an optimizer, plus phases, scaling before clipping, and masks of rows that train."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.optimizers.micro_adam import MicroAdam
from dp_microadam.training.gradients import set_gradients
from dp_microadam.training.masked_rows import freeze_other_rows
from dp_microadam.training.rate_units import ABSOLUTE, DIVIDE_BY_GRADIENT_SIZE, LR_UNITS, WALK, RunNoise, walk_factor
from dp_microadam.validation import require_one_of

GRADIENTS = "gradients"
ROW_NORMS = "row norms"
"""The query a phase runs on the training data: Σ of clipped gradients, or Σ of the norms of their rows."""


class Steps(Protocol):
    """The attributes of a plan, private or not, from which phases are derived."""

    @property
    def dataset_size(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def bands(self) -> int: ...

    @property
    def unit(self) -> str: ...

    @property
    def examples_per_user(self) -> int | None: ...

    @property
    def max_batch_size(self) -> int | None: ...


@dataclass(frozen=True)
class Phase:
    """Consecutive steps that run the same query on the gradients of the same parameters.

    ``trainable`` are the names of the parameters that train while all others are frozen; None leaves ``requires_grad`` as the
    model has it. ``rate`` multiplies the learning rate; at 0 the optimizer does not step and no weight changes.
    """

    name: str
    steps: int
    trainable: frozenset[str] | None = None
    rate: float = 1.0
    query: str = GRADIENTS

    @property
    def engine_key(self) -> tuple[frozenset[str] | None, str]:
        """Phases with the same key share one gradient engine."""
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
    """A training method: an optimizer and hooks around its steps. This base class is the optimizer alone.

    Subclasses override the hooks they need. They are called in this order: :meth:`phases`, :meth:`calibrate` and
    :meth:`refuse_data` once; :meth:`begin` when a phase begins, and again when a run is resumed within it; in each step
    :meth:`scale` and :meth:`row_masks` before clipping, then :meth:`apply`, which calls :meth:`receive`.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> nn.init.zeros_(model.weight).tolist()
    [[0.0, 0.0]]
    >>> Method(torch.optim.SGD(model.parameters(), lr=0.5)).apply(model, {"weight": torch.tensor([[2.0, -4.0]])})
    >>> model.weight.tolist()
    [[-1.0, 2.0]]

    Formal guarantees: a method sees the training data only through ``receive``, which is given privatized means. Whatever
    it computes from them, and returns as scale, masks or gradients, is post-processing and costs no privacy. Sampling,
    clipping, noise and accounting are the same in every phase, so one plan covers them all. Subclasses must respect this and
    not access the training data in any other way.
    """

    clipped = "the gradient of each example"
    """What is clipped, in the words of the privacy statement."""

    public: tuple[str, ...] = ()
    """What the method uses without protection, in words."""

    phase = Phase("training", 1)
    """The current phase."""

    noise_growth = 1.0
    """The noise of a single step relative to one band with the same ε; :meth:`correlate` sets it."""

    run_noise: RunNoise | None = None
    """The noise of the run, from :meth:`measure` on."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, lr_unit: str = ABSOLUTE) -> None:
        """With ``lr_unit="walk"`` the optimizer's learning rates are distances that the noise of the run may walk, relative to
        the fourth root of the number of parameters (``plan/learning_rate.py``); 1.5 is a good one. It is kept in the
        optimizer's parameter groups.
        """
        self.optimizer = optimizer
        if lr_unit != ABSOLUTE:
            self.set_lr_unit(lr_unit)

    @classmethod
    def of(cls, method_or_optimizer: Method | torch.optim.Optimizer) -> Method:
        """The method itself, or a torch optimizer wrapped as a method."""
        if isinstance(method_or_optimizer, Method):
            return method_or_optimizer
        if isinstance(method_or_optimizer, torch.optim.LBFGS):
            raise InputError(
                "optimizer is LBFGS, which evaluates the loss several times a step; it must be one that steps once"
            )
        if isinstance(method_or_optimizer, torch.optim.Optimizer):
            return Method(method_or_optimizer)
        raise InputError(
            f"optimizer is a {type(method_or_optimizer).__name__}; it must be a torch optimizer, or a method of "
            "dp_microadam.methods"
        )

    @property
    def learning_rate(self) -> float:
        """The current learning rate of the optimizer's first parameter group."""
        first = self.optimizer.param_groups[0]
        return float(first["lr"]) * self._rate_factor(first)

    def phases(self, plan: Steps) -> tuple[Phase, ...]:
        """The phases of a run; their steps add up to the plan's."""
        return (Phase("training", plan.steps),)

    def calibrate(self, noise_deviation: float) -> None:
        """Called once with the noise standard deviation σS/B of each coordinate of a mean; 0 without privacy."""

    def correlate(self, growth: float) -> None:
        """Called once with the noise of a single step relative to one band with the same ε: 1 for a plan without bands.

        Optimizers that divide by the size of single noisy gradients step less by that factor, although the noise of sums is
        smaller; their learning rate is multiplied by it, so that a rate chosen for one band serves any number. MicroAdam's
        by its square root: what it selects is the sum of about a hundred steps, where
        most of the noise has cancelled, and the size of a step does not depend on that of the sum.
        """
        self.noise_growth = growth

    def _rate_for_noise(self) -> float:
        """By which learning rates are multiplied in a run with correlated noise."""
        if isinstance(self.optimizer, MicroAdam):
            return math.sqrt(self.noise_growth)
        return self.noise_growth if isinstance(self.optimizer, DIVIDE_BY_GRADIENT_SIZE) else 1.0

    def set_lr_unit(self, unit: str) -> None:
        """Say what the optimizer's learning rates are: ``"absolute"``, or ``"walk"``."""
        require_one_of("lr_unit", unit, LR_UNITS)
        for group in self.optimizer.param_groups:
            group["lr_unit"] = unit

    def measure(self, noise: RunNoise) -> None:
        """Called once with the noise of the run, by which learning rates of unit ``"walk"`` are measured."""
        self.run_noise = noise
        for group in self.optimizer.param_groups:
            self._rate_factor(group)  # refuses what has no such unit before a step is spent

    def _rate_factor(self, group: Mapping[str, Any]) -> float:
        """By which the learning rate of a parameter group is multiplied in this phase."""
        if group.get("lr_unit", ABSOLUTE) != WALK:
            return self.phase.rate * self._rate_for_noise()
        if self.run_noise is None:
            raise InputError(
                "lr_unit is 'walk', but no run has begun by whose noise it is measured; take steps with PrivateStep"
            )
        trained = sum(p.numel() for part in self.optimizer.param_groups for p in part["params"] if p.requires_grad)
        return self.phase.rate * walk_factor(self.optimizer, self.run_noise, max(1, trained))

    def refuse_data(self, train: Any) -> None:
        """Raise an InputError if the method cannot be used with this training data. Must not read its examples."""

    def begin(self, phase: Phase) -> None:
        """Called when a phase begins or is resumed; a second call for the same phase must have no effect."""

    def scale(self) -> Mapping[str, Tensor]:
        """Factors by which gradients are multiplied before clipping, by parameter name; called once per step."""
        return {}

    def row_masks(self) -> Mapping[str, Tensor]:
        """Masks of the rows of weights that train, by parameter name; other rows get neither gradient nor noise."""
        return {}

    def receive(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Turn the privatized means of a step into gradients for the optimizer; both by parameter name."""
        return means

    def refuse_parameters(self, model: nn.Module, plan: Steps) -> None:
        """Check that the optimizer has all parameters that train, and no foreign ones.

        Raises:
            InputError: if the optimizer has parameters that are not the model's, or lacks some that would be trained.
        """
        owned = {id(parameter) for parameter in model.parameters()}
        held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for parameter in held:
            if id(parameter) not in owned:
                raise InputError(
                    f"optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's; make it from "
                    "model.parameters()"
                )
        known = {id(parameter) for parameter in held}
        trainable = [phase.trainable for phase in self.phases(plan) if phase.rate]
        for name, parameter in model.named_parameters():
            trains = any(parameter.requires_grad if names is None else name in names for names in trainable)
            if trains and id(parameter) not in known:
                raise InputError(
                    f"optimizer does not hold the parameter {name!r}, which requires gradients: it would take part in clipping "
                    "without being trained; freeze it with requires_grad_(False), or give it to the optimizer"
                )

    def enter(self, phase: Phase) -> None:
        """Make ``phase`` the current one."""
        self.phase = phase
        self.begin(phase)

    def apply(self, model: nn.Module, means: dict[str, Tensor]) -> None:
        """Take one optimizer step with the privatized means that :meth:`PrivateStep.take` returned."""
        self.set_gradients(model, means)
        with self.around_step(model):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def set_gradients(self, model: nn.Module, means: dict[str, Tensor]) -> None:
        """Set the gradient of each parameter; in a phase of rate 0 to None, so that the optimizer changes nothing."""
        gradients = self.receive(means)
        set_gradients(model, gradients if self.phase.rate else {})

    @contextmanager
    def around_step(self, model: nn.Module) -> Iterator[None]:
        """Within the block the optimizer has the learning rates of the phase, and rows that do not train are kept unchanged."""
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            factor = self._rate_factor(group)
            if factor != 1.0:  # a rate that is a tensor stays one
                group["lr"] = float(group["lr"]) * factor
        try:
            with freeze_other_rows(model, self.row_masks()):
                yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def hooked(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within the block every call of ``optimizer.step()``, from anywhere, runs inside :meth:`around_step`."""
        return _hooked(self, model)

    def state_dict(self) -> dict[str, Any]:
        """Everything besides the optimizer's state that :meth:`load_state_dict` needs; tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""


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
