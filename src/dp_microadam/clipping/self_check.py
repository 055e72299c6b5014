"""Compares the engine with its reference implementation on random networks, on this machine."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.clipping.per_example import clipped_sum
from dp_microadam.errors import PrivacyError
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d

TOLERANCE = 1e-4
"""Largest error of the sum of float32 gradients, relative to its norm. A single wrong gradient is a hundred times that."""


@dataclass(frozen=True)
class Exactness:
    """The largest error of the engine, compared with gradients taken one by one in double precision.

    ``deviation`` is the largest ‖Σ − Σ*‖/‖Σ*‖ over the networks tried, and ``worst`` names the kind it occurred in.
    """

    device: str
    networks: int
    deviation: float
    worst: str

    @property
    def exact(self) -> bool:
        return self.deviation <= TOLERANCE


def check_exactness(
    seconds: float,
    device: str | torch.device = "cpu",
    kinds: Sequence[str] = (),
    engine: type[ClippedGradients] = ClippedGradients,
) -> Exactness:
    """Compare the engine with its reference on as many random networks as ``seconds`` allow, each kind at least once."""
    end = time.monotonic() + seconds
    worst, where, networks = 0.0, "", 0
    gpus = [device] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        for kind in _in_turn(kinds or tuple(_KINDS), end):
            deviation = _deviation(*_KINDS[kind](), device, engine)
            networks += 1
            if not deviation <= worst:  # NaN counts
                worst, where = deviation, kind
    return Exactness(str(device), networks, worst, where)


def _in_turn(kinds: Sequence[str], end: float) -> Iterator[str]:
    while True:
        yield from kinds
        if time.monotonic() >= end:
            return


def _deviation(model: nn.Module, batch: Tensor, device: str | torch.device, engine: type[ClippedGradients]) -> float:
    model, batch = model.to(device), batch.to(device)
    exact = copy.deepcopy(model).double()
    wide = batch.double() if batch.is_floating_point() else batch
    _, norms = clipped_sum(exact, _loss, wide, max_grad_norm=1.0)
    bound = sorted(norms)[len(norms) // 2]  # so that half are clipped
    expected, _ = clipped_sum(exact, _loss, wide, max_grad_norm=bound)
    with engine(model, _loss, max_grad_norm=bound) as gradients:
        try:
            gradients.accumulate(batch)
        except PrivacyError:  # the engine's own check found the error: count it as all of the sum
            return 1.0
        difference = sum(float((total.double() - expected[name]).square().sum()) for name, total in gradients.sums.items())
    return (difference / sum(float(total.square().sum()) for total in expected.values())) ** 0.5


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    output = model(batch)
    return output.flatten(1).sin().sum(1)


def _size(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


def _rows() -> int:
    return _size(3, 12)


def _mlp() -> tuple[nn.Module, Tensor]:
    inputs, hidden = _size(2, 40), _size(2, 40)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.LayerNorm(hidden), nn.Linear(hidden, 5)), torch.randn(
        _rows(), inputs
    )


def _convolutions() -> tuple[nn.Module, Tensor]:
    groups, channels, side = 2, 4 * _size(1, 4), _size(7, 14)
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.GroupNorm(2, channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, stride=_size(1, 2), groups=groups, bias=False),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * channels, 3),
    )
    return model, torch.randn(_rows(), 3, side, side)


def _standardized() -> tuple[nn.Module, Tensor]:
    channels, side = 4 * _size(1, 4), _size(6, 10)
    model = nn.Sequential(WeightStandardizedConv2d(3, channels, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(model, nn.Linear(4 * channels, 3)), torch.randn(_rows(), 3, side, side)


def _attention() -> tuple[nn.Module, Tensor]:
    width, words = 8 * _size(1, 3), _size(2, 9)
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(30, width), layer, nn.Linear(width, 3)), torch.randint(30, (_rows(), words))


_KINDS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear layers": _mlp,
    "convolutions": _convolutions,
    "standardized weights": _standardized,
    "attention": _attention,
}
