"""Scale-then-privatize: per-example gradients are scaled before clipping and noise, and scaled back afterwards.

Li et al., "Private Adaptive Optimization with Side Information" (AdaDPS, 2022) and "Differentially Private Adaptive
Optimization with Delayed Preconditioners" (DP², 2023); §2.2 of "DP-MicroAdam" writes it with the previous step's v̂.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dp_microadam.errors import InputError
from dp_microadam.methods.registry import make_optimizer, trainable
from dp_microadam.optimizers.micro_adam import MicroAdam
from dp_microadam.training.evaluation import PerExample, batches
from dp_microadam.training.method import Method, Phase, PlanLike
from dp_microadam.training.same_examples import share_examples
from dp_microadam.validation import require_in_closed_open, require_integer, require_one_of, require_positive

PLAIN, SCALED = "plain", "scaled"


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


def scale_then_privatize(
    model: nn.Module,
    *,
    lr: float | None = None,
    source: str = "previous",
    base_optimizer: str | None = None,
    scale_eps: float = 1e-2,
    interval: int | None = None,
    decay: float | None = None,
    norm_ratio: float | None = None,
    rate_ratio: float | None = None,
    public: PublicExamples | None = None,
    **options: Any,
) -> Method:
    """Scale-then-privatize: an optimizer on g̃ = (Σᵢ clip(s⊙gᵢ, C) + noise)/B/s with s = 1/(√v + ε_s).

    Arguments:
        lr: learning rate of the base optimizer; 1e-3 by default, and 4.0 for ``"sgd"``, as for DP-SGD.
        source: where v comes from. ``"previous"``: v̂ of the base optimizer's previous step, as in the paper. ``"delayed"``:
            DP², which alternates ``interval`` plain and ``interval`` scaled steps. ``"public"``: AdaDPS, from ``public``
            examples.
        base_optimizer: ``"adam"`` and ``"microadam"`` use g̃, which is scaled back. ``"sgd"`` uses the scaled,
            privatized gradient itself, as the authors of DP² and AdaDPS do: scaling back would undo the preconditioning. By
            default ``"adam"`` with ``"previous"``, else ``"sgd"``.
        scale_eps: ε_s; a scale is at most 1/ε_s.
        interval: steps per stretch, 100 by default; with ``"delayed"``.
        decay: the decay γ of v, 0.9 by default; with ``"delayed"`` and ``"public"``.
        norm_ratio: clipping norm of scaled steps divided by that of plain steps, 1 by default; with ``"delayed"``.
        rate_ratio: learning rate of scaled steps divided by that of plain steps, 1 by default; with ``"delayed"``.
        public: the examples from which the scale is computed; with ``"public"``.

    Other options are passed to the base optimizer.

    Raises:
        InputError: for a value out of range, or options that cannot be combined.
    """
    require_one_of("source", source, tuple(_SOURCES))
    kind, its_options = _SOURCES[source]
    base_optimizer = ("adam" if source == "previous" else "sgd") if base_optimizer is None else base_optimizer
    require_one_of("base_optimizer", base_optimizer, ("adam", "microadam", "sgd"))
    if source == "previous" and base_optimizer == "sgd":
        raise InputError(
            "base_optimizer is 'sgd', which estimates no second moment for source 'previous'; it must be 'adam' or 'microadam'"
        )
    own = {"interval": interval, "decay": decay, "norm_ratio": norm_ratio, "rate_ratio": rate_ratio, "public": public}
    given = {name: value for name, value in own.items() if value is not None}
    for name, value in given.items():
        if name not in its_options:
            told = "given" if name == "public" else value
            raise InputError(f"{name} is {told}, but source {source!r} does not use it; leave it out")
    if source == "public" and public is None:
        raise InputError("source is 'public', but no public examples are given; pass public=PublicExamples(...)")
    rate = (4.0 if base_optimizer == "sgd" else 1e-3) if lr is None else lr
    optimizer = make_optimizer(base_optimizer, trainable(model), rate, options)
    return kind(model, optimizer, require_positive("scale_eps", scale_eps), unscale=base_optimizer != "sgd", **given)


class ScaleThenPrivatize(Method):
    """Scales gradients by s = 1/(√v + ε_s) before clipping, and divides privatized means by it if ``unscale``.

    Subclasses say where v comes from.

    Formal guarantees: v is a function of earlier privatized steps and of public examples, never of the step's own examples, so
    s may be treated as fixed. What is summed is clip(s⊙gᵢ, C): one example changes it by at most C, in the scaled space,
    where the noise is added. Dividing by s afterwards is post-processing.
    """

    clipped = "the gradient of each example, scaled by numbers that earlier noisy steps or public examples gave"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, eps: float, *, unscale: bool) -> None:
        super().__init__(optimizer)
        self._model = model
        self._eps = eps
        self._unscale = unscale
        self._norm_ratio = 1.0
        self._scale: dict[str, Tensor] = {}
        self._moments: dict[str, Tensor] = {}

    def moments(self) -> Mapping[str, Tensor]:
        """v for the next step, by parameter name; parameters without an entry are not scaled. Called once per step."""
        raise NotImplementedError

    def observe(self, gradients: Mapping[str, Tensor]) -> None:
        """Called with the privatized gradients of a step, unscaled."""

    def scale(self) -> Mapping[str, Tensor]:
        # The norm's ratio is part of the scale, so that the sensitivity stays C: clip(x, rC) is r·clip(x/r, C).
        self._scale = {
            name: moment.sqrt().add_(self._eps).mul_(self._norm_ratio).reciprocal_() for name, moment in self.moments().items()
        }
        return self._scale

    def receive(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        scale, self._scale = self._scale, {}
        own = {name: mean / scale[name] if name in scale else mean for name, mean in means.items()}
        self.observe(own)
        if self._unscale:
            return own
        return {name: mean * self._norm_ratio if name in scale else mean for name, mean in means.items()}

    def extra_state(self) -> dict[str, Any]:
        return {"moments": dict(self._moments)}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._moments = _cloned(state["moments"])


class PreviousEstimate(ScaleThenPrivatize):
    """Uses v̂ of the base optimizer's previous step; s is one at the first step. Has no state of its own."""

    def moments(self) -> Mapping[str, Tensor]:
        found = {
            name: second_moment(self.optimizer, parameter)
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }
        return {name: moment for name, moment in found.items() if moment is not None}


