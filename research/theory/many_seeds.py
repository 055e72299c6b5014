"""Algorithms 3 and 1 of the paper on many seeds at once, for problems of a few coordinates.

Rows are seeds. Tests compare them step by step with Algorithm 3 written out, and with
:class:`dp_microadam.optimizers.micro_adam_reference.MicroAdamReference`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def top_k(values: Array, kept: int) -> Array:
    """``values`` with all but the ``kept`` largest magnitudes of each row set to 0."""
    selected = np.argpartition(np.abs(values), -kept, axis=1)[:, -kept:]
    found = np.zeros_like(values)
    np.put_along_axis(found, selected, np.take_along_axis(values, selected, axis=1), axis=1)
    return found


def rounded(values: Array, bits: int, offsets: Array | float) -> Array:
    """Each row quantized to 2ᵇ levels between its extremes: offsets of ½ round to nearest, uniform ones stochastically."""
    lowest = values.min(axis=1, keepdims=True)
    level = (values.max(axis=1, keepdims=True) - lowest) / (2**bits - 1)
    # A row of equal values has no levels, and is its own minimum.
    codes = np.floor((values - lowest) / np.where(level > 0, level, 1.0) + offsets)
    return np.clip(codes, 0, 2**bits - 1) * level + lowest


@dataclass
class AnalyticalViews:
    """Algorithm 3, Noisy-MicroAdam, with the noise in the error (line 5), as in the proof."""

    theta: Array
    lr: float
    eps: float
    kept: int
    bits: int
    beta_1: float = 0.9
    beta_2: float = 0.999
    error: Array = field(init=False)
    first: Array = field(init=False)
    second: Array = field(init=False)
    largest_second: Array = field(init=False)

    def __post_init__(self) -> None:
        self.error, self.first, self.second, self.largest_second = (np.zeros_like(self.theta) for _ in range(4))

    def step(self, noisy_gradient: Array, offsets: Array) -> None:
        accumulated = noisy_gradient + self.error
        compressed = top_k(accumulated, self.kept)  # line 4
        self.error = rounded(accumulated - compressed, self.bits, offsets)  # line 5
        self.first = self.beta_1 * self.first + (1 - self.beta_1) * compressed  # line 6
        self.second = self.beta_2 * self.second + (1 - self.beta_2) * compressed**2  # line 7
        self.largest_second = np.maximum(self.largest_second, self.second)  # line 8
        self.theta = self.theta - self.lr * self.first / np.sqrt(self.largest_second + self.eps)  # line 9


@dataclass
class MicroAdams:
    """Algorithm 1 from line 6 on, as it is run: a window, no AMSGrad, 4 bits rounded to nearest, ε_s outside the root."""

    theta: Array
    lr: float
    eps: float
    kept: int
    bits: int = 4
    beta_1: float = 0.9
    beta_2: float = 0.999
    window: int = 10
    bias_correction: str = "paper"
    error: Array = field(init=False)
    rows: Array = field(init=False)
    steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.error = np.zeros_like(self.theta)
        self.rows = np.zeros((self.window, *self.theta.shape))

    def step(self, noisy_gradient: Array, offsets: Array | None = None) -> None:
        accumulated = noisy_gradient + self.error  # line 6
        compressed = top_k(accumulated, self.kept)  # line 7
        slot = self.steps % self.window
        self.rows[slot] = compressed  # line 8
        self.error = rounded(accumulated - compressed, self.bits, 0.5)  # lines 9–11
        self.steps += 1
        ages = (slot - np.arange(self.window)) % self.window
        m_hat = self._statistics(self.beta_1, ages, self.rows)  # line 12
        v_hat = self._statistics(self.beta_2, ages, self.rows**2)  # line 13
        self.theta = self.theta - self.lr * m_hat / (self.eps + np.sqrt(v_hat))  # line 14

    def _statistics(self, beta: float, ages: NDArray[np.int64], rows: Array) -> Array:
        corrected = self.steps if self.bias_correction == "paper" else min(self.steps, self.window)
        weights = (1 - beta) / (1 - beta**corrected) * beta**ages
        found: Array = np.tensordot(weights, rows, axes=1)
        return found
