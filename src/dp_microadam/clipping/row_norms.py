"""Sums of the row norms of clipped per-example gradients: how strongly examples pull at each row of a weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.clipping.batches import PerExampleLoss
from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.clipping.joint import JointCall
from dp_microadam.clipping.passes import Clippable
from dp_microadam.errors import InputError


class ClippedRowNorms(ClippedGradients):
    """Σᵢ ‖row r of clip(gᵢ, C)‖ for every row r, the first dimension, of every trainable parameter.

    Used like :class:`ClippedGradients`, whose arguments it takes; ``sums`` holds one number per row. Every example's gradient
    is formed, so a pass costs more than one of ``ClippedGradients``.

    Formal guarantees: for batches that differ by adding or removing one example, ``sums``, read as one vector over all
    rows of all parameters, differ by at most ``sensitivity`` = C in L2 norm. The difference is the vector of row norms of that
    example's clipped gradient, and its squared norm is Σᵣ ‖row r‖² = ‖clip(gᵢ, C)‖² ≤ C². So the Gaussian mechanism that
    protects the sum of clipped gradients protects these sums too, with the same noise per number, and a step that publishes
    them instead of the gradients costs the same. Everything else is as for ``ClippedGradients``.

    >>> model = nn.Linear(2, 3, bias=False)
    >>> engine = ClippedRowNorms(model, lambda model, x: model(x).square().sum(1), max_grad_norm=1.0)
    >>> norms = engine.accumulate(torch.ones(4, 2))
    >>> engine.sums["weight"].shape, engine.sensitivity
    (torch.Size([3]), 1.0)
    """

    def __init__(self, model: nn.Module, per_example_loss: PerExampleLoss, *, max_grad_norm: float, **options: Any) -> None:
        super().__init__(model, per_example_loss, max_grad_norm=max_grad_norm, **options)
        for name, parameter in self._trainable.items():
            if parameter.dim() == 0:
                raise InputError(f"parameter {name!r} is a single number and has no rows; freeze it with requires_grad_(False)")
        self._ones = {name: torch.ones_like(parameter, requires_grad=False) for name, parameter in self._trainable.items()}

    def _factors(self) -> Mapping[str, Tensor]:
        # A factor of one has every example's gradient formed, whatever the layer's cheapest strategy would be.
        return {**self._ones, **self._scale}

    def _zeros(self, parameter: nn.Parameter) -> Tensor:
        return super()._zeros(parameter).new_zeros(len(parameter) if parameter.dim() else 1)

    def _sums_of(self, call: Clippable, coefficients: Tensor) -> Mapping[str, Tensor]:
        assert isinstance(call, JointCall), "scaled gradients are always formed"
        return call.clipped_row_norms(coefficients)

    def _contributions(self, gradients: Tensor) -> Tensor:
        return torch.linalg.vector_norm(gradients.reshape(*gradients.shape[:2], -1), dim=2)
