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


class UncertainNorms(NamedTuple):
    """Norms that may have to be recomputed: those below the least that is trusted, of examples whose δ is not all zero.

    ``present`` says which have such a δ; it is None on the CPU, where it is looked at later and for doubtful examples only.
    """

    norms: Tensor
    least: Tensor
    present: Tensor | None


def any_uncertain(found: Sequence[UncertainNorms]) -> UncertainNorms | None:
    """The examples of which at least one of these norms is uncertain; None if there are none."""
    if len(found) < 2:
        return found[0] if found else None
    # An example may be flagged without need, if one norm is small and another's δ is present: it is then recomputed.
    margins = torch.stack([one.norms - one.least for one in found]).amin(0)
    present = [one.present for one in found if one.present is not None]
    return UncertainNorms(margins, torch.zeros_like(margins), torch.stack(present).any(0) if present else None)


def flagged_rows(flags: Tensor, count: int) -> Tensor:
    """Indices of at least the ``count`` rows that are flagged, found without waiting for the device."""
    return flags.nonzero().flatten() if flags.device.type == "cpu" else first_flagged(flags, count)


def first_flagged(flags: Tensor, count: int) -> Tensor:
    """The flagged rows in ascending order, then others, ``count`` in all."""
    return flags.byte().argsort(descending=True, stable=True)[:count]


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

    @abstractmethod
    def per_example(self, rows: slice | Tensor) -> Tensor:
        """gᵢ for these examples, each computed from its own rows alone."""

    @abstractmethod
    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        """Σᵢ cᵢgᵢ by the library's ordinary weight-gradient kernel."""

    def present(self, rows: slice | Tensor = slice(None)) -> Tensor:
        """Which of these examples have an output gradient at all; those without have gᵢ = 0."""
        return self.deltas[rows].flatten(1).any(1)

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
        # Pieces of examples whose final gradient is formed on its own, and, for the strategy "keep", those gradients.
        self._exceptions: list[Tensor] = []
        self._explicit: list[Tensor] = []

    def squared_norms(self) -> Tensor:
        """Squared norm of each example's final gradient; those that are uncertain are right after ``recompute``."""
        if self._measured is None:
            self._measured = self.ghost_norms() if self._strategy == "ghost" else self._direct_norms()
            if self._strategy == "keep":
                self._factors = None
        return self._measured.norms

    def uncertain(self) -> UncertainNorms | None:
        """Which norms may have to be recomputed; None if all are trusted whatever their values."""
        assert self._measured is not None, "norms are measured first"
        norms, least = self._measured
        if least is None:
            return None
        if norms.device.type == "cpu":
            return UncertainNorms(norms, least, None)
        # Of gradients that are kept, the least is zero where δ is: a part of the squares of the tensor that is summed.
        return UncertainNorms(norms, least, least > 0 if self._strategy == "keep" else self.factors.present())

    def recompute(self, flags: Tensor, count: int) -> None:
        """Form the gradients of the ``count`` flagged examples, from which their norms and their part of the sum are taken."""
        norms = self.squared_norms()
        start = 0
        if self._strategy == "keep":
            for piece in self._kept:
                inside = flagged_rows(flags[start : start + len(piece)], count)
                if len(inside):
                    self._exceptions.append(inside + start)
                    self._explicit.append(self.finished(piece[inside]))
                start += len(piece)
        else:
            rows = flagged_rows(flags, count)
            rows = self._not_zero(rows) if rows.device.type == "cpu" else rows
            self._exceptions = list(rows.split(self._piece)) if len(rows) else []
        for index, rows in enumerate(self._exceptions):
            norms.index_copy_(0, rows, squared_norms(self._final_gradients(index)))

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        """Σᵢ cᵢgᵢ."""
        ordinary = coefficients.index_fill(0, torch.cat(self._exceptions), 0) if self._exceptions else coefficients
        total = self._weigh_kept(ordinary) if self._strategy == "keep" else self.factors.weighted_sum(ordinary)
        total = self.finished(total.unsqueeze(0)).squeeze(0)
        for index, rows in enumerate(self._exceptions):
            weights, explicit = coefficients[rows], self._final_gradients(index)
            left_out = (weights == 0).view(-1, *[1] * (explicit.dim() - 1))
            total = total + torch.tensordot(weights, explicit.masked_fill(left_out, 0), dims=1)  # 0·∞ is NaN
        return total

    def remove(self, rows: Tensor) -> None:
        """Set what is kept of these examples to zero."""
        if self._factors is not None:
            self._factors.remove(rows)
        gone = torch.zeros(self._count, dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)
        start = 0
        for piece in self._kept:
            piece.masked_fill_(gone[start : start + len(piece)].view(-1, *[1] * (piece.dim() - 1)), 0)
            start += len(piece)

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

    def _final_gradients(self, index: int) -> Tensor:
        """The final gradients of one piece of ``_exceptions``."""
        return self._explicit[index] if self._explicit else self.finished(self.factors.per_example(self._exceptions[index]))

    def _not_zero(self, rows: Tensor) -> Tensor:
        """Those of the examples that have a gradient at all: zero is not an uncertain norm."""
        return rows[self.factors.present(rows)]

    def _direct_norms(self) -> Measured:
        norms, thresholds = [], []
        step = self._piece
        for start in range(0, self._count, step):
            gradients = self.factors.per_example(slice(start, start + step))
            found, trusted = self.direct_norms_of(gradients)
            norms.append(found)
            thresholds += [] if trusted is None else [trusted]
            if self._strategy == "keep":
                self._kept.append(gradients)
        least = joined(thresholds) if thresholds else None
        if self._strategy == "keep":  # the tensor that is measured is the one that is summed
            return Measured(joined(norms), least)
        inputs, deltas = squared_norms(self.factors.inputs), squared_norms(self.scaled_deltas())
        of_terms = (OF_TERMS * inputs * deltas).maximum(least_of_squares(inputs + deltas))
        return Measured(joined(norms), of_terms if least is None else least.maximum(of_terms))

    def _weigh_kept(self, coefficients: Tensor) -> Tensor:
        total = torch.zeros_like(self._kept[0][0])
        start = 0
        for piece in self._kept:
            total.view(-1).addmv_(piece.flatten(1).t(), coefficients[start : start + len(piece)])
            start += len(piece)
        return total


def joined(pieces: list[Tensor]) -> Tensor:
    """The pieces as one tensor, without a copy if there is only one."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def piece_length(factors: Factors) -> int:
    """How many examples' gradients to form at once."""
    limit = PIECE_CPU if factors.inputs.device.type == "cpu" else PIECE_GPU
    return max(1, limit // max(1, factors.gradient_size()))
