"""The convergence bound of the paper, term by term: as printed, and corrected.

The theorem bounds (1/T)·Σ E‖∇f(θ_t)‖² over T steps of Noisy-MicroAdam (Algorithm 3 of the paper, which
:class:`research.theory.many_seeds.AnalyticalViews` runs). ``research/theory.md`` derives the corrected form and
says what was wrong with the printed one. Symbols are the paper's: q and ω belong to the two compressors, η is the step size,
ε_s stands under the root, and R = G + √d·σ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dp_microadam.errors import InputError
from dp_microadam.validation import (
    require_in_closed_open,
    require_integer,
    require_non_negative,
    require_positive,
)


def top_k_contraction(kept: int, length: int) -> float:
    """Contraction factor q = √(1 − k/d) of top-k: without its ``kept`` largest of ``length`` values, ‖x‖ shrinks by q or more.

    >>> round(top_k_contraction(1, 100), 4)
    0.995
    """
    require_integer("length", length, 1)
    require_integer("kept", kept, 0, length)
    return math.sqrt(1 - kept / length)


def block_contraction(sizes: Iterable[int], density: float, block_size: int | None = None) -> float:
    """Contraction factor q of top-k in blocks: selecting ⌈density·n⌉ of every block of n coordinates of tensors of ``sizes``.

    Blocks are orthogonal, so q is that of the worst block. ``block_size=None``: each parameter is one block.

    >>> block_contraction([32_768, 10], 0.01, 32_768) == top_k_contraction(328, 32_768)
    True
    """
    blocks = set()
    for size in sizes:
        length = min(block_size or size, size)
        blocks.update({length, size % length or length})
    return max(top_k_contraction(max(1, math.ceil(density * length - 1e-9)), length) for length in blocks)


def stochastic_rounding_error(length: int, bits: int, lowest: float | None = None, highest: float | None = None) -> float:
    """Relative error ω of stochastic rounding to ``bits`` bits between the smallest and the largest of ``length`` values.

    ‖Q(x) − x‖ ≤ √(n − 2)/(2ᵇ − 1)·(Δ − δ)/√(Δ² + δ²)·‖x‖: the two extremes are met exactly, every other value is off by less
    than one level, and ‖x‖² ≥ Δ² + δ². Without δ and Δ it is the worst case over all x, in which the last fraction is √2; this
    is the ω of the theorem. For a vector in buckets, give the length of a bucket: the whole is as good as its worst bucket.

    >>> round(stochastic_rounding_error(128, 4), 3)
    1.058
    """
    require_integer("length", length, 1)
    require_integer("bits", bits, 1)
    if lowest is None or highest is None:
        spread = math.sqrt(2)
    else:
        if not lowest <= highest:
            raise InputError(f"lowest is {lowest}, above highest, {highest}; it must not be")
        size = math.hypot(lowest, highest)
        spread = (highest - lowest) / size if size > 0 else 0.0
    return math.sqrt(max(0, length - 2)) / (2**bits - 1) * spread


def noise_deviation(noise_multiplier: float, max_grad_norm: float, batch_size: int) -> float:
    """σ of the theorem: the noise standard deviation noise_multiplier·C/B of each coordinate of the mean gradient."""
    require_non_negative("noise_multiplier", noise_multiplier)
    require_positive("max_grad_norm", max_grad_norm)
    require_integer("batch_size", batch_size, 1)
    return noise_multiplier * max_grad_norm / batch_size


@dataclass(frozen=True)
class Setting:
    """The constants of the theorem, except the number of steps T.

    Arguments:
        initial_gap: f(θ₁) − f*.
        smoothness: L.
        gradient_bound: G, the largest norm of a stochastic gradient; the clipping norm C where gradients are clipped to it.
        gradient_deviation: σ_g, the square root of the largest E‖g_t − ∇f(θ_t)‖².
        noise_deviation: σ, the noise standard deviation per coordinate; 0 without privacy.
        dimension: d.
        beta_1: β₁.
        eps: ε_s, under the root.
        contraction: q of the gradient's compressor.
        rounding_error: ω of the error's compressor; 0 without quantization.
    """

    initial_gap: float
    smoothness: float
    gradient_bound: float
    gradient_deviation: float
    noise_deviation: float
    dimension: int
    beta_1: float
    eps: float
    contraction: float
    rounding_error: float

    def __post_init__(self) -> None:
        require_non_negative("initial_gap", self.initial_gap)
        require_positive("smoothness", self.smoothness)
        require_positive("gradient_bound", self.gradient_bound)
        require_non_negative("gradient_deviation", self.gradient_deviation)
        require_non_negative("noise_deviation", self.noise_deviation)
        require_integer("dimension", self.dimension, 1)
        require_in_closed_open("beta_1", self.beta_1, 0.0, 1.0)
        require_positive("eps", self.eps)
        require_in_closed_open("contraction", self.contraction, 0.0, 1.0)
        require_non_negative("rounding_error", self.rounding_error)

    @property
    def joint_contraction(self) -> float:
        """q_ω = (1 + ω)·q, which must be below 1 for the theorem."""
        return (1 + self.rounding_error) * self.contraction

    @property
    def applies(self) -> bool:
        """Whether the theorem applies: q_ω < 1."""
        return self.joint_contraction < 1

    @property
    def largest_rounding_error(self) -> float:
        """The ω up to which the theorem would apply: 1/q − 1."""
        return 1 / self.contraction - 1 if self.contraction > 0 else math.inf

    @property
    def noisy_gradient(self) -> float:
        """R = G + √d·σ ≥ (E‖g_t + η_t‖²)^½."""
        return self.gradient_bound + math.sqrt(self.dimension) * self.noise_deviation

    @property
    def noisy_gradient_4(self) -> float:
        """R₄ = G + (d(d + 2))^¼·σ ≥ (E‖g_t + η_t‖⁴)^¼, since E‖η_t‖⁴ = d(d + 2)σ⁴."""
        d = self.dimension
        return self.gradient_bound + (d * (d + 2)) ** 0.25 * self.noise_deviation

    @property
    def c2(self) -> float:
        """C₂ = ωq·(1 + 2q_ω/(1 − q_ω²))."""
        return self.rounding_error * self.contraction * (1 + self._error_factor)

    @property
    def c1(self) -> float:
        """C₁ = β₁/(1 − β₁)·(1 + C₂) + 2q_ω/(1 − q_ω²)."""
        return self.beta_1 / (1 - self.beta_1) * (1 + self.c2) + self._error_factor

    @property
    def _error_factor(self) -> float:
        self.require_applicable()
        return 2 * self.joint_contraction / (1 - self.joint_contraction**2)

    def require_applicable(self) -> None:
        """Raise an error if the theorem does not apply.

        Raises:
            InputError: if q_ω ≥ 1.
        """
        if not self.applies:
            raise InputError(
                f"(1 + ω)q is {self.joint_contraction:.6g}; the theorem needs it below 1, so with q = {self.contraction:.6g} a "
                f"rounding error ω below {self.largest_rounding_error:.3g} instead of {self.rounding_error:.3g}"
            )

    def c0(self, steps: int) -> float:
        """C₀ of the corrected theorem: an upper bound on √(v̂_t + ε_s) for all t ≤ T, with probability at least 1 − 1/T.

        With that probability no ‖η_t‖ exceeds σ(√d + 2√ln T), and then no accumulator exceeds (G + that)/(1 − q_ω).
        """
        self.require_applicable()
        largest_noise = self.noise_deviation * (math.sqrt(self.dimension) + 2 * math.sqrt(math.log(steps)))
        return math.hypot((self.gradient_bound + largest_noise) / (1 - self.joint_contraction), math.sqrt(self.eps))

    @property
    def printed_c0(self) -> float:
        """C₀ as the theorem is printed: √(8(1 + q_ω²)³/(1 − q_ω²)²·R² + ε_s)."""
        self.require_applicable()
        square = self.joint_contraction**2
        return math.hypot(math.sqrt(8 * (1 + square) ** 3) / (1 - square) * self.noisy_gradient, math.sqrt(self.eps))


TERMS = {
    "initial gap": "what has to be descended",
    "gradient variance": "σ_g of the stochastic gradients",
    "noise": "dσ² of the privacy noise",
    "quantization": "C₂² of the rounded error",
    "adaptivity": "v̂ changes while it is used",
    "adaptivity, second order": "the same, times η",
    "lag": "momentum and error feedback act late",
    "rare noise": "noise beyond what C₀ allows for",
}
"""The terms of a bound, and where each comes from."""


@dataclass(frozen=True)
class Bound:
    """An upper bound on (1/T)·Σ E‖∇f(θ_t)‖² over ``steps`` steps of size ``step_size``; ``terms`` add up to ``total``."""

    steps: int
    c0: float
    step_size: float
    terms: dict[str, float]

    @property
    def total(self) -> float:
        return math.fsum(self.terms.values())

    @property
    def dominant(self) -> str:
        """The largest term."""
        return max(self.terms, key=lambda name: self.terms[name])


def corrected_bound(setting: Setting, steps: int) -> Bound:
    """The bound proved in ``research/theory.md``, with η = min{ε_s/(12·L·C₀), 1/√T}.

    Raises:
        InputError: if (1 + ω)q ≥ 1.
    """
    c0 = setting.c0(require_integer("steps", steps, 1))
    return _bound(
        setting,
        steps,
        c0,
        step_size=min(setting.eps / (12 * setting.smoothness * c0), 1 / math.sqrt(steps)),
        young=3,
        slow_square=setting.gradient_bound * setting.noisy_gradient,
        fourth_square=setting.noisy_gradient_4**2 / math.sqrt(setting.eps),
        rare=2 * setting.gradient_bound**2 / steps if setting.noise_deviation > 0 else 0.0,
    )


def printed_bound(setting: Setting, steps: int) -> Bound:
    """The bound as the paper prints it, with η = min{ε_s/(4·L·C₀), 1/√T} and the O(1/T) terms its appendix spells out.

    It is here for comparison only: its proof does not hold.

    Raises:
        InputError: if (1 + ω)q ≥ 1.
    """
    c0 = setting.printed_c0
    require_integer("steps", steps, 1)
    return _bound(
        setting,
        steps,
        c0,
        step_size=min(setting.eps / (4 * setting.smoothness * c0), 1 / math.sqrt(steps)),
        young=1,
        slow_square=setting.noisy_gradient**2,
        fourth_square=setting.noisy_gradient**2,
        rare=0.0,
    )


def _bound(
    setting: Setting,
    steps: int,
    c0: float,
    *,
    step_size: float,
    young: float,
    slow_square: float,
    fourth_square: float,
    rare: float,
) -> Bound:
    """The formula of both bounds. They differ in C₀, η, the factor of term III, and the moments of the adaptivity terms."""
    smoothness, eps, c1 = setting.smoothness, setting.eps, setting.c1
    descent = 2 * c0 * young * step_size * smoothness / eps
    changes = 2 * c0 * math.sqrt(setting.dimension / (steps * eps))
    parts = (
        2 * c0 * setting.initial_gap / (steps * step_size),
        descent * setting.gradient_deviation**2,
        descent * setting.dimension * setting.noise_deviation**2,
        descent * (setting.c2 * setting.noisy_gradient) ** 2,
        changes * (1 + c1) * slow_square,
        changes * step_size * smoothness * c1 * (1 + 2 * c1) * fourth_square,
        2 * (c0 * step_size * smoothness * c1 * setting.noisy_gradient / eps) ** 2,
        rare,
    )
    return Bound(steps, c0, step_size, dict(zip(TERMS, parts, strict=True)))
