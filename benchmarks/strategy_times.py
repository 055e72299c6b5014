"""Measures on a device which clipping strategy is the fastest for typical layers, beside the one the cost model chooses."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from measuring import seconds
from torch import nn

from dp_microadam.clipping.cost import allowed, choose
from dp_microadam.clipping.outer_product import Factors, OuterProductSum
from dp_microadam.clipping.precision import full_precision
from dp_microadam.clipping.rules.convolution import ConvolutionFactors, Geometry, convolution_shapes
from dp_microadam.clipping.rules.linear import LinearFactors, LinearRule

# (channels in, channels out, image side, stride, kernel side, padding): the layers of WRN-16-4 and of the small networks.
CONVOLUTIONS = (
    (3, 16, 32, 1, 3, 1),
    (16, 64, 32, 1, 3, 1),
    (64, 64, 32, 1, 3, 1),
    (64, 128, 32, 2, 3, 1),
    (128, 128, 16, 1, 3, 1),
    (128, 256, 16, 2, 3, 1),
    (256, 256, 8, 1, 3, 1),
    (16, 64, 32, 1, 1, 0),
    (64, 128, 32, 2, 1, 0),
    (128, 256, 16, 2, 1, 0),
    (1, 16, 28, 2, 8, 3),
    (16, 32, 13, 2, 4, 0),
)

# (positions, features in, features out): a perceptron, ViT-Tiny, ViT-Base, a text encoder.
LINEAR = ((1, 784, 256), (197, 192, 192), (197, 192, 768), (197, 768, 768), (128, 384, 1536))


@dataclass(frozen=True)
class StrategyTimes:
    """Milliseconds of norms and clipped sum of one layer, by strategy; the least of several rounds."""

    layer: str
    batch: int
    milliseconds: dict[str, float]
    allowed: list[str]
    chosen: str

    @property
    def fastest(self) -> str:
        """The fastest strategy whose memory is acceptable."""
        return min(self.allowed, key=lambda name: self.milliseconds[name])

    @property
    def loss(self) -> float:
        """How many times as long as with the fastest strategy it takes with the chosen one."""
        return self.milliseconds[self.chosen] / self.milliseconds[self.fastest]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fastest": self.fastest, "times_the_fastest": self.loss}


@torch.no_grad()
def measure_strategies(device: str | torch.device, batch: int = 64, rounds: int = 5) -> Iterator[StrategyTimes]:
    """Times of every typical layer at this physical batch, in full precision as the engine computes."""
    for convolution in CONVOLUTIONS:
        yield _of_convolution(torch.device(device), batch, rounds, *convolution)
    for linear in LINEAR:
        yield _of_linear(torch.device(device), batch, rounds, *linear)


def _of_convolution(
    device: torch.device, batch: int, rounds: int, n_in: int, n_out: int, side: int, stride: int, kernel: int, padding: int
) -> StrategyTimes:
    geometry = Geometry((n_out, n_in, kernel, kernel), (stride, stride), (padding, padding), (1, 1), 1)
    out = (side + 2 * padding - kernel) // stride + 1
    inputs = torch.randn(batch, n_in, side, side, device=device)
    deltas = torch.randn(batch, n_out, out, out, device=device)
    shapes = convolution_shapes(geometry, inputs.shape[1:], inputs.element_size())
    return StrategyTimes(
        f"{n_in}→{n_out} {kernel}×{kernel} at {side}×{side} stride {stride}",
        batch,
        _interleaved(_strategies(lambda: ConvolutionFactors(inputs, deltas, geometry), device, batch), device, rounds),
        allowed(shapes),
        choose(shapes).strategy,
    )


def _of_linear(device: torch.device, batch: int, rounds: int, positions: int, n_in: int, n_out: int) -> StrategyTimes:
    inputs = torch.randn(batch, positions, n_in, device=device)
    deltas = torch.randn(batch, positions, n_out, device=device)
    factors = LinearFactors(inputs, deltas)
    rule = LinearRule("", nn.Linear(1, 1), ("weight",))
    shapes = rule.shapes(factors)
    return StrategyTimes(
        f"{n_in}→{n_out} linear, {positions} positions",
        batch,
        _interleaved(_strategies(lambda: LinearFactors(inputs, deltas), device, batch), device, rounds),
        allowed(shapes),
        choose(shapes).strategy,
    )


def _strategies(factors: Callable[[], Factors], device: torch.device, batch: int) -> dict[str, Callable[[], object]]:
    coefficients = torch.rand(batch, device=device)

    def by(strategy: str) -> Callable[[], object]:
        def work() -> None:
            part = OuterProductSum(factors(), strategy)
            part.squared_norms()
            part.weighted_sum(coefficients)

        return work

    return {name: by(name) for name in ("ghost", "keep", "drop")}


def _interleaved(works: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """Milliseconds of each, the least over rounds that take one of each; a round before them is not counted."""
    found: dict[str, list[float]] = {name: [] for name in works}
    with full_precision(device):
        for _ in range(rounds + 1):
            for name, work in works.items():
                found[name].append(1e3 * seconds(work, device))
    return {name: min(times[1:]) for name, times in found.items()}


def summary(found: list[StrategyTimes]) -> dict[str, float]:
    """How well the cost model chose: the share of layers with the fastest strategy, and the median and worst loss."""
    losses = [one.loss for one in found]
    return {
        "chosen_fastest": sum(one.chosen == one.fastest for one in found) / len(found),
        "median_loss": statistics.median(losses),
        "worst_loss": max(losses),
    }
