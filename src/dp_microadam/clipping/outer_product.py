"""Weights whose per-example gradient is a sum of outer products, gᵢ = Σₜ δᵢₜaᵢₜᵀ: linear and convolutional layers.

Norms are never under-estimated. Three things could make the norm smaller than that of what is added to the sum:

- a Gram matrix product ‖gᵢ‖² = Σₜₜ' (aₜ·aₜ')(δₜ·δₜ') whose terms cancel;
- two kernels that round differently, one for the norm and one for the sum, where the terms of gᵢ itself cancel;
- a difference of norms (weight standardization) that cancels;
- squares too small for their type, as those of a tiny input that meets a huge output gradient.

Each example comes with the least squared norm that is trusted and with the size of what was squared. Below it, the
example's gradient is formed explicitly, its norm is taken from that tensor, and that same tensor, not the fast kernel's,
enters the sum. The least one is a fraction c of a bound M on what was cancelled, chosen so that float32 stays within 1e-5:

- two kernels: their results differ by ε√M, at most ε/√c ≈ 32ε of the norm for c = ``OF_TERMS``;
- a difference of squares: it is wrong by εM, at most ε/2c = 25ε of the norm for c = ``OF_SQUARES``;
- a Gram product: T² errors of εM/T² that do not conspire add up to εM/T, at most 5ε of the norm for c =
  ``OF_POSITIONS``/T. Where the terms δₜaₜᵀ are orthogonal, the squared norm is M/T, ten times that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

OF_TERMS = 1e-3
OF_SQUARES = 2e-2
OF_POSITIONS = 0.1

# A squared norm below this many times the smallest number, relative to ‖a‖² + ‖δ‖², may be what vanished squares
# left. It allows for 1e10 sums of such squares and six digits.
UNDERFLOW = 1e16

# Elements of the per-example gradients formed at once. On CPU a piece should stay in the last cache; a GPU wants more
# work per launch.
PIECE_CPU = 1 << 20
PIECE_GPU = 1 << 26


class Measured(NamedTuple):
    """Squared norms of examples, and whether to trust them."""

    norms: Tensor
    trusted: Tensor  # from which squared norm on
    extent: Tensor  # ‖a‖² + ‖δ‖², by which squares that vanish are judged

    def doubtful(self) -> Tensor:
        floor = UNDERFLOW * torch.finfo(self.norms.dtype).tiny
        return (self.norms < self.trusted) | (self.norms < floor * self.extent)


class Factors(ABC):
    """Input and output gradient of one layer call, and the three things one can do with them."""

    rows_per_example = 1

    def __init__(self, inputs: Tensor, deltas: Tensor) -> None:
        self.inputs = inputs
        self.deltas = deltas

    def __len__(self) -> int:
        return len(self.inputs)

    @abstractmethod
    def gradient_size(self) -> int:
        """Number of elements of one gᵢ."""

    @abstractmethod
    def ghost(self) -> Measured:
        """‖gᵢ‖² from Gram matrices."""

    def tiles(self) -> Measured:
        """‖gᵢ‖² by a kernel that never stores gᵢ; only called where the strategy "tile" was offered."""
        raise NotImplementedError("these factors have no kernel for tiles")

    @abstractmethod
    def per_example(self, rows: slice | Tensor) -> Tensor:
        """gᵢ for these examples, each computed from its own rows alone."""

    @abstractmethod
    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        """Σᵢ cᵢgᵢ by the library's ordinary weight-gradient kernel."""

    def remove(self, rows: Tensor) -> None:
        self.inputs = self.inputs.index_fill(0, rows, 0)
        self.deltas = self.deltas.index_fill(0, rows, 0)


def squared_norms(rows: Tensor) -> Tensor:
    """Squared norm of each row; two levels of summation keep float32 accurate for millions of elements."""
    if rows.dim() <= 2:
        return torch.linalg.vector_norm(rows.flatten(1), dim=1).square()
    return torch.linalg.vector_norm(rows.flatten(2), dim=2).square().sum(1)


def measured_by_grams(inputs: Tensor, deltas: Tensor, examples: int) -> Measured:
    """Norms from Gram matrices (examples × groups, T, T) of inputs and output gradients; groups add up.

    What may cancel is (Σₜ ‖aₜ‖‖δₜ‖)².
    """

    def of_examples(values: Tensor) -> Tensor:
        return values.view(examples, -1).sum(1)

    input_squares = inputs.diagonal(dim1=1, dim2=2).clamp(min=0)
    delta_squares = deltas.diagonal(dim1=1, dim2=2).clamp(min=0)
    lengths = (input_squares.sqrt() * delta_squares.sqrt()).sum(1)
    fraction = max(OF_TERMS, OF_POSITIONS / inputs.shape[1])
    return Measured(
        of_examples((inputs * deltas).sum((1, 2))),
        fraction * of_examples(lengths.square()),
        of_examples(input_squares) + of_examples(delta_squares),
    )


