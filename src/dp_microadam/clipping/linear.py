"""Linear layers on inputs of any rank: gᵢ = Σₜ δᵢₜaᵢₜᵀ over all positions t between the batch and the features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.clipping.cost import Shapes, choose
from dp_microadam.clipping.outer_product import Factors, Measured, OuterProductSum, least_of_squares, measured_by_grams
from dp_microadam.clipping.rule import GradientRows, LayerCall, LayerRule, PartsCall, UnchangedInput, at_least_float32


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
        return measured_by_grams(
            self.inputs @ self.inputs.transpose(1, 2), self.deltas @ self.deltas.transpose(1, 2), len(self)
        )

    def per_example(self, rows: slice | Tensor) -> Tensor:
        return self.deltas[rows].transpose(1, 2) @ self.inputs[rows]

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        scaled = self.deltas * coefficients.view(-1, 1, 1)
        return scaled.flatten(0, 1).t() @ self.inputs.flatten(0, 1)


class LinearCall(PartsCall):
    masks_rows = True

    def __init__(self, rule: LinearRule, inputs: UnchangedInput | None) -> None:
        super().__init__()
        self._rule = rule
        self._inputs = inputs

    def squared_norms(self, output_gradient: Tensor) -> Tensor:
        deltas = self._positions(at_least_float32(output_gradient))
        if "bias" in self._rule.trainable:
            self.parts["bias"] = GradientRows(self.masked(deltas, "bias", 2).sum(1))
        if self._inputs is not None:
            factors = LinearFactors(self._positions(self._inputs.read()), self.masked(deltas, "weight", 2))
            self.parts["weight"] = OuterProductSum(factors, self._rule.choose(factors))
        del self._inputs
        return self.norms_of_parts()

    def per_example(self, output_gradient: Tensor, examples: slice) -> Mapping[str, Tensor]:
        deltas = self._positions(at_least_float32(output_gradient))[examples]
        found = {"bias": deltas.sum(1)} if "bias" in self._rule.trainable else {}
        if self._inputs is not None:
            found["weight"] = deltas.transpose(1, 2) @ self._positions(self._inputs.read())[examples]
        return found

    @classmethod
    def joined(cls, calls: Sequence[tuple[LayerCall, Tensor]]) -> tuple[LayerCall, Tensor] | None:
        """Positions of all calls side by side: Σ over calls of Σₜ δₜaₜᵀ is one sum over more positions."""
        own = [(call, gradient) for call, gradient in calls if isinstance(call, LinearCall)]
        rule = own[0][0]._rule
        deltas = torch.cat([call._positions(at_least_float32(gradient)) for call, gradient in own], 1)
        kept = [call._positions(call._inputs.read()) for call, _ in own if call._inputs is not None]
        inputs = UnchangedInput(rule.name, torch.cat(kept, 1)) if kept else None
        return LinearCall(rule, inputs), deltas

    def _positions(self, tensor: Tensor) -> Tensor:
        """(examples, positions, features), with an example's rows among its positions."""
        return tensor.reshape(len(tensor) // self.rows_per_example, -1, tensor.shape[-1])


class LinearRule(LayerRule):
    module: nn.Linear

    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> LayerCall:
        return LinearCall(self, self.kept_input(args, kwargs, {"weight"}))

    def choose(self, factors: LinearFactors) -> str:
        _, positions, n_in = factors.inputs.shape
        n_out = factors.deltas.shape[2]
        grams = positions**2 if positions > 1 else 0
        shapes = Shapes(
            weights=n_in * n_out,
            activations=positions * (n_in + n_out),
            product=float(positions * n_in * n_out),
            gram=float(grams * (n_in + n_out)),
            gram_passes=2.0 * grams if grams else float(n_in + n_out),
            itemsize=factors.inputs.element_size(),
        )
        self.estimate = choose(shapes, self.forced_strategy)
        return self.estimate.strategy
