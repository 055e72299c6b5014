"""Weights whose per-example gradient is a sum of outer products, gᵢ = Σₜ δᵢₜaᵢₜᵀ: linear and convolutional layers.

Norms are never under-estimated. Four things could make the norm smaller than that of what is added to the sum:

- a Gram matrix product ‖gᵢ‖² = Σₜₜ' (aₜ·aₜ')(δₜ·δₜ') whose terms cancel;
- two kernels that round differently, one for the norm and one for the sum, where the terms of gᵢ itself cancel;
- a difference of norms (weight standardization) that cancels;
- squares too small for their type, as those of a tiny input that meets a huge output gradient.

Each example comes with the least squared norm that is trusted. Below it, the example's gradient is formed explicitly, its
norm is taken from that tensor, and that same tensor, not the fast kernel's, enters the sum. Whether any example is below it
is read from the device once per pass, for all layers together (``passes.recompute_uncertain``). The least one is a fraction c
of a bound M on what was cancelled, chosen so that float32 stays within 1e-5:

- two kernels: their results differ by ε√M, at most ε/√c ≈ 32ε of the norm for c = ``OF_TERMS``;
- a difference of squares: it is wrong by εM, at most ε/2c = 25ε of the norm for c = ``OF_SQUARES``;
- a Gram product: T² errors of εM/T² that do not conspire add up to εM/T, at most 5ε of the norm for c =
  ``OF_POSITIONS``/T. Where the terms δₜaₜᵀ are orthogonal, the squared norm is M/T, ten times that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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
    """Squared norms of examples, and the least that is trusted of each; None if all are."""

    norms: Tensor
    least: Tensor | None = None


def least_of_squares(extent: Tensor) -> Tensor:
    """The least squared norm in which squares cannot have vanished, where ``extent`` is ‖a‖² + ‖δ‖²."""
    return UNDERFLOW * torch.finfo(extent.dtype).tiny * extent


def any_flagged(found: Sequence[Tensor | None]) -> Tensor | None:
    """The examples that one of these flags; None if there are no flags."""
    flags = [one for one in found if one is not None]
    return torch.stack(flags).any(0) if flags else None


def folded(rows: Tensor, rows_per_example: int) -> Tensor:
    """The sum of each example's rows."""
    return rows if rows_per_example == 1 else rows.unflatten(0, (-1, rows_per_example)).sum(1)


class Factors(ABC):
    """Input and output gradient of one layer call, and the three things one can do with them."""

    def __init__(self, inputs: Tensor, deltas: Tensor, rows_per_example: int = 1) -> None:
        self.inputs = inputs
        self.deltas = deltas
        self.rows_per_example = rows_per_example

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.inputs) // self.rows_per_example

    @abstractmethod
    def gradient_size(self) -> int:
        """Number of elements of one gᵢ."""

    @abstractmethod
    def ghost(self) -> Measured:
        """‖gᵢ‖² from Gram matrices."""

    @abstractmethod
    def per_example(self, rows: slice | Tensor) -> Tensor:
        """gᵢ for these examples, each computed from its own rows alone."""

    @abstractmethod
    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        """Σᵢ cᵢgᵢ by the library's ordinary weight-gradient kernel."""

    def present(self, rows: Tensor) -> Tensor:
        """Which of these examples have an output gradient at all; those without have gᵢ = 0."""
        return self.deltas.unflatten(0, (-1, self.rows_per_example))[rows].flatten(1).any(1)


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
    least = fraction * of_examples(lengths.square())
    return Measured(
        of_examples((inputs * deltas).sum((1, 2))),
        least.maximum(least_of_squares(of_examples(input_squares) + of_examples(delta_squares))),
    )


