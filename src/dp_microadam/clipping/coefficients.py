"""What gradients are multiplied by so that their norms stay within the bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dp_microadam.clipping.layer_bounds import blocks_of, layer_of
from dp_microadam.clipping.passes import Part
from dp_microadam.clipping.rule import sum_of


def clipping_coefficients(norms: Tensor, bound: float, usable: Tensor) -> Tensor:
    """min(1, C/‖g‖), and zero for examples that are removed."""
    return torch.where(usable, bound / norms.clamp(min=bound), torch.zeros_like(norms))


def per_layer_coefficients(
    parts: Sequence[Part],
    norms: Tensor,
    bounds: Mapping[str, float],
    coefficients: Callable[[Tensor, float, Tensor], Tensor] = clipping_coefficients,
) -> list[Tensor]:
    """Clipping coefficients of every part, where each layer has its own bound.

    Layers that share a part are clipped as one block. ``norms`` are those of whole gradients: an example whose norm is not
    finite is removed from all layers.
    """
    usable = torch.isfinite(norms)
    layers = [{layer_of(name) for name in part.names.values()} for part in parts]
    blocks = blocks_of(layers)
    found = []
    for own in layers:
        block = next(block for block in blocks if own <= block)
        members = [part.squared for part, others in zip(parts, layers, strict=True) if others <= block]
        bound = math.hypot(*(bounds[layer] for layer in block))
        found.append(coefficients(sum_of(members).sqrt(), bound, usable))
    return found
