"""Reference implementation of the engine: examples one at a time, each with an ordinary backward pass.

It is written to be read, and the engine is tested against it. Models with dropout draw other random numbers here than
in one pass over a batch, so tests compare them differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dp_microadam.clipping.batches import PerExampleLoss, batch_size


def per_example_gradients(model: nn.Module, per_example_loss: PerExampleLoss, batch: Any) -> list[dict[str, Tensor]]:
    """The gradient of each example's loss with respect to every trainable parameter, by parameter name."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = []
    for row in range(batch_size(batch)):
        alone = tree_map(lambda leaf, row=row: leaf[row : row + 1] if isinstance(leaf, Tensor) else leaf, batch)
        loss = per_example_loss(model, alone).sum()
        found = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
        gradients.append(
            {
                name: torch.zeros_like(p) if gradient is None else gradient.detach()
                for (name, p), gradient in zip(trainable.items(), found, strict=True)
            }
        )
    return gradients


def of_users(gradients: list[dict[str, Tensor]], weights: Tensor) -> list[dict[str, Tensor]]:
    """The gradient of each user: the weighted sum over their consecutive examples, without those of weight zero."""
    found = []
    for user, own in enumerate(weights.tolist()):
        total = {name: torch.zeros_like(part) for name, part in gradients[0].items()}
        for gradient, weight in zip(gradients[user * len(own) :], own, strict=False):
            if weight:
                total = {name: part + weight * gradient[name] for name, part in total.items()}
        found.append(total)
    return found


def norm(gradient: dict[str, Tensor]) -> float:
    """The norm over all parameters together, in double precision."""
    return sum(float(part.double().square().sum()) for part in gradient.values()) ** 0.5


def clipped(gradient: dict[str, Tensor], max_grad_norm: float) -> dict[str, Tensor]:
    """The gradient scaled to at most ``max_grad_norm``; zero if it is not finite."""
    if not all(bool(torch.isfinite(part).all()) for part in gradient.values()):
        return {name: torch.zeros_like(part) for name, part in gradient.items()}
    coefficient = min(1.0, max_grad_norm / max(norm(gradient), torch.finfo(torch.float64).tiny))
    return {name: coefficient * part for name, part in gradient.items()}


def clipped_sum(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    batch: Any,
    *,
    max_grad_norm: float,
    scale: Mapping[str, Tensor] = MappingProxyType({}),
    weights: Tensor | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Σᵢ clip(s⊙gᵢ, C) by parameter name, and the norm of every s⊙gᵢ; s is 1 for parameters without a ``scale``.

    With ``weights``, (users, examples per user), gᵢ is the gradient of user i: the weighted sum over their examples.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> total, norms = clipped_sum(model, lambda m, x: m(x).squeeze(1), torch.tensor([[3.0, 4.0]]), max_grad_norm=1.0)
    >>> norms, total["weight"]
    ([5.0], tensor([[0.6000, 0.8000]]))
    """
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    norms = []
    gradients = per_example_gradients(model, per_example_loss, batch)
    for unscaled in gradients if weights is None else of_users(gradients, weights):
        gradient = {name: part * scale[name] if name in scale else part for name, part in unscaled.items()}
        norms.append(norm(gradient))
        for name, part in clipped(gradient, max_grad_norm).items():
            total[name] = total[name].detach() + part
    return {name: part.detach() for name, part in total.items()}, norms