class OuterProductSum:
    """The squared norms and the clipped sum of one weight, by the strategy chosen for it.

    Norms are taken in two stages, so that nothing waits for the device in between: ``squared_norms`` measures all of them,
    and ``recompute`` takes those again that are uncertain. A subclass may put a linear map between G, the sum of outer
    products, and the parameter's gradient.
    """

    def __init__(self, factors: Factors, strategy: str) -> None:
        self._factors: Factors | None = factors
        self._strategy = strategy
        self._count = len(factors)
        self._piece = piece_length(factors)
        self._kept: list[Tensor] = []
        self._measured: Measured | None = None
        # Pieces of examples whose final gradient is formed on its own.
        self._exceptions: Sequence[Tensor] = ()

    def squared_norms(self) -> Tensor:
        """Squared norm of each example's final gradient; those that are uncertain are right after ``recompute``."""
        if self._measured is None:
            self._measured = self.ghost_norms() if self._strategy == "ghost" else self._direct_norms()
            if self._strategy == "keep":
                self._factors = None
        return self._measured.norms

    def uncertain(self) -> Tensor | None:
        """Which norms have to be recomputed; None if all are trusted whatever their values."""
        assert self._measured is not None, "norms are measured first"
        norms, least = self._measured
        return None if least is None else norms < least

    def recompute(self, rows: Tensor) -> None:
        """Form the gradients of these examples, from which their norms and their part of the sum are taken."""
        if self._strategy != "keep":
            rows = rows[self.factors.present(rows)]  # zero is not an uncertain norm
        self._exceptions = rows.split(self._piece) if len(rows) else ()
        for one in self._exceptions:
            self.squared_norms().index_copy_(0, one, squared_norms(self._formed(one)))

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        """Σᵢ cᵢgᵢ."""
        ordinary = coefficients.index_fill(0, torch.cat(list(self._exceptions)), 0) if self._exceptions else coefficients
        total = self._weigh_kept(ordinary) if self._strategy == "keep" else self.factors.weighted_sum(ordinary)
        total = self.finished(total.unsqueeze(0)).squeeze(0)
        for rows in self._exceptions:
            total = total + torch.tensordot(coefficients[rows], self._formed(rows), dims=1)
        return total

    def finished(self, gradients: Tensor) -> Tensor:
        """From G, (examples, *shape), to the parameter's gradient; the same thing unless overridden."""
        return gradients

    def direct_norms_of(self, gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        """Squared norms of the final gradients of these G, and from which on they are trusted; None if all are."""
        return squared_norms(gradients), None

    def ghost_norms(self) -> Measured:
        return self.factors.ghost()

    def scaled_deltas(self) -> Tensor:
        """Output gradients in the units of the final gradient."""
        return self.factors.deltas

    @property
    def factors(self) -> Factors:
        assert self._factors is not None, "factors are released once gradients are kept"
        return self._factors

    def _formed(self, rows: Tensor) -> Tensor:
        """The final gradients of these examples."""
        if self._strategy != "keep":
            return self.finished(self.factors.per_example(rows))
        return self.finished(torch.stack([self._kept[row // self._piece][row % self._piece] for row in rows.tolist()]))

    def _direct_norms(self) -> Measured:
        norms, thresholds = [], []
        for start in range(0, self._count, self._piece):
            gradients = self.factors.per_example(slice(start, min(start + self._piece, self._count)))
            found, trusted = self.direct_norms_of(gradients)
            norms.append(found)
            thresholds += [] if trusted is None else [trusted]
            if self._strategy == "keep":
                self._kept.append(gradients)
        least = joined(thresholds) if thresholds else None
        if self._strategy == "keep":  # the tensor that is measured is the one that is summed
            return Measured(joined(norms), least)
        rows = self.factors.rows_per_example
        inputs, deltas = (folded(squared_norms(part), rows) for part in (self.factors.inputs, self.scaled_deltas()))
        of_terms = (OF_TERMS * inputs * deltas).maximum(least_of_squares(inputs + deltas))
        return Measured(joined(norms), of_terms if least is None else least.maximum(of_terms))

    def _weigh_kept(self, coefficients: Tensor) -> Tensor:
        total = torch.zeros_like(self._kept[0][0])
        for piece, own in zip(self._kept, coefficients.split(self._piece), strict=True):
            total.view(-1).addmv_(piece.flatten(1).t(), own)
        return total


def joined(pieces: list[Tensor]) -> Tensor:
    """The pieces as one tensor, without a copy if there is only one."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def piece_length(factors: Factors) -> int:
    """How many examples' gradients to form at once."""
    return max(1, piece_elements(factors.inputs.device) // max(1, factors.gradient_size()))


def piece_elements(device: torch.device) -> int:
    """Elements of the gradients formed at once on this device."""
    return PIECE_CPU if device.type == "cpu" else PIECE_GPU
