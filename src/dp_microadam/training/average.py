"""Exponential moving average of the weights that train, which often generalises better than the last weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dp_microadam.validation import require_in_open


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

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Update the average with the weights after optimizer step number ``step``, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, average in self._shadow.items():
            average.lerp_(model.get_parameter(name).to(average.dtype), 1 - decay)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Within the block ``model`` has the averaged weights; its own are restored afterwards, even after an error."""
        own = {name: model.get_parameter(name).detach().clone() for name in self._shadow}
        try:
            self.copy_to(model)
            yield
        finally:
            _copy(own, model)

    def copy_to(self, model: nn.Module) -> None:
        """Give ``model`` the averaged weights."""
        _copy(self._shadow, model)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._shadow)


@torch.no_grad()
def _copy(weights: Mapping[str, Tensor], model: nn.Module) -> None:
    for name, value in weights.items():
        model.get_parameter(name).copy_(value)
