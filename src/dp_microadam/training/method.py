"""A training method: an optimizer with its learning rate, phases, scaling before clipping, rows that train, and an average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from dp_microadam.errors import InputError
from dp_microadam.plan.plan import PrivacyPlan, UnprotectedPlan
from dp_microadam.training.rates import LearningRates, RunNoise, Schedule
from dp_microadam.validation import require_in_closed_open, require_in_open

GRADIENTS = "gradients"
ROW_NORMS = "row norms"
"""The query a phase runs on the training data: Σ of clipped gradients, or Σ of the norms of their rows."""


PlanLike = PrivacyPlan | UnprotectedPlan


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
    """A training method: what turns privatized gradients into new weights. This base class is an optimizer alone.

    Arguments:
        optimizer: any torch optimizer that steps once per gradient.
        distance: how far the noise of the run walks the weights, relative to the fourth root of their number, in place of a
            learning rate; 1.5 is a good one for networks from scratch (``plan/learning_rate.py``). Parameter groups may have a
            ``"distance"`` of their own.
        schedule: a :class:`~dp_microadam.Schedule`, or a torch scheduler of the optimizer, which multiplies the rate.
        average: the decay of an exponential moving average of the weights, 0.99 for example; 0 keeps none.

    Subclasses override the hooks they need. They are called in this order: :meth:`phases`, :meth:`prepare` and
    :meth:`refuse_data` once; :meth:`begin` when a phase begins, and again when a run is resumed within it; in each step
    :meth:`scale` and :meth:`row_masks` before clipping, then :meth:`update`, which calls :meth:`receive`.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> nn.init.zeros_(model.weight).tolist()
    [[0.0, 0.0]]
    >>> Method(torch.optim.SGD(model.parameters(), lr=0.5)).update(model, {"weight": torch.tensor([[2.0, -4.0]])})
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

    noise: RunNoise | None = None
    """The noise of the run, from :meth:`prepare` on."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        distance: float | None = None,
        schedule: Schedule | LRScheduler | None = None,
        average: float = 0.0,
    ) -> None:
        self.optimizer = optimizer
        self.average: WeightAverage | None = None
        """The average of the weights, from the first update on; None without one."""
        self.updates = 0
        """The number of updates that the weights have had."""
        self._decay = 0.0
        self._rates = LearningRates(optimizer)
        self.configure(distance=distance, schedule=schedule, average=average)

    @classmethod
    def of(cls, given: Any) -> Method:
        """The method itself, or a torch optimizer as a method."""
        if isinstance(given, Method):
            return given
        if isinstance(given, torch.optim.LBFGS):
            raise InputError(
                "optimizer is LBFGS, which evaluates the loss several times a step; it must be one that steps once"
            )
        if hasattr(given, "original_optimizer"):
            raise InputError(
                f"optimizer is Opacus' {type(given).__name__}, which clips and adds noise itself; pass the optimizer in it, "
                "optimizer.original_optimizer"
            )
        if isinstance(given, torch.optim.Optimizer):
            return Method(given)
        raise InputError(
            f"method is a {type(given).__name__}; it must be a method of dp_microadam.methods, as methods.default(model, plan) "
            "gives, or a torch optimizer"
        )

    def configure(
        self,
        *,
        distance: float | None = None,
        schedule: Schedule | LRScheduler | None = None,
        average: float | None = None,
    ) -> Method:
        """Set distance, schedule or average, where they are given, before a run begins; returns the method."""
        self._rates.configure(distance, schedule)
        if average is not None:
            self._decay = require_in_closed_open("average", average, 0.0, 1.0)
        return self

    @property
    def averages(self) -> bool:
        """Whether an average of the weights is kept."""
        return self._decay > 0

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last update, or of the first, for the optimizer's first parameter group."""
        return self._rates.of(self.optimizer.param_groups[0], max(0, self.updates - 1)) * self.phase.rate

    def refuse_idle_scheduler(self) -> None:
        """Raise an InputError for a torch scheduler of the optimizer that nobody would step."""
        self._rates.refuse_idle_scheduler()

    def phases(self, plan: PlanLike) -> tuple[Phase, ...]:
        """The phases of a run; their steps add up to the plan's."""
        return (Phase("training", plan.steps),)

    def prepare(self, noise: RunNoise, steps: int) -> None:
        """Called once before the first step, with the noise of the run and its number of steps."""
        self.noise = noise
        self._rates.prepare(noise, steps)

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

    def extra_state(self) -> dict[str, Any]:
        """What a subclass keeps between steps; tensors and plain values."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`extra_state` returned."""

    def enter(self, phase: Phase) -> None:
        """Make ``phase`` the current one."""
        self.phase = phase
        self.begin(phase)

    def update(self, model: nn.Module, means: dict[str, Tensor]) -> None:
        """Update the weights with the privatized means of a step, and their average."""
        self.set_gradients(model, means)
        with self.around_step(model):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def set_gradients(self, model: nn.Module, means: dict[str, Tensor]) -> None:
        """Set the gradient of each parameter; in a phase of rate 0 to None, so that the optimizer changes nothing."""
        gradients = self.receive(means)
        if not self.phase.rate:
            gradients = {}
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].to(parameter.dtype) if name in gradients else None

    @contextmanager
    def around_step(self, model: nn.Module) -> Iterator[None]:
        """Around a call of ``optimizer.step()``: rates of this step, rows that do not train unchanged, then the average."""
        if self.averages and self.average is None:
            held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
            weights = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in held}
            self.average = WeightAverage(weights, self._decay)
        with self._rates.in_force(self.updates, self.phase.rate), freeze_other_rows(model, self.row_masks()):
            yield
        self.updates += 1
        if self.average is not None:
            self.average.update(model, self.updates)

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Within the block every call of ``optimizer.step()``, from anywhere, runs inside :meth:`around_step`."""
        step = ExitStack()

        def before(*_: Any) -> None:
            step.enter_context(self.around_step(model))

        def after(*_: Any) -> None:
            step.close()

        hooks = [self.optimizer.register_step_pre_hook(before), self.optimizer.register_step_post_hook(after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def averaged(self, model: nn.Module) -> Iterator[None]:
        """Within the block ``model`` has its averaged weights, if there is an average."""
        with nullcontext() if self.average is None else self.average.in_place_of(model):
            yield

    @contextmanager
    def last_weights(self, model: nn.Module) -> Iterator[None]:
        """Within the block the model of a finished run has the weights of its last step in place of their average."""
        with nullcontext() if self.average is None else self.average.taken_from(model):
            yield

    def finish(self, model: nn.Module) -> None:
        """Give ``model`` its averaged weights for good, if there is an average; :meth:`last_weights` has the others."""
        if self.average is not None:
            self.average.give(model)

    def refuse_parameters(self, model: nn.Module, plan: PlanLike) -> None:
        """Raise InputError if the optimizer has parameters that are not the model's, or lacks some that would be trained."""
        owned = set(map(id, model.parameters()))
        held = {id(parameter): parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        for number, parameter in held.items():
            if number not in owned:
                raise InputError(
                    f"optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's; make it from "
                    "model.parameters()"
                )
        trainable = [phase.trainable for phase in self.phases(plan) if phase.rate]
        for name, parameter in model.named_parameters():
            trains = any(parameter.requires_grad if names is None else name in names for names in trainable)
            if trains and id(parameter) not in held:
                raise InputError(
                    f"optimizer does not hold the parameter {name!r}, which requires gradients: it would take part in clipping "
                    "without being trained; freeze it with requires_grad_(False), or give it to the optimizer"
                )

    def state_dict(self, *, optimizer: bool = True) -> dict[str, Any]:
        """What changes in an update besides the weights; without the optimizer's part if something else saves it."""
        return {
            **({"optimizer": self.optimizer.state_dict()} if optimizer else {}),
            "updates": self.updates,
            "schedule": self._rates.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "extra": self.extra_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        self._rates.load_state_dict(state["schedule"])
        self.updates = int(state["updates"])
        device = next(parameter.device for group in self.optimizer.param_groups for parameter in group["params"])
        move = partial(tree_map, lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)
        kept = state["average"]
        self.average = WeightAverage(move(kept), self._decay) if kept is not None and self.averages else None
        self.load_extra_state(move(state["extra"]))


class WeightAverage:
    """Exponential moving average of weights: θ̄ ← d·θ̄ + (1 − d)·θ, d = min(decay, (1 + t)/(10 + t)), as in the paper.

    The smaller early decay forgets the initial weights. The average is computed from privatized weights, so it costs no
    privacy. It is kept in float32 or wider, for the parameters in ``weights`` alone: frozen ones are their own average.
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self.decay = require_in_open("average", decay, 0.0, 1.0)
        self._shadow = {
            name: value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
            for name, value in weights.items()
        }
        self._last: dict[str, Tensor] = {}
        """The weights of the last step, once the model has the average for good."""

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Update the average with the weights after optimizer step number ``step``, counted from 1."""
        self._last = {}
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, average in self._shadow.items():
            average.lerp_(model.get_parameter(name).to(average.dtype), 1 - decay)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Within the block ``model`` has the averaged weights; its own are restored afterwards, even after an error."""
        own = {name: model.get_parameter(name).detach().clone() for name in self._shadow}
        with _exchanged(model, self._shadow, own):
            yield

    def give(self, model: nn.Module) -> None:
        """Leave the averaged weights in ``model``."""
        if not self._last:
            self._last = {name: model.get_parameter(name).detach().clone() for name in self._shadow}
            _copy(self._shadow, model)

    @contextmanager
    def taken_from(self, model: nn.Module) -> Iterator[None]:
        """Within the block ``model`` has the weights of its last step, if :meth:`give` gave it the averaged ones."""
        own = {name: model.get_parameter(name).detach().clone() for name in self._last}
        with _exchanged(model, self._last, own):
            yield

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._shadow)


@contextmanager
def _exchanged(model: nn.Module, inside: Mapping[str, Tensor], afterwards: Mapping[str, Tensor]) -> Iterator[None]:
    try:
        _copy(inside, model)
        yield
    finally:
        _copy(afterwards, model)


@torch.no_grad()
def _copy(weights: Mapping[str, Tensor], model: nn.Module) -> None:
    for name, value in weights.items():
        model.get_parameter(name).copy_(value)


@contextmanager
def freeze_other_rows(model: nn.Module, masks: Mapping[str, Tensor]) -> Iterator[None]:
    """Restore the rows that do not train after the block, whatever the optimizer did to them.

    A gradient of zero is not enough: weight decay, momentum and a quantized residual change weights too.
    """
    before = {name: model.get_parameter(name).detach()[~mask] for name, mask in masks.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, mask in masks.items():
                model.get_parameter(name)[~mask] = before[name]
