"""Chooses the clipping strategy of a layer by a model of time and memory on its type of device.

For per-example weight gradients gᵢ = Σₜ δᵢₜaᵢₜᵀ with P entries and T positions there are three strategies:

- *ghost*: norms from T×T Gram matrices (ghost norms); input and output gradient are kept, the clipped sum is one ordinary
  weight gradient;
- *keep*: all gᵢ are formed and kept, input and output gradient are released; no ordinary weight gradient is computed;
- *drop*: gᵢ are formed a few at a time for their norms and dropped; the clipped sum is one ordinary weight gradient.

The gᵢ of a convolution can be formed in two ways: by the library's weight gradient with one group per example, or by copying
the patches out of the images and one batched matrix product.

All costs are in multiplications of a float32 matrix product. ``CPU`` was measured, and ``benchmarks/clipping.py --layers``
checks it. ``CUDA`` is assumed from data sheets and from what others measured, and was never run: ``dp-microadam doctor
--measure`` says on a GPU which strategy is the fastest there, so that the assumptions can be replaced by measurements.

The choice depends on shapes, types and the device, never on how many examples a batch has, which is private under Poisson
sampling. It changes rounding only: every strategy keeps the bound on norms of ``outer_product.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dp_microadam.clipping.recording import Observed


# Kept gradients may take this many times the memory of the layer's own input and output gradient, which they replace.
# 3 admits the 128→128 layers of a Wide-ResNet at 16×16 (2.25) and refuses its 256→256 layers at 8×8 (18).
KEEP_LIMIT = 3.0


@dataclass(frozen=True)
class DeviceCosts:
    """What elementary work costs on one type of device, in multiplications of a float32 matrix product."""

    name: str
    traffic: float  # one element of a memory-bound pass
    formed: float  # one element of a gᵢ that is written and read for its norm
    read_again: float  # the same element, read for the clipped sum
    direct: float  # a multiplication of a batched product that forms gᵢ, relative to the ordinary weight gradient
    grouped: float  # the same by a convolution with one group per example
    patches: float  # one element of a patch that is copied out of its image and read by the product


CPU = DeviceCosts(
    name="cpu",
    traffic=16.0,  # measured on two cores with AVX2
    formed=6.0,  # a piece of gradients stays in the last cache (``PIECE_CPU``)
    read_again=6.0,
    direct=1.15,  # smaller products are less efficient; measured
    grouped=1.15,  # oneDNN runs groups in parallel, and no patch is copied
    patches=inf,  # so patches are never worth it
)

# An A100 (data sheet): 19.5·10¹² float32 operations per second without TF32, that is 9.75·10¹² multiplications with their
# additions; 2.04·10¹² bytes per second. On newer cards both grew alike.
_READ = 4 / 2.04e12 * 9.75e12  # 19 multiplications while one float32 number is read or written

CUDA = DeviceCosts(
    name="cuda",
    traffic=2 * _READ,  # read and written
    formed=2 * _READ,  # pieces of a GPU's size (``PIECE_GPU``) do not fit its cache
    read_again=_READ,
    direct=1.15,  # batched products of cuBLAS: assumed as on the CPU
    # cuDNN's weight gradient with one group per example. Opacus has it, and does not use it "because it is slower in many
    # contexts" (``convolution2d_backward_as_a_convolution`` in opacus/grad_sample/conv.py). Against copied patches it took
    # 4 times as long on a T4 and half as long on an A100 (meta-pytorch/opacus, pull request 497, Conv2d under functorch),
    # "~40 % slower" on Pascal (issue 145), and there with TF32, which norms must not use: the worse figure is assumed.
    grouped=4.0,
    patches=2 * _READ,
)


def costs_on(device_type: str) -> DeviceCosts:
    """The table for a type of device; types without one are taken for a CPU.

    >>> costs_on("cuda").name, costs_on("mps").name
    ('cuda', 'cpu')
    """
    return CUDA if device_type == "cuda" else CPU


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
    patches: float = 0.0  # elements of all patches of a convolution; 0 for other layers


def forms_by_patches(shapes: Shapes, costs: DeviceCosts) -> bool:
    """Whether a convolution's gᵢ are formed from copied patches rather than with one group per example."""
    return shapes.patches > 0 and _by_patches(shapes, costs) < costs.grouped * shapes.product


def _by_patches(shapes: Shapes, costs: DeviceCosts) -> float:
    return costs.direct * shapes.product + costs.patches * shapes.patches if shapes.patches else inf


def _forming(shapes: Shapes, costs: DeviceCosts) -> float:
    """Multiplications that forming one gᵢ is worth."""
    if not shapes.patches:
        return costs.direct * shapes.product
    return min(costs.grouped * shapes.product, _by_patches(shapes, costs))


def costs_of(shapes: Shapes, costs: DeviceCosts = CPU) -> dict[str, float]:
    """What each strategy costs per example."""
    forming = _forming(shapes, costs)
    return {
        "ghost": shapes.product + shapes.gram + costs.traffic * shapes.gram_passes,
        "keep": forming + (costs.formed + costs.read_again) * shapes.weights,
        "drop": shapes.product + forming + costs.formed * shapes.weights,
    }


def allowed(shapes: Shapes, costs: DeviceCosts = CPU) -> list[str]:
    """The strategies whose memory is acceptable; ghost is always acceptable when it is the cheapest."""
    return [name for name in costs_of(shapes, costs) if name != "keep" or shapes.weights <= KEEP_LIMIT * shapes.activations]


def choose(shapes: Shapes, forced: str | None = None, costs: DeviceCosts = CPU) -> Estimate:
    """The cheapest strategy whose memory is acceptable.

    >>> small_map = Shapes(weights=589_824, activations=32_768, product=37.7e6, gram=4.6e6, gram_passes=7e4)
    >>> choose(small_map).strategy
    'ghost'
    >>> large_map = Shapes(weights=36_864, activations=131_072, product=37.7e6, gram=134e6, gram_passes=9e6)
    >>> choose(large_map).strategy
    'keep'
    """
    found = costs_of(shapes, costs)
    strategy = forced or min(allowed(shapes, costs), key=lambda name: found[name])
    kept = shapes.weights if strategy == "keep" else shapes.activations
    return Estimate(strategy, found[strategy], shapes.product, kept * shapes.itemsize)


def strategy_table(observed: Observed, device: torch.device) -> str:
    """One line for each layer: the strategy on the device, its estimated cost, and the memory it keeps."""
    rows = [("layer", "type", f"strategy on {device.type}", "cost ×", "kept kB/example")]
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