class DelayedEstimate(ScaleThenPrivatize):
    """DP² (Li et al., 2023): alternates ``interval`` plain steps with ``interval`` steps scaled by an estimate from those.

    At the end of each plain stretch v ← γv + (1−γ)(mean of its privatized gradients)². Averaging before squaring removes most
    of the noise from v. ``norm_ratio`` is the clipping norm of scaled steps divided by that of plain steps.
    """

    def __init__(
        self,
        *arguments: Any,
        interval: int = 100,
        decay: float = 0.9,
        norm_ratio: float = 1.0,
        rate_ratio: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._interval = require_integer("interval", interval, 1)
        self._gamma = require_in_closed_open("decay", decay, 0.0, 1.0)
        self._norm_ratio = require_positive("norm_ratio", norm_ratio)
        self._rate_ratio = require_positive("rate_ratio", rate_ratio)
        self._count = 0
        self._sums: dict[str, Tensor] = {}

    def phases(self, plan: PlanLike) -> tuple[Phase, ...]:
        found = []
        for number, start in enumerate(range(0, plan.steps, self._interval)):
            steps = min(self._interval, plan.steps - start)
            found.append(Phase(SCALED, steps, rate=self._rate_ratio) if number % 2 else Phase(PLAIN, steps))
        return tuple(found)

    def moments(self) -> Mapping[str, Tensor]:
        return self._moments if self.phase.name == SCALED else {}

    def observe(self, gradients: Mapping[str, Tensor]) -> None:
        if self.phase.name != PLAIN:
            return
        for name, gradient in gradients.items():
            self._sums[name] = self._sums[name] + gradient if name in self._sums else gradient.clone()
        self._count += 1
        if self._count == self._interval:
            means = {name: total / self._count for name, total in self._sums.items()}
            self._moments = _averaged(self._moments, means, self._gamma)
            self._sums, self._count = {}, 0

    def extra_state(self) -> dict[str, Any]:
        return {**super().extra_state(), "count": self._count, "sums": dict(self._sums)}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        super().load_extra_state(state)
        self._count, self._sums = int(state["count"]), _cloned(state["sums"])


class PublicEstimate(ScaleThenPrivatize):
    """AdaDPS (Li et al., 2022): v ← γv + (1−γ)ĝ², where ĝ is the gradient of public examples at the current weights.

    Public examples are used in order, one batch per step, at the cost of one more forward and backward pass per step.
    """

    public = ("the public examples that gradients are scaled by",)

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        eps: float,
        *,
        public: PublicExamples,
        decay: float = 0.9,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, eps, **options)
        self._gamma = require_in_closed_open("decay", decay, 0.0, 1.0)
        self._examples = public
        self._batches = list(batches(public.data, public.batch_size))
        self._taken = 0

    def refuse_data(self, train: Any) -> None:
        if share_examples(self._examples.data, train):
            raise InputError("public contains examples of the training data; public examples must be held out of training")

    def moments(self) -> Mapping[str, Tensor]:
        parameters = {name: parameter for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        device = next(iter(parameters.values())).device
        batch = self._batches[self._taken % len(self._batches)]
        batch = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
        batch = self._examples.prepare(batch) if self._examples.prepare else batch
        with torch.enable_grad():
            loss = self._examples.per_example_loss(self._model, batch).mean()
            found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
        self._moments = _averaged(self._moments, dict(zip(parameters, found, strict=True)), self._gamma)
        self._taken += 1
        return self._moments

    def extra_state(self) -> dict[str, Any]:
        return {**super().extra_state(), "taken": self._taken}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        super().load_extra_state(state)
        self._taken = int(state["taken"])


_SOURCES: dict[str, tuple[type[ScaleThenPrivatize], tuple[str, ...]]] = {
    "previous": (PreviousEstimate, ()),
    "delayed": (DelayedEstimate, ("interval", "decay", "norm_ratio", "rate_ratio")),
    "public": (PublicEstimate, ("decay", "public")),
}
"""Where v comes from, and the options of each."""


def second_moment(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    """The bias-corrected v̂ of Adam's or MicroAdam's last step; None before the first."""
    if isinstance(optimizer, MicroAdam):
        return optimizer.second_moment(parameter)
    state = optimizer.state.get(parameter)
    if not state:
        return None
    beta_2 = optimizer.param_groups[0]["betas"][1]
    return state["exp_avg_sq"] / (1 - beta_2 ** float(state["step"]))


def _averaged(moments: Mapping[str, Tensor], gradients: Mapping[str, Tensor], decay: float) -> dict[str, Tensor]:
    """γv + (1−γ)g² by name, from v = 0."""
    return {name: one.square() * (1 - decay) + decay * moments.get(name, torch.zeros(())) for name, one in gradients.items()}


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
