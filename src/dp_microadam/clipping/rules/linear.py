"""Linear layers on inputs of any rank: gᵢ = Σₜ δᵢₜaᵢₜᵀ over all positions t between the batch and the features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.clipping.cost import Shapes, choose, costs_on
from dp_microadam.clipping.outer_product import (
    Factors,
    Measured,
    OuterProductSum,
    least_of_squares,
    measured_by_grams,
)
from dp_microadam.clipping.rules.rule import GradientRows, LayerCall, LayerRule, PartsCall, UnchangedInput, at_least_float32


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

    def present(self, rows: slice | Tensor = slice(None)) -> Tensor:
        return self.inputs[rows].flatten(1).any(1)


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
            factors = self._factors_of_weight(self._positions(self._inputs.read()), self.masked(deltas, "weight", 2))
            self.parts["weight"] = OuterProductSum(factors, self._rule.choose(factors))
        del self._inputs
        return self.norms_of_parts()

    def per_example(self, output_gradient: Tensor, examples: slice) -> Mapping[str, Tensor]:
        deltas = self._positions(at_least_float32(output_gradient))[examples]
        found = {"bias": deltas.sum(1)} if "bias" in self._rule.trainable else {}
        if self._inputs is not None:
            factors = self._factors_of_weight(self._positions(self._inputs.read())[examples], deltas)
            found["weight"] = factors.per_example(slice(None))
        return found

    def _factors_of_weight(self, inputs: Tensor, deltas: Tensor) -> LinearFactors:
        return LinearFactors(inputs, deltas)

    def factors(self, output_gradient: Tensor) -> tuple[Tensor, Tensor]:
        """a and δ of the weight, (examples, positions, features)."""
        assert self._inputs is not None, "the weight is trained"
        return self._positions(self._inputs.read()), self._positions(at_least_float32(output_gradient))

    @classmethod
    def joined(cls, calls: Sequence[tuple[LayerCall, Tensor]]) -> tuple[LayerCall, Tensor] | None:
        """Positions of all calls side by side: Σ over calls of Σₜ δₜaₜᵀ is one sum over more positions."""
        own = [(call, gradient) for call, gradient in calls if isinstance(call, LinearCall)]
        rule = own[0][0]._rule
        deltas = torch.cat([call._positions(at_least_float32(gradient)) for call, gradient in own], 1)
        kept = [call._positions(call._inputs.read()) for call, _ in own if call._inputs is not None]
        inputs = UnchangedInput(rule.name, torch.cat(kept, 1)) if kept else None
        return cls(rule, inputs), deltas

    def _positions(self, tensor: Tensor) -> Tensor:
        """(examples, positions, features), with an example's rows among its positions."""
        return tensor.reshape(len(tensor) // self.rows_per_example, -1, tensor.shape[-1])


class TransposedLinearCall(LinearCall):
    """A call of a layer whose weight has inputs in its rows."""

    masks_rows = False  # rows belong to inputs, which are not masked

    def _factors_of_weight(self, inputs: Tensor, deltas: Tensor) -> LinearFactors:
        return TransposedFactors(deltas, inputs)


class LinearRule(LayerRule):
    module: nn.Linear
    call: type[LinearCall] = LinearCall

    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> LayerCall:
        return self.call(self, self.kept_input(args, kwargs, {"weight"}))

    def choose(self, factors: LinearFactors) -> str:
        self.estimate = choose(self.shapes(factors), self.forced_strategy, costs_on(factors.inputs.device.type))
        return self.estimate.strategy

    def shapes(self, factors: LinearFactors) -> Shapes:
        """The numbers that the choice of a strategy depends on."""
        _, positions, n_in = factors.inputs.shape
        n_out = factors.deltas.shape[2]
        grams = positions**2 if positions > 1 else 0
        return Shapes(
            weights=n_in * n_out,
            activations=positions * (n_in + n_out),
            product=float(positions * n_in * n_out),
            gram=float(grams * (n_in + n_out)),
            gram_passes=2.0 * grams if grams else float(n_in + n_out),
            itemsize=factors.inputs.element_size(),
        )


class TransposedLinearRule(LinearRule):
    """Linear layers whose weight is (inputs, outputs): ``Conv1D`` of ``transformers``, of which GPT-2 consists."""

    call = TransposedLinearCall
