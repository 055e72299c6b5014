"""A smooth, non-convex problem whose constants are known exactly: robust regression with Cauchy's loss.

f(θ) = (1/n)·Σⱼ φ(xⱼᵀθ − yⱼ) with φ(r) = c²·ln(1 + (r/c)²). Since |φ′| ≤ c and −¼ ≤ φ″ ≤ 2 with ‖xⱼ‖ = 1, every example's
gradient has norm at most G = c, so that clipping at c changes nothing, and L = 2·λ_max(XᵀX/n). A part of the targets are
outliers, which is where the loss is concave.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class CauchyRegression:
    """Data of the regression problem, and the size of batches, which are drawn with replacement."""

    inputs: Array
    targets: Array
    scale: float
    batch_size: int

    @classmethod
    def drawn(
        cls, dimension: int = 8, frames: int = 4, scale: float = 0.03, batch_size: int = 16, seed: int = 0
    ) -> CauchyRegression:
        """Inputs are the rows of ``frames`` random rotations: they are unit vectors, and XᵀX/n = I/d."""
        rng = np.random.default_rng(seed)
        inputs = np.vstack([np.linalg.qr(rng.standard_normal((dimension, dimension)))[0] for _ in range(frames)])
        truth = 0.7 * scale * rng.choice([-1.0, 1.0], dimension)
        targets = inputs @ truth + 0.1 * scale * rng.standard_normal(len(inputs))
        outliers = rng.choice(len(inputs), len(inputs) // 5, replace=False)
        targets[outliers] += 4 * scale * rng.choice([-1.0, 1.0], len(outliers))
        return cls(inputs, targets, scale, batch_size)

    @property
    def dimension(self) -> int:
        return int(self.inputs.shape[1])

    @property
    def smoothness(self) -> float:
        """Smoothness constant L."""
        return 2 * float(np.linalg.eigvalsh(self.inputs.T @ self.inputs / len(self.inputs))[-1])

    @property
    def gradient_bound(self) -> float:
        """G: upper bound on the gradient norm of each example, and so of their means."""
        return self.scale

    @property
    def gradient_deviation(self) -> float:
        """σ_g: a batch of B independent draws has 1/B of an example's variance, which is at most G²."""
        return self.scale / float(np.sqrt(self.batch_size))

    def loss(self, theta: Array) -> Array:
        """f of each row of ``theta``."""
        residuals = (theta @ self.inputs.T - self.targets) / self.scale
        mean: Array = self.scale**2 * np.log1p(residuals**2).mean(axis=1)
        return mean

    def gradients(self, theta: Array, rng: np.random.Generator) -> tuple[Array, Array]:
        """∇f of each row of ``theta``, and that of a batch of its own."""
        residuals = theta @ self.inputs.T - self.targets
        slopes = 2 * residuals / (1 + (residuals / self.scale) ** 2)
        drawn = rng.integers(len(self.inputs), size=(len(theta), self.batch_size))
        chosen = np.take_along_axis(slopes, drawn, axis=1)
        batch: Array = np.einsum("sb,sbd->sd", chosen, self.inputs[drawn]) / self.batch_size
        return slopes @ self.inputs / len(self.inputs), batch
