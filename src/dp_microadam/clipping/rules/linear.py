"""Linear layers, on any number of positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dp_microadam.clipping.cost import Shapes
from dp_microadam.clipping.outer_product import Factors, Measured, least_of_squares, measured_by_grams
from dp_microadam.clipping.rules.rule import OuterProductRule, RuleCall, UnchangedInput, at_least_float32


def _squares_in_double(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows.flatten(1), dim=1, dtype=torch.float64).square()


class LinearFactors(Factors):
    """a as (B, T, inputs) and δ as (B, T, outputs)."""

    def gradient_size(self) -> int:
        return self.inputs.shape[2] * self.deltas.shape[2]

    def ghost(self) -> Measured:
        if self.inputs.shape[1] == 1:  # one outer product: ‖δaᵀ‖ = ‖δ‖‖a‖, and nothing can cancel
            inputs, deltas = _squares_in_double(self.inputs), _squares_in_double(self.deltas)
            norms = (inputs * deltas).to(self.deltas.dtype)
            # Nor can squares of float32 vanish in double, and a product that does is far below any bound to clip to. A model
            # that diverges has many such examples; formed one by one, they would take several times as long as the step.
            return Measured(norms, least_of_squares(inputs + deltas) if self.deltas.dtype == torch.float64 else None)
        inputs, deltas = (factor @ factor.transpose(1, 2) for factor in (self.inputs, self.deltas))
        return measured_by_grams(inputs, deltas, len(self))

    def per_example(self, rows: slice | Tensor) -> Tensor:
        return self.deltas[rows].transpose(1, 2) @ self.inputs[rows]

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        scaled = self.deltas * coefficients.view(-1, 1, 1)
        return scaled.flatten(0, 1).t() @ self.inputs.flatten(0, 1)


class TransposedFactors(LinearFactors):
    """a and δ in each other's place, for a weight with inputs in its rows: gᵢ = Σₜ aᵢₜδᵢₜᵀ."""

    def present(self, rows: Tensor) -> Tensor:
        return self.inputs[rows].flatten(1).any(1)


def positions(tensor: Tensor, rows: int) -> Tensor:
    """(examples, positions, features), with an example's rows among its positions."""
    return tensor.reshape(len(tensor) // rows, -1, tensor.shape[-1])


class LinearRule(OuterProductRule):
    output_dimension = -1
    module: nn.Linear

    def factors(self, inputs: Tensor, deltas: Tensor, rows: int) -> Factors:
        return LinearFactors(positions(inputs, rows), positions(deltas, rows))

    def bias_gradients(self, deltas: Tensor, rows: int) -> Tensor:
        return positions(deltas, rows).sum(1)

    def joined(self, calls: Sequence[tuple[RuleCall, Tensor]]) -> tuple[RuleCall, Tensor] | None:
        """Positions of all calls side by side: Σ over calls of Σₜ δₜaₜᵀ is one sum over more positions."""
        deltas = torch.cat([positions(at_least_float32(gradient), call.rows_per_example) for call, gradient in calls], 1)
        kept = [positions(inputs, call.rows_per_example) for call, _ in calls if (inputs := call.read()) is not None]
        return RuleCall(self, UnchangedInput(self.name, torch.cat(kept, 1)) if kept else None), deltas

    def shapes(self, factors: Factors) -> Shapes:
        _, length, n_in = factors.inputs.shape
        n_out = factors.deltas.shape[2]
        grams = length**2 if length > 1 else 0
        return Shapes(
            weights=n_in * n_out,
            activations=length * (n_in + n_out),
            product=float(length * n_in * n_out),
            gram=float(grams * (n_in + n_out)),
            gram_passes=2.0 * grams if grams else float(n_in + n_out),
            itemsize=factors.inputs.element_size(),
        )


class TransposedLinearRule(LinearRule):
    """Linear layers whose weight is (inputs, outputs): ``Conv1D`` of ``transformers``, of which GPT-2 consists."""

    masks_rows = False  # rows belong to inputs

    def factors(self, inputs: Tensor, deltas: Tensor, rows: int) -> Factors:
        return TransposedFactors(positions(deltas, rows), positions(inputs, rows))
