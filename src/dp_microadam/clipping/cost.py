"""Chooses the clipping strategy of a layer by a model of time and memory, which ``benchmarks/clipping.py --layers`` checks.

For per-example weight gradients gᵢ = Σₜ δᵢₜaᵢₜᵀ with P entries and T positions there are three strategies:

- *ghost*: norms from T×T Gram matrices (ghost norms); input and output gradient are kept, the clipped sum is one ordinary
  weight gradient;
- *keep*: all gᵢ are formed and kept, input and output gradient are released; no ordinary weight gradient is computed;
- *drop*: gᵢ are formed a few at a time for their norms and dropped; the clipped sum is one ordinary weight gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

# Kept gradients may take this many times the memory of the layer's own input and output gradient, which they replace.
# 3 admits the 128→128 layers of a Wide-ResNet at 16×16 (2.25) and refuses its 256→256 layers at 8×8 (18).
KEEP_LIMIT = 3.0

# What one element of a memory-bound pass costs, in multiplications of a matrix product.
PASS = 16.0
CACHED_PASS = 6.0

# A per-example gradient is formed by a less efficient product than the ordinary weight gradient.
DIRECT = 1.15


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


def choose(shapes: Shapes, forced: str | None = None) -> Estimate:
    """The cheapest strategy whose memory is acceptable; ghost is always acceptable when it is the cheapest.

    >>> small_map = Shapes(weights=589_824, activations=32_768, product=37.7e6, gram=4.6e6, gram_passes=7e4)
    >>> choose(small_map).strategy
    'ghost'
    >>> large_map = Shapes(weights=36_864, activations=131_072, product=37.7e6, gram=134e6, gram_passes=9e6)
    >>> choose(large_map).strategy
    'keep'
    """
    norms_only = CACHED_PASS * shapes.weights
    costs = {
        "ghost": shapes.product + shapes.gram + PASS * shapes.gram_passes,
        "keep": DIRECT * shapes.product + 2 * norms_only,
        "drop": (1 + DIRECT) * shapes.product + norms_only,
    }
    kept = {
        "ghost": shapes.activations,
        "keep": shapes.weights,
        "drop": shapes.activations,
    }
    allowed = [name for name in costs if name != "keep" or shapes.weights <= KEEP_LIMIT * shapes.activations]
    strategy = forced or min(allowed, key=lambda name: costs[name])
    return Estimate(strategy, costs[strategy], shapes.product, kept[strategy] * shapes.itemsize)
