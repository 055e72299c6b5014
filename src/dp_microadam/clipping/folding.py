"""Several rows per example for layers whose fast products take one row at a time: the rows' gradients are added up."""

from __future__ import annotations

import torch
from torch import Tensor

from dp_microadam.clipping.outer_product import Factors, squared_norms
from dp_microadam.clipping.rule import folded


class FoldedFactors(Factors):
    """Factors of (examples · rows), example-major, as factors of examples. A few rows' gradients exist at a time."""

    def __init__(self, factors: Factors, rows_per_example: int) -> None:
        super().__init__(factors.inputs, factors.deltas)
        self._factors = factors
        self.rows_per_example = rows_per_example

    def __len__(self) -> int:
        return len(self._factors) // self.rows_per_example

    def gradient_size(self) -> int:
        return self._factors.gradient_size() * self.rows_per_example

    def ghost(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("Gram matrices are taken of single rows; gradients of several are formed and added")

    def per_example(self, rows: slice | Tensor) -> Tensor:
        return folded(self._factors.per_example(self._rows_of(rows)), self.rows_per_example)

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        return self._factors.weighted_sum(coefficients.repeat_interleave(self.rows_per_example))

    def magnitude(self) -> Tensor:
        inputs, deltas = squared_norms(self.inputs), squared_norms(self.deltas)
        return folded(inputs, self.rows_per_example) * folded(deltas, self.rows_per_example)

    def remove(self, rows: Tensor) -> None:
        self._factors.remove(self._indices_of(rows))
        self.inputs, self.deltas = self._factors.inputs, self._factors.deltas

    def _rows_of(self, examples: slice | Tensor) -> slice | Tensor:
        count = self.rows_per_example
        if isinstance(examples, slice):
            return slice(examples.start * count, examples.stop * count)
        return self._indices_of(examples)

    def _indices_of(self, examples: Tensor) -> Tensor:
        own = torch.arange(self.rows_per_example, device=examples.device)
        return (examples.unsqueeze(1) * self.rows_per_example + own).flatten()
