"""Scale-then-privatize: per-example gradients are scaled before clipping and noise, and scaled back afterwards.

Li et al., "Private Adaptive Optimization with Side Information" (AdaDPS, 2022) and "Differentially Private Adaptive
Optimization with Delayed Preconditioners" (DP², 2023); §2.2 of "DP-MicroAdam" writes it with the previous step's v̂.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.methods.scale_sources import (
    DelayedEstimate,
    PreviousEstimate,
    PublicEstimate,
    PublicExamples,
    ScaleSource,
)
from dp_microadam.methods.step_optimizers import make_optimizer, trainable
from dp_microadam.training.method import Method, Phase, PlanLike
from dp_microadam.validation import require_in_closed_open, require_integer, require_one_of, require_positive

SOURCES = ("previous", "delayed", "public")

_OPTIONS_OF_SOURCES = {
    "previous": (),
    "delayed": ("interval", "decay", "norm_ratio", "rate_ratio"),
    "public": ("decay",),
}


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
    require_one_of("source", source, SOURCES)
    base_optimizer = ("adam" if source == "previous" else "sgd") if base_optimizer is None else base_optimizer
    require_one_of("base_optimizer", base_optimizer, ("adam", "microadam", "sgd"))
    if source == "previous" and base_optimizer == "sgd":
        raise InputError(
            "base_optimizer is 'sgd', which estimates no second moment for source 'previous'; it must be 'adam' or 'microadam'"
        )
    if (source == "public") != (public is not None):
        raise InputError(
            "source is 'public', but no public examples are given; pass public=PublicExamples(...)"
            if public is None
            else f"public examples are given, but source is {source!r}; it must be 'public'"
        )
    require_positive("scale_eps", scale_eps)
    own = {"interval": interval, "decay": decay, "norm_ratio": norm_ratio, "rate_ratio": rate_ratio}
    for name, value in own.items():
        if value is not None and name not in _OPTIONS_OF_SOURCES[source]:
            raise InputError(f"{name} is {value}, but source {source!r} does not use it; leave it out")
    interval = 100 if interval is None else interval
    decay = 0.9 if decay is None else decay
    norm_ratio = 1.0 if norm_ratio is None else norm_ratio
    rate_ratio = 1.0 if rate_ratio is None else rate_ratio
    optimizer = make_optimizer(
        base_optimizer, trainable(model), (4.0 if base_optimizer == "sgd" else 1e-3) if lr is None else lr, options
    )
    found: ScaleSource
    if source == "previous":
        found = PreviousEstimate(model, optimizer, scale_eps)
    elif source == "delayed":
        found = DelayedEstimate(
            scale_eps,
            require_integer("interval", interval, 1),
            require_in_closed_open("decay", decay, 0.0, 1.0),
            require_positive("norm_ratio", norm_ratio),
            require_positive("rate_ratio", rate_ratio),
        )
    else:
        assert public is not None
        found = PublicEstimate(model, public, scale_eps, require_in_closed_open("decay", decay, 0.0, 1.0))
    return ScaleThenPrivatize(optimizer, found, unscale=base_optimizer != "sgd", norm_ratio=norm_ratio)


class ScaleThenPrivatize(Method):
    """Scales gradients before clipping by the scale of a source, and divides the privatized means by it.

    Formal guarantees: s is a function of earlier privatized steps and of public examples, never of the step's own examples, so
    it may be treated as fixed. What is summed is clip(s⊙gᵢ, C): one example changes it by at most C, in the scaled space,
    where the noise is added. Dividing by s afterwards is post-processing.
    """

    clipped = "the gradient of each example, scaled by numbers that earlier noisy steps or public examples gave"

    def __init__(
        self, optimizer: torch.optim.Optimizer, source: ScaleSource, *, unscale: bool, norm_ratio: float = 1.0
    ) -> None:
        super().__init__(optimizer)
        self._source = source
        self._unscale = unscale
        self._norm_ratio = norm_ratio
        self._scale: dict[str, Tensor] = {}
        self.public = source.public

    def phases(self, plan: PlanLike) -> tuple[Phase, ...]:
        return self._source.phases(plan)

    def refuse_data(self, train: Any) -> None:
        self._source.refuse_data(train)

    def begin(self, phase: Phase) -> None:
        self._source.begin(phase)

    def scale(self) -> Mapping[str, Tensor]:
        self._scale = self._source.scale()
        return self._scale

    def receive(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        scale, self._scale = self._scale, {}
        own = {name: mean / scale[name] if name in scale else mean for name, mean in means.items()}
        self._source.observe(own)
        if self._unscale:
            return own
        # The norm's ratio is part of the scale, so that the sensitivity stays C; it is no part of the preconditioner.
        return {name: mean * self._norm_ratio if name in scale else mean for name, mean in means.items()}

    def extra_state(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state)
