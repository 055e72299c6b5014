"""Examples that see each other in the model: is the effect of one on the clipped sum bounded, or the model refused?"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from research.field.report import FAILS, FAST_DP, HOLDS, JAX_PRIVACY, OPACUS, OURS, REFUSED, Finding, Row
from research.field.sums import WAYS, by_jax, refusal

NORM = 0.1


class Centre(nn.Module):
    """Subtracts the mean over the batch, in a forward pass that somebody wrote."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0)


def data() -> tuple[Tensor, Tensor]:
    """Thirty-one examples alike, and one that is large."""
    torch.manual_seed(0)
    inputs = torch.randn(32, 6)
    inputs[-1] = 100.0
    return inputs, torch.arange(32) % 3


def judged(name: str, sums: list[Tensor]) -> Finding:
    """Of the sums with and without the large example."""
    moved = float((sums[0] - sums[1]).norm()) / NORM
    return Finding(FAILS if moved > 1.001 else HOLDS, f"{name}: one example moves the sum by {moved:.1f} C")


def check(library: str) -> Finding:
    found = []
    inputs, labels = data()
    way, summed = next(iter(WAYS[library].items()))
    for name, mixes in {"BatchNorm": nn.BatchNorm1d(6), "x − x.mean(0)": Centre()}.items():
        model = nn.Sequential(mixes, nn.Tanh(), nn.Linear(6, 3))
        try:
            found.append(judged(name, [summed(model, inputs[:count], labels[:count], NORM) for count in (32, 31)]))
        except Exception as refuses:
            found.append(Finding(REFUSED, f"{name} is refused ({refusal(refuses)})"))
    worst = next(one for one in (FAILS, HOLDS, REFUSED) if one in {finding.verdict for finding in found})
    return Finding(worst, f"{'; '.join(finding.measured for finding in found)} ({way})")


def jax_privacy() -> Finding:
    def loss(weight: Any, batch: Any) -> Any:
        import jax

        return -jax.nn.log_softmax(jax.numpy.tanh(batch - batch.mean(0)) @ weight)[:, 0].mean()

    inputs, _ = data()
    found = judged("x − x.mean(0)", [by_jax(loss, torch.randn(6, 3), inputs[:count], NORM) for count in (32, 31)])
    return Finding(found.verdict, f"{found.measured}; the loss gets one example at a time")


ROW = Row(
    "Examples that see each other",
    "One example more or less moves the clipped sum by at most the clipping norm C, or the model is refused.",
    "the reason for which Opacus and this library refuse BatchNorm by name",
    {JAX_PRIVACY: jax_privacy, **{name: partial(check, name) for name in (OPACUS, FAST_DP, OURS)}},
)

if __name__ == "__main__":
    ROW.show()
