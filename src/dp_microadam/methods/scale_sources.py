"""Where scale-then-privatize takes its scale from: the optimizer's own noisy estimate, a delayed one, or public examples.

Each gives s = 1/(√v + ε_s) with a v that no training example has touched but through privatized gradients.
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
from dp_microadam.training.held_out import share_examples
from dp_microadam.training.method import Phase, Steps

PLAIN, SCALED = "plain", "scaled"


class ScaleSource:
    """What a source answers; this one never scales."""

    public: tuple[str, ...] = ()

    def phases(self, plan: Steps) -> tuple[Phase, ...]:
        return (Phase("training", plan.steps),)

    def refuse_data(self, train: Any) -> None:
        """Raise an InputError for training data that the source must not be used with."""

    def begin(self, phase: Phase) -> None:
        """A phase begins or is taken up again."""

    def scale(self) -> dict[str, Tensor]:
        """s by parameter name, for the step ahead; called once per step. Nothing means one."""
        return {}

    def observe(self, gradients: Mapping[str, Tensor]) -> None:
        """See the privatized gradients of a step, unscaled."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class PreviousEstimate(ScaleSource):
    """v is v̂ of the optimizer behind, as of the step before; s is one at the first step. No state of its own."""

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
    """DP² (Li et al., 2023): ``interval`` plain steps, then as many scaled by what those showed, and again.

    At the end of each plain stretch v ← γv + (1−γ)(mean of its privatized gradients)². Averaging before squaring takes most of
    the noise out of v. ``norm_ratio`` is the clipping norm of scaled steps over that of plain ones: clip(x, rC) is
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

    def phases(self, plan: Steps) -> tuple[Phase, ...]:
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
    """Examples everybody may know, which no guarantee covers; never part of the training data.

    ``data`` are tensors with examples along the first dimension, or a map-style Dataset; ``prepare`` is what happens to a batch
    before the model sees it.
    """

    data: Any
    per_example_loss: PerExample
    prepare: Callable[[Any], Any] | None = None
    batch_size: int = 256


class PublicEstimate(ScaleSource):
    """AdaDPS (Li et al., 2022): v ← γv + (1−γ)ĝ², ĝ the gradient of public examples at the step's own weights.

    Public examples are taken in order, a batch per step: one more forward and backward pass each.
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
    """v̂ of Adam's or MicroAdam's last step, bias-corrected; None before it."""
    if isinstance(optimizer, MicroAdam):
        return optimizer.second_moment(parameter)
    state = optimizer.state.get(parameter)
    if not state:
        return None
    beta_2 = optimizer.param_groups[0]["betas"][1]
    return state["exp_avg_sq"] / (1 - beta_2 ** float(state["step"]))


def refuse_overlap(public: Any, train: Any) -> None:
    """Refuse public data that shares memory, or positions of the same Dataset, with the training data."""
    if share_examples(public, train):
        raise InputError("public holds examples of the training data; public examples must be held out of training")


def refuse_shared_indices(public: Any, training: Any) -> None:
    """Refuse positions that are both public and training examples."""
    shared = sorted(set(map(int, public)) & set(map(int, training)))
    if shared:
        raise InputError(f"public holds example {shared[0]} of the training data; public examples must be held out of training")


def _averaged(moment: Tensor | None, gradient: Tensor, decay: float) -> Tensor:
    return gradient.square() * (1 - decay) + (0 if moment is None else decay * moment)


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