class OuterProductSum:
    """The squared norms and the clipped sum of one weight, by the strategy chosen for it.

    A subclass may put a linear map between G, the sum of outer products, and the parameter's gradient.
    """

    def __init__(self, factors: Factors, strategy: str) -> None:
        self._factors: Factors | None = factors
        self._strategy = strategy
        self._count = len(factors)
        self._piece = piece_length(factors)
        self._kept: list[Tensor] = []
        # Examples whose final gradient is formed on its own, and, for the strategy "keep", those gradients.
        self._exceptions = torch.empty(0, dtype=torch.long, device=factors.inputs.device)
        self._explicit: list[Tensor] = []

    def squared_norms(self) -> Tensor:
        """Squared norm of each example's final gradient."""
        measured = self.ghost_norms() if self._strategy == "ghost" else self._direct_norms()
        norms = measured.norms
        self._exceptions = self._not_zero(torch.nonzero(measured.doubtful()).flatten())
        for rows in self._exception_pieces():
            explicit = self.finished(self.factors.per_example(rows))
            norms[rows] = squared_norms(explicit)
            if self._strategy == "keep":
                self._explicit.append(explicit)
        if self._strategy == "keep":
            self._factors = None
        return norms

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        """Σᵢ cᵢgᵢ."""
        ordinary = coefficients.index_fill(0, self._exceptions, 0)
        total = self._weigh_kept(ordinary) if self._strategy == "keep" else self.factors.weighted_sum(ordinary)
        total = self.finished(total.unsqueeze(0)).squeeze(0)
        for index, rows in enumerate(self._exception_pieces()):
            explicit = self._explicit[index] if self._explicit else self.finished(self.factors.per_example(rows))
            total = total + torch.tensordot(coefficients[rows], explicit, dims=1)
        return total

    def remove(self, rows: Tensor) -> None:
        """Set what is kept of these examples to zero."""
        if self._factors is not None:
            self._factors.remove(rows)
        start = 0
        for index, piece in enumerate(self._kept):
            inside = rows[(rows >= start) & (rows < start + len(piece))] - start
            if len(inside):
                self._kept[index] = piece.index_fill(0, inside, 0)
            start += len(piece)
        start = 0
        for index, explicit in enumerate(self._explicit):
            own = self._exceptions[start : start + len(explicit)]
            self._explicit[index] = explicit.index_fill(0, torch.isin(own, rows).nonzero().flatten(), 0)
            start += len(explicit)

    def finished(self, gradients: Tensor) -> Tensor:
        """From G, (examples, *shape), to the parameter's gradient; the same thing unless overridden."""
        return gradients

    def direct_norms_of(self, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Squared norms of the final gradients of these G, and from which on they are trusted."""
        norms = squared_norms(gradients)
        return norms, torch.zeros_like(norms)

    def ghost_norms(self) -> Measured:
        return self.factors.ghost()

    def scaled_deltas(self) -> Tensor:
        """Output gradients in the units of the final gradient."""
        return self.factors.deltas

    @property
    def factors(self) -> Factors:
        assert self._factors is not None, "factors are released once gradients are kept"
        return self._factors

    def _not_zero(self, rows: Tensor) -> Tensor:
        """Those of the examples that have a gradient at all: zero is not a doubtful norm."""
        if len(rows) == 0:
            return rows
        return rows[self.factors.deltas[rows].flatten(1).any(1)]

    def _direct_norms(self) -> Measured:
        if self._strategy == "tile":
            return self.factors.tiles()
        norms, thresholds = [], []
        step = self._piece
        for start in range(0, self._count, step):
            gradients = self.factors.per_example(slice(start, start + step))
            found, trusted = self.direct_norms_of(gradients)
            norms.append(found)
            thresholds.append(trusted)
            if self._strategy == "keep":
                self._kept.append(gradients)
        found, trusted = torch.cat(norms), torch.cat(thresholds)
        if self._strategy == "keep":  # the tensor that is measured is the one that is summed
            return Measured(found, trusted, torch.zeros_like(found))
        inputs, deltas = squared_norms(self.factors.inputs), squared_norms(self.scaled_deltas())
        return Measured(found, trusted.maximum(OF_TERMS * inputs * deltas), inputs + deltas)

    def _weigh_kept(self, coefficients: Tensor) -> Tensor:
        total = torch.zeros_like(self._kept[0][0])
        start = 0
        for piece in self._kept:
            total.view(-1).addmv_(piece.flatten(1).t(), coefficients[start : start + len(piece)])
            start += len(piece)
        return total

    def _exception_pieces(self) -> Iterator[Tensor]:
        if len(self._exceptions) == 0:
            return iter(())
        return iter(self._exceptions.split(self._piece))


def piece_length(factors: Factors) -> int:
    """How many examples' gradients to form at once."""
    limit = PIECE_CPU if factors.inputs.device.type == "cpu" else PIECE_GPU
    return max(1, limit // max(1, factors.gradient_size()))
