"""Linear layers on inputs of any rank: gᵢ = Σₜ δᵢₜaᵢₜᵀ over all positions t between the batch and the features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.clipping.cost import Shapes, choose, costs_on
from dp_microadam.clipping.outer_product import (
    OF_TERMS,
    Factors,
    Measured,
    OuterProductSum,
    least_of_squares,
    measured_by_grams,
)
from dp_microadam.clipping.precision import has_tensor_cores, kernels_run_on
from dp_microadam.clipping.rule import GradientRows, LayerCall, LayerRule, PartsCall, UnchangedInput, at_least_float32
from dp_microadam.clipping.split_bf16 import EXACT, number_of_products, product


def _squares_in_double(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows.flatten(1), dim=1, dtype=torch.float64).square()


class LinearFactors(Factors):
    """a as (B, T, inputs) and δ as (B, T, outputs).

    With ``terms``, float32 products are taken in bfloat16 numbers, so many for each element of δ and of a (``split_bf16.py``).
    """

    def __init__(self, inputs: Tensor, deltas: Tensor, terms: tuple[int, int] | None = None) -> None:
        super().__init__(inputs, deltas)
        self.terms = terms

    def gradient_size(self) -> int:
        return self.inputs.shape[2] * self.deltas.shape[2]

    def ghost(self) -> Measured:
        if self.inputs.shape[1] == 1:  # one outer product: ‖δaᵀ‖ = ‖δ‖‖a‖, and nothing can cancel
            inputs, deltas = _squares_in_double(self.inputs), _squares_in_double(self.deltas)
            norms = (inputs * deltas).to(self.deltas.dtype)
            # Nor can squares of float32 vanish in double, and a product that does is far below any bound to clip to. A model
            # that diverges has many such examples; formed one by one, they would take several times as long as the step.
            return Measured(norms, least_of_squares(inputs + deltas) if self.deltas.dtype == torch.float64 else None)
        of_deltas, of_inputs = self.terms or (0, 0)
        return measured_by_grams(
            self._product(self.inputs, self.inputs.transpose(1, 2), (of_inputs, of_inputs)),
            self._product(self.deltas, self.deltas.transpose(1, 2), (of_deltas, of_deltas)),
            len(self),
        )

    def tiles(self) -> Measured:
        from dp_microadam.clipping.norms_triton import tile_norms

        factors = (self.inputs, self.deltas)
        narrow = self.terms == (1, 1)
        norms, inputs, deltas = tile_norms(*(factor.bfloat16() if narrow else factor for factor in factors))
        return Measured(norms, (OF_TERMS * inputs * deltas).maximum(least_of_squares(inputs + deltas)))

    def per_example(self, rows: slice | Tensor) -> Tensor:
        return self._product(self.deltas[rows].transpose(1, 2), self.inputs[rows], self.terms or (0, 0))

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        scaled = self.deltas * coefficients.view(-1, 1, 1)
        terms = (EXACT, self.terms[1]) if self.terms else (0, 0)
        return self._product(scaled.flatten(0, 1).t(), self.inputs.flatten(0, 1), terms)

    def _product(self, first: Tensor, second: Tensor, terms: tuple[int, int]) -> Tensor:
        return first @ second if self.terms is None else product(first, second, terms)


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
            terms = self._rule.terms(self._inputs.dtype, output_gradient)
            factors = self._factors_of_weight(self._positions(self._inputs.read()), self.masked(deltas, "weight", 2), terms)
            self.parts["weight"] = OuterProductSum(factors, self._rule.choose(factors))
        del self._inputs
        return self.norms_of_parts()

    def per_example(self, output_gradient: Tensor, examples: slice) -> Mapping[str, Tensor]:
        deltas = self._positions(at_least_float32(output_gradient))[examples]
        found = {"bias": deltas.sum(1)} if "bias" in self._rule.trainable else {}
        if self._inputs is not None:
            factors = self._factors_of_weight(self._positions(self._inputs.read())[examples], deltas, None)
            found["weight"] = factors.per_example(slice(None))
        return found

    def _factors_of_weight(self, inputs: Tensor, deltas: Tensor, terms: tuple[int, int] | None) -> LinearFactors:
        return LinearFactors(inputs, deltas, terms)

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

    def _factors_of_weight(self, inputs: Tensor, deltas: Tensor, terms: tuple[int, int] | None) -> LinearFactors:
        return TransposedFactors(deltas, inputs, None if terms is None else (terms[1], terms[0]))


class LinearRule(LayerRule):
    module: nn.Linear
    call: type[LinearCall] = LinearCall

    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> LayerCall:
        return self.call(self, self.kept_input(args, kwargs, {"weight"}))

    def terms(self, inputs: torch.dtype, output_gradient: Tensor) -> tuple[int, int] | None:
        """In how many bfloat16 numbers to split δ and a, or None for float32 products."""
        kinds = (output_gradient.dtype, inputs)
        if not self.tensor_cores or not set(kinds) <= {torch.float32, torch.bfloat16}:
            return None
        if not has_tensor_cores(output_gradient.device):
            return None
        of_deltas, of_inputs = (1 if kind == torch.bfloat16 else EXACT for kind in kinds)
        return of_deltas, of_inputs

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
            gram_launches=13 if grams else 0,
            bf16_products=number_of_products(factors.terms) if factors.terms else 0,
            tiles=factors.inputs.dtype == torch.float32 and kernels_run_on(factors.inputs.device),
        )


class TransposedLinearRule(LinearRule):
    """Linear layers whose weight is (inputs, outputs): ``Conv1D`` of ``transformers``, of which GPT-2 consists."""

    call = TransposedLinearCall
