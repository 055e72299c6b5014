"""Chooses the clipping strategy of a layer by a model of time and memory.

For per-example weight gradients gᵢ = Σₜ δᵢₜaᵢₜᵀ with P entries and T positions there are three strategies:

- *ghost*: norms from T×T Gram matrices (ghost norms); input and output gradient are kept, the clipped sum is one ordinary
  weight gradient;
- *keep*: all gᵢ are formed and kept, input and output gradient are released; no ordinary weight gradient is computed;
- *drop*: gᵢ are formed a few at a time for their norms and dropped; the clipped sum is one ordinary weight gradient.

All costs are in multiplications of a float32 matrix product. They were measured on a CPU, two cores with AVX2, and
``benchmarks/clipping.py --layers`` checks them on any device.

The choice depends on shapes and types, never on how many examples a batch has, which is private under Poisson sampling. It
changes rounding only: every strategy keeps the bound on norms of ``outer_product.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dp_microadam.clipping.recording import Observed


# Kept gradients may take this many times the memory of the layer's own input and output gradient, which they replace.
# 3 admits the 128→128 layers of a Wide-ResNet at 16×16 (2.25) and refuses its 256→256 layers at 8×8 (18).
KEEP_LIMIT = 3.0

_TRAFFIC = 16.0  # one element of a memory-bound pass
_FORMED = 6.0  # one element of a gᵢ that is written and read for its norm, or read again for the clipped sum
_DIRECT = 1.15  # a multiplication of a batched product that forms gᵢ, relative to the ordinary weight gradient


@dataclass(frozen=True)
class Estimate:
    """The strategy of one layer, with its cost and that of the ordinary weight gradient in multiplications per example."""

    strategy: str
    cost: float
    ordinary: float
    kept_bytes: float


@dataclass(frozen=True)
class Shapes:
    """What the choice depends on, per example: numbers of elements and of multiplications."""

    weights: int
    activations: int
    product: float  # multiplications of the ordinary weight gradient
    gram: float  # multiplications of both Gram matrices
    gram_passes: float  # elements touched besides those products
    itemsize: int = 4


def costs_of(shapes: Shapes) -> dict[str, float]:
    """What each strategy costs per example."""
    return {
        "ghost": shapes.product + shapes.gram + _TRAFFIC * shapes.gram_passes,
        "keep": _DIRECT * shapes.product + 2 * _FORMED * shapes.weights,
        "drop": (1 + _DIRECT) * shapes.product + _FORMED * shapes.weights,
    }


def allowed(shapes: Shapes) -> list[str]:
    """The strategies whose memory is acceptable; ghost is always acceptable when it is the cheapest."""
    return [name for name in costs_of(shapes) if name != "keep" or shapes.weights <= KEEP_LIMIT * shapes.activations]


def choose(shapes: Shapes, forced: str | None = None) -> Estimate:
    """The cheapest strategy whose memory is acceptable.

    >>> small_map = Shapes(weights=589_824, activations=32_768, product=37.7e6, gram=4.6e6, gram_passes=7e4)
    >>> choose(small_map).strategy
    'ghost'
    >>> large_map = Shapes(weights=36_864, activations=131_072, product=37.7e6, gram=134e6, gram_passes=9e6)
    >>> choose(large_map).strategy
    'keep'
    """
    found = costs_of(shapes)
    strategy = forced or min(allowed(shapes), key=lambda name: found[name])
    kept = shapes.weights if strategy == "keep" else shapes.activations
    return Estimate(strategy, found[strategy], shapes.product, kept * shapes.itemsize)


def strategy_table(observed: Observed) -> str:
    """One line for each layer: the strategy, its estimated cost, and the memory it keeps."""
    rows = [("layer", "type", "strategy", "cost ×", "kept kB/example")]
    for name, rule in {**observed.rules, **observed.operations}.items():
        estimate = rule.estimate
        kind = "operation" if name in observed.operations else type(rule.module).__name__
        if estimate is None:
            rows.append((name, kind, "keep", "-", "-"))
        else:
            cost = "-" if math.isnan(estimate.cost) else f"{estimate.cost / max(1.0, estimate.ordinary):.2f}"
            rows.append((name, kind, estimate.strategy, cost, f"{estimate.kept_bytes / 1e3:.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
