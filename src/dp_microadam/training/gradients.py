"""Sums of gradients over a batch: the interface of gradient engines, and the engine without privacy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.training.evaluation import PerExample


class GradientSums(Protocol):
    """Interface of a gradient engine, as ``ClippedGradients`` and its unprotected counterpart implement it."""

    scale: Any
    row_masks: Any

    @property
    def sums(self) -> dict[str, Tensor]: ...

    def accumulate(self, batch: Any, weights: Tensor | None = None) -> Tensor: ...

    def check_independence(self, batch: Any, *, rows_per_unit: Sequence[int] = ()) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


class UnclippedGradients:
    """The sum of ordinary gradients, computed by autograd, for runs without privacy.

    ``scale`` and ``row_masks`` are those of :class:`~dp_microadam.clipping.engine.ClippedGradients`.
    """

    def __init__(self, model: nn.Module, per_example_loss: PerExample) -> None:
        self._model = model
        self._loss = per_example_loss
        self._trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._trainable:
            raise InputError("model has no trainable parameter; call requires_grad_(True) on those to be trained")
        self._sums: dict[str, Tensor] = {}
        self.scale: Mapping[str, Tensor] | None = None
        self.row_masks: Mapping[str, Tensor] | None = None
        self.reset()

    @property
    def sums(self) -> dict[str, Tensor]:
        return self._sums

    def accumulate(self, batch: Any, weights: Tensor | None = None) -> Tensor:
        with torch.enable_grad():
            losses = self._loss(self._model, batch)
            if weights is not None:
                losses = (losses.view_as(weights) * weights.to(losses)).sum(1)
            gradients = torch.autograd.grad(losses.sum(), list(self._trainable.values()), allow_unused=True)
        for (name, total), gradient in zip(self._sums.items(), gradients, strict=True):
            if gradient is not None:
                total += gradient if not self.scale or name not in self.scale else gradient * self.scale[name]
                if self.row_masks and name in self.row_masks:
                    total[~self.row_masks[name]] = 0.0
        return losses.detach()

    def check_independence(self, batch: Any, *, rows_per_unit: Sequence[int] = ()) -> None:
        """Nothing to check: without privacy examples may interact, as in batch normalization."""

    def reset(self) -> None:
        self._sums = {name: torch.zeros_like(p, requires_grad=False) for name, p in self._trainable.items()}

    def close(self) -> None:
        self._sums = {}


def set_gradients(model: nn.Module, means: dict[str, Tensor]) -> None:
    """Set each parameter's gradient to its privatized mean, in the parameter's dtype."""
    for name, parameter in model.named_parameters():
        parameter.grad = means[name].to(parameter.dtype) if name in means else None
