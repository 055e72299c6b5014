"""Positions that nearly cancel: is the norm that an example is clipped by ever smaller than that of its gradient?

A linear layer on two positions x and −x + u, then their mean: its gradient is as small as u, but products of activations, of
which ghost norms are sums, are as large as |x|². In float32 their rounding can hide all of the gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from research.field.report import FAILS, FAST_DP, HOLDS, JAX_PRIVACY, OPACUS, OURS, Finding, Row
from research.field.sums import WAYS, by_jax

EXAMPLES, WIDTH, SIZE, NORM = 40, 64, 1e3, 0.1


class MeanOfPositions(nn.Module):
    """A linear layer, and the mean of its outputs over positions."""

    def __init__(self, width: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs, bias)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs).mean(1)


def examples() -> Tensor:
    """Of gradients about five times as long as the clipping norm."""
    torch.manual_seed(0)
    position = SIZE * F.normalize(torch.randn(EXAMPLES, WIDTH), dim=1)
    rest = F.normalize(torch.randn(EXAMPLES, WIDTH), dim=1)
    return torch.stack([position, rest - position], 1)


def check(library: str) -> Finding:
    labels = torch.zeros(1, dtype=torch.long)
    longest = {}
    for way, summed in WAYS[library].items():
        model = MeanOfPositions(WIDTH, WIDTH, bias=False)
        longest[way] = max(float(summed(model, one[None], labels, NORM).norm()) / NORM for one in examples())
    return _finding(longest)


def jax_privacy() -> Finding:
    def loss(weight: Any, batch: Any) -> Any:
        import jax

        return -jax.nn.log_softmax((batch @ weight).mean(1))[:, 0].mean()

    weight = MeanOfPositions(WIDTH, WIDTH, bias=False).linear.weight.detach().T.contiguous()
    return _finding({"clipped_grad": max(float(by_jax(loss, weight, one[None], NORM).norm()) / NORM for one in examples())})


def _finding(longest: dict[str, float]) -> Finding:
    told = ", ".join(f"{way} {value:.2f} C" for way, value in longest.items())
    return Finding(FAILS if max(longest.values()) > 1.001 else HOLDS, f"longest of {EXAMPLES} clipped gradients: {told}")


ROW = Row(
    "Positions that cancel",
    f"A clipped gradient is at most as long as the clipping norm C (activations of norm {SIZE:g}).",
    "our own tests of ghost norms in float32",
    {JAX_PRIVACY: jax_privacy, **{name: partial(check, name) for name in (OPACUS, FAST_DP, OURS)}},
)

if __name__ == "__main__":
    ROW.show()
