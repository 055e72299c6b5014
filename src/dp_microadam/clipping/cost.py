"""Chooses the clipping strategy of a layer by a model of time and memory on its type of device.

For per-example weight gradients gᵢ = Σₜ δᵢₜaᵢₜᵀ with P entries and T positions there are four strategies:

- *ghost*: norms from T×T Gram matrices (ghost norms); input and output gradient are kept, the clipped sum is one ordinary
  weight gradient;
- *keep*: all gᵢ are formed and kept, input and output gradient are released; no ordinary weight gradient is computed;
- *drop*: gᵢ are formed a few at a time for their norms and dropped; the clipped sum is one ordinary weight gradient;
- *tile*: as drop, but a kernel forms tiles of gᵢ in registers and stores only their squared sums (``norms_triton.py``).

The gᵢ of a convolution can be formed in two ways: by the library's weight gradient with one group per example, or by copying
the patches out of the images and one batched matrix product.

All costs are in multiplications of a float32 matrix product. ``CPU`` was measured, and ``benchmarks/clipping.py --layers``
checks it. ``CUDA`` is assumed from data sheets and from what others measured, and was never run: ``dp-microadam doctor
--measure`` says on a GPU which strategy is the fastest there, so that the assumptions can be replaced by measurements.

The choice depends on shapes, types and the device, never on how many examples a batch has, which is private under Poisson
sampling. It changes rounding only: every strategy keeps the bound on norms of ``outer_product.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

# Kept gradients may take this many times the memory of the layer's own input and output gradient, which they replace.
# 3 admits the 128→128 layers of a Wide-ResNet at 16×16 (2.25) and refuses its 256→256 layers at 8×8 (18).
KEEP_LIMIT = 3.0

# Operations launched per layer and call by each strategy, besides those that Gram matrices take (``Shapes.gram_launches``).
# Tests count them.
LAUNCHES = {"ghost": 8, "keep": 6, "drop": 17, "tile": 10}

# Exact bfloat16 products in the clipped sum, by those that form a gradient: δ times a float32 coefficient is float32, that is
# three bfloat16 numbers (``split_bf16.py``).
SUM_PRODUCTS = {0: 0, 1: 3, 3: 6, 6: 6}


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
    tile: float  # a multiplication of the kernel that forms tiles of gᵢ in registers
    tensor_core: float  # a multiplication of bfloat16 numbers that are added up in float32
    launch: float  # launching one operation, per example


CPU = DeviceCosts(
    name="cpu",
    traffic=16.0,  # measured on two cores with AVX2
    formed=6.0,  # a piece of gradients stays in the last cache (``PIECE_CPU``)
    read_again=6.0,
    direct=1.15,  # smaller products are less efficient; measured
    grouped=1.15,  # oneDNN runs groups in parallel, and no patch is copied
    patches=inf,  # so patches are never worth it
    tile=inf,  # there is no such kernel for the CPU
    tensor_core=1.0,  # bfloat16 is widened
    launch=0.0,  # microseconds of Python, alike for all strategies
)

# An A100 (data sheet): 19.5·10¹² float32 operations per second without TF32, that is 9.75·10¹² multiplications with their
# additions; 312·10¹² with bfloat16 on tensor cores; 2.04·10¹² bytes per second. On newer cards all three grew alike.
_READ = 4 / 2.04e12 * 9.75e12  # 19 multiplications while one float32 number is read or written

# A launch keeps the host busy for about 5 µs (2 to 3 in the driver, the rest in torch), during which the device may be idle.
# The number of examples it is shared by is public: a typical physical batch, not the one at hand.
_LAUNCH_SECONDS, _TYPICAL_BATCH = 5e-6, 64

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
    tile=2.0,  # half of the peak, as plain Triton products reach without TF32
    tensor_core=19.5 / 312,
    launch=_LAUNCH_SECONDS * 9.75e12 / _TYPICAL_BATCH,
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
    gram_launches: int = 13  # operations on Gram matrices
    bf16_products: int = 0  # exact bfloat16 products on tensor cores that make up one product; 0 for a float32 product
    tiles: bool = False  # the kernel of "tile" can be used


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
    multiplication = costs.tensor_core * shapes.bf16_products or 1.0
    total = (costs.tensor_core * SUM_PRODUCTS[shapes.bf16_products] or 1.0) * shapes.product
    forming = multiplication * _forming(shapes, costs)
    found = {
        "ghost": total + multiplication * shapes.gram + costs.traffic * shapes.gram_passes,
        "keep": forming + (costs.formed + costs.read_again) * shapes.weights,
        "drop": total + forming + costs.formed * shapes.weights,
    }
    if shapes.tiles:
        found["tile"] = total + costs.tile * (multiplication if shapes.bf16_products == 1 else 1.0) * shapes.product
    launches = {**LAUNCHES, "ghost": LAUNCHES["ghost"] + shapes.gram_launches}
    return {name: cost + costs.launch * launches[name] for name, cost in found.items()}


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
