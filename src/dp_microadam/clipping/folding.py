"""Sums the gradients of an example's rows, for layers whose fast products take one row per example."""

from __future__ import annotations

import torch
from torch import Tensor

from dp_microadam.clipping.outer_product import Factors
from dp_microadam.clipping.rule import folded


class FoldedFactors(Factors):
    """Factors of (examples · rows), example-major, as factors of examples. A few rows' gradients exist at a time.

    Subclasses know the Gram matrices of an example's rows.
    """

    def __init__(self, factors: Factors, rows_per_example: int) -> None:
        self._factors = factors
        self.rows_per_example = rows_per_example
        super().__init__(self._by_example(factors.inputs), self._by_example(factors.deltas))

    def gradient_size(self) -> int:
        return self._factors.gradient_size() * self.rows_per_example

    def per_example(self, rows: slice | Tensor) -> Tensor:
        count = self.rows_per_example
        if isinstance(rows, slice):
            return folded(self._factors.per_example(slice(rows.start * count, rows.stop * count)), count)
        return folded(self._factors.per_example(self._rows_of(rows)), count)

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        return self._factors.weighted_sum(coefficients.repeat_interleave(self.rows_per_example))

    def remove(self, rows: Tensor) -> None:
        self._factors.remove(self._rows_of(rows))

    def _by_example(self, tensor: Tensor) -> Tensor:
        """An example's rows side by side as channels."""
        return tensor.unflatten(0, (-1, self.rows_per_example)).flatten(1, 2)

    def _rows_of(self, examples: Tensor) -> Tensor:
        own = torch.arange(self.rows_per_example, device=examples.device)
        return (examples.unsqueeze(1) * self.rows_per_example + own).flatten()
