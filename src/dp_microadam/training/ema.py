"""Exponential moving average (EMA) of a model's weights, which often generalises better than the final weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dp_microadam.validation import require_in_open


class WeightAverage:
    """Exponential moving average of weights: θ̄ ← d·θ̄ + (1 − d)·θ, d = min(decay, (1 + t)/(10 + t)), as in the paper.

    The smaller early decay forgets the initial weights. The average is computed from privatized weights, so it costs no
    privacy. Floating-point entries are averaged in float32 or wider; others, such as counters, are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = require_in_open("ema_decay", decay, 0.0, 1.0)
        self._shadow = {name: _wide(value) for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Update the average with the weights after optimizer step number ``step``, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, value in model.state_dict().items():
            average = self._shadow[name]
            if average.is_floating_point():
                average.lerp_(value.to(average.dtype), 1 - decay)
            else:
                average.copy_(value)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Within the block ``model`` has the averaged weights; its own are restored afterwards, even after an error."""
        own = copy.deepcopy(model.state_dict())
        try:
            model.load_state_dict(self._shadow)
            yield
        finally:
            model.load_state_dict(own)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._shadow)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, average in self._shadow.items():
            average.copy_(state[name])


def _wide(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value.clone()
    return value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
