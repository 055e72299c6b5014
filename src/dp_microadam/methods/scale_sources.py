"""The scales of scale-then-privatize: from the optimizer's own noisy estimate, a delayed estimate, or public examples.

Each source computes s = 1/(√v + ε_s) from a v that depends on training examples only through privatized gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dp_microadam.errors import InputError
from dp_microadam.optimizers.micro_adam import MicroAdam
from dp_microadam.training.evaluation import PerExample, batches
from dp_microadam.training.method import Phase, PlanLike
from dp_microadam.training.same_examples import share_examples

PLAIN, SCALED = "plain", "scaled"


class ScaleSource:
    """Interface of a source of scales; this base class never scales."""

    public: tuple[str, ...] = ()

    def phases(self, plan: PlanLike) -> tuple[Phase, ...]:
        return (Phase("training", plan.steps),)

    def refuse_data(self, train: Any) -> None:
        """Raise an InputError if the source cannot be used with this training data."""

    def begin(self, phase: Phase) -> None:
        """Called when a phase begins or is resumed."""

    def scale(self) -> dict[str, Tensor]:
        """The scale s of the next step, by parameter name; parameters without an entry are not scaled. Called once per step."""
        return {}

    def observe(self, gradients: Mapping[str, Tensor]) -> None:
        """Called with the privatized gradients of a step, unscaled."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class PreviousEstimate(ScaleSource):
    """Uses v̂ of the base optimizer's previous step; s is one at the first step. Has no state of its own."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, eps: float) -> None:
        self._model = model
        self._optimizer = optimizer
        self._eps = eps

    def scale(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self._model.named_parameters():
            moment = second_moment(self._optimizer, parameter) if parameter.requires_grad else None
            if moment is not None:
                found[name] = moment.sqrt().add_(self._eps).reciprocal_()
        return found


class DelayedEstimate(ScaleSource):
    """DP² (Li et al., 2023): alternates ``interval`` plain steps with ``interval`` steps scaled by an estimate from those.

    At the end of each plain stretch v ← γv + (1−γ)(mean of its privatized gradients)². Averaging before squaring removes most
    of the noise from v. ``norm_ratio`` is the clipping norm of scaled steps divided by that of plain steps: clip(x, rC) is
    r·clip(x/r, C), so the sensitivity stays C.
    """

    def __init__(self, eps: float, interval: int, decay: float, norm_ratio: float, rate_ratio: float) -> None:
        self._eps = eps
        self._interval = interval
        self._decay = decay
        self._norm_ratio = norm_ratio
        self._rate_ratio = rate_ratio
        self._phase = PLAIN
        self._count = 0
        self._sums: dict[str, Tensor] = {}
        self._moments: dict[str, Tensor] = {}

    def phases(self, plan: PlanLike) -> tuple[Phase, ...]:
        found = []
        for number, start in enumerate(range(0, plan.steps, self._interval)):
            steps = min(self._interval, plan.steps - start)
            found.append(Phase(SCALED, steps, rate=self._rate_ratio) if number % 2 else Phase(PLAIN, steps))
        return tuple(found)

    def begin(self, phase: Phase) -> None:
        self._phase = phase.name

    def scale(self) -> dict[str, Tensor]:
        if self._phase == PLAIN:
            return {}
        return {
            name: moment.sqrt().add_(self._eps).mul_(self._norm_ratio).reciprocal_() for name, moment in self._moments.items()
        }

    def observe(self, gradients: Mapping[str, Tensor]) -> None:
        if self._phase != PLAIN:
            return
        for name, gradient in gradients.items():
            self._sums[name] = self._sums[name] + gradient if name in self._sums else gradient.clone()
        self._count += 1
        if self._count == self._interval:
            for name, total in self._sums.items():
                self._moments[name] = _averaged(self._moments.get(name), total / self._count, self._decay)
            self._sums, self._count = {}, 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count, "sums": dict(self._sums), "moments": dict(self._moments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count = int(state["count"])
        self._sums, self._moments = _cloned(state["sums"]), _cloned(state["moments"])


@dataclass(frozen=True)
class PublicExamples:
    """Public examples: not covered by the guarantee, and never part of the training data.

    ``data`` is a map-style Dataset, or tensors with examples along the first dimension; ``prepare`` is applied to each batch
    before the model.
    """

    data: Any
    per_example_loss: PerExample
    prepare: Callable[[Any], Any] | None = None
    batch_size: int = 256


class PublicEstimate(ScaleSource):
    """AdaDPS (Li et al., 2022): v ← γv + (1−γ)ĝ², where ĝ is the gradient of public examples at the current weights.

    Public examples are used in order, one batch per step, at the cost of one more forward and backward pass per step.
    """

    public = ("the public examples that gradients are scaled by",)

    def __init__(self, model: nn.Module, examples: PublicExamples, eps: float, decay: float) -> None:
        self._model = model
        self._examples = examples
        self._eps = eps
        self._decay = decay
        self._batches = list(batches(examples.data, examples.batch_size))
        self._taken = 0
        self._moments: dict[str, Tensor] = {}

    def refuse_data(self, train: Any) -> None:
        refuse_overlap(self._examples.data, train)

    def scale(self) -> dict[str, Tensor]:
        for name, gradient in self._gradient().items():
            self._moments[name] = _averaged(self._moments.get(name), gradient, self._decay)
        self._taken += 1
        return {name: moment.sqrt().add_(self._eps).reciprocal_() for name, moment in self._moments.items()}

    def _gradient(self) -> dict[str, Tensor]:
        parameters = {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        device = next(iter(parameters.values())).device
        batch = self._batches[self._taken % len(self._batches)]
        batch = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
        batch = self._examples.prepare(batch) if self._examples.prepare else batch
        with torch.enable_grad():
            loss = self._examples.per_example_loss(self._model, batch).mean()
            found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return {
            name: torch.zeros_like(parameter) if gradient is None else gradient.detach()
            for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken, "moments": dict(self._moments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._taken = int(state["taken"])
        self._moments = _cloned(state["moments"])


def second_moment(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    """The bias-corrected v̂ of Adam's or MicroAdam's last step; None before the first."""
    if isinstance(optimizer, MicroAdam):
        return optimizer.second_moment(parameter)
    state = optimizer.state.get(parameter)
    if not state:
        return None
    beta_2 = optimizer.param_groups[0]["betas"][1]
    return state["exp_avg_sq"] / (1 - beta_2 ** float(state["step"]))


def refuse_overlap(public: Any, train: Any) -> None:
    """Raise an InputError if public and training data share memory, or indices of the same Dataset."""
    if share_examples(public, train):
        raise InputError("public contains examples of the training data; public examples must be held out of training")


def refuse_shared_indices(public: Any, training: Any) -> None:
    """Raise an InputError if an index is both a public and a training example."""
    shared = sorted(set(map(int, public)) & set(map(int, training)))
    if shared:
        raise InputError(
            f"public contains example {shared[0]} of the training data; public examples must be held out of training"
        )


def _averaged(moment: Tensor | None, gradient: Tensor, decay: float) -> Tensor:
    return gradient.square() * (1 - decay) + (0 if moment is None else decay * moment)


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
