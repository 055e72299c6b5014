"""Do all ways of a library to clip give the same sum, that of the definition?"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from research.field.cancelling import MeanOfPositions
from research.field.report import FAILS, FAST_DP, HOLDS, OPACUS, OURS, REFUSED, Finding, Row
from research.field.sums import WAYS, by_autograd, refusal

LARGEST_ERROR = 1e-4


def problems() -> dict[str, tuple[nn.Module, Tensor]]:
    convolution = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    tokens = nn.Sequential(nn.Embedding(20, 12), nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh(), MeanOfPositions(12, 3))
    layer = nn.Linear(6, 6)
    return {
        "tokens": (tokens, torch.randint(20, (8, 8))),
        "convolution": (convolution, torch.randn(8, 2, 6, 6)),
        "a layer called twice": (nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(6, 3)), torch.randn(8, 6)),
    }


def agreement(library: str, models: dict[str, tuple[nn.Module, Tensor]], norm: float) -> Finding:
    """Relative errors of the sums against autograd's, for every way and model."""
    errors, told = [], []
    for name, (model, inputs) in models.items():
        labels = torch.arange(len(inputs)) % 3
        wanted = by_autograd(model, inputs, labels, norm)
        for way, summed in WAYS[library].items():
            try:
                errors.append(float((summed(model, inputs, labels, norm) - wanted).norm() / wanted.norm()))
            except Exception as refuses:
                told.append(f"{way} refuses {name} ({refusal(refuses)})")
                continue
            if errors[-1] > LARGEST_ERROR:
                told.append(f"{way} is off by {100 * errors[-1]:.0f} % for {name}")
    right = [error for error in errors if error <= LARGEST_ERROR]
    told += [f"errors of {', '.join(WAYS[library])} at most {max(right):.0e}{' otherwise' if told else ''}"] if right else []
    return Finding(FAILS if len(right) < len(errors) else HOLDS if errors else REFUSED, "; ".join(told))


def check(library: str) -> Finding:
    torch.manual_seed(0)
    return agreement(library, problems(), 0.5)


ROW = Row(
    "Ghost and plain clipping agree",
    f"Each way of clipping gives the sum that autograd gives example by example, to {LARGEST_ERROR:g}.",
    "pytorch/opacus issue 692",
    {name: partial(check, name) for name in (OPACUS, FAST_DP, OURS)},
)

if __name__ == "__main__":
    ROW.show()
