"""The interface of layer families: a :class:`LayerRule` for each module, and a :class:`LayerCall` for each call of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dp_microadam.clipping.cost import Estimate, Shapes, choose
from dp_microadam.clipping.outer_product import Factors, OuterProductSum, any_flagged
from dp_microadam.errors import InputError


def at_least_float32(tensor: Tensor) -> Tensor:
    """The detached tensor; half precision becomes float32, in which norms can be computed."""
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class LayerCall(ABC):
    """One call of a layer: keeps its input, is given its output gradient, and returns its share of norms and clipped sums.

    Formal guarantees: row i of what ``squared_norms`` returns is the squared norm of the very gradient that
    ``clipped_sums`` multiplies with coefficient i, over all trainable parameters of the layer; it depends on example i
    alone. Errors of rounding stay below 1e-5 of the norm (see ``outer_product.py``).
    """

    # Consecutive rows that belong to one example: views of an augmented image, windows of an attention.
    rows_per_example = 1

    # Whether rows of parameters can be masked at no cost; ``row_masks`` holds ones and zeros by key.
    masks_rows = False
    row_masks: Mapping[str, Tensor] = MappingProxyType({})

    @abstractmethod
    def squared_norms(self, output_gradient: Tensor) -> Tensor:
        """‖gᵢ‖² for every example i; keeps what ``clipped_sums`` needs and releases the rest."""

    @abstractmethod
    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]:
        """Σᵢ cᵢgᵢ for each trainable parameter, by its name in the module."""

    @abstractmethod
    def per_example(self, output_gradient: Tensor, examples: slice) -> Mapping[str, Tensor]:
        """The gradients of these examples; called instead of ``squared_norms`` for parameters that are used several times."""

    @classmethod
    def joined(cls, calls: Sequence[tuple[Any, Tensor]]) -> tuple[LayerCall, Tensor] | None:
        """Several calls with the same parameters merged into one call with more positions, or None if that is not supported."""
        return None

    def rows(self, examples: slice) -> slice:
        """The rows of these examples."""
        return slice(examples.start * self.rows_per_example, examples.stop * self.rows_per_example)

    def uncertain(self) -> Tensor | None:
        """Which examples' norms have to be recomputed; None, the default, if all are right as they are."""
        return None

    def recompute(self, rows: Tensor) -> Tensor:
        """The squared norms after those of these examples were taken again; called if there are any."""
        raise NotImplementedError("a call with uncertain norms must recompute them")


class KeptGradients(Protocol):
    """The gradients of one parameter, in whatever form they are kept until their clipped sum is taken."""

    def squared_norms(self) -> Tensor: ...

    def weighted_sum(self, coefficients: Tensor) -> Tensor: ...


class PartsCall(LayerCall):
    """A call that keeps the gradients of each parameter in ``parts``, by name in the module; ``squared_norms`` fills it."""

    def __init__(self) -> None:
        self.parts: Mapping[str, KeptGradients] = {}

    def norms_of_parts(self) -> Tensor:
        """The squared norms of all parts together."""
        return sum_of([part.squared_norms() for part in self.parts.values()])

    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]:
        return {name: part.weighted_sum(coefficients) for name, part in self.parts.items()}

    def uncertain(self) -> Tensor | None:
        return any_flagged([part.uncertain() for part in self._products()])

    def recompute(self, rows: Tensor) -> Tensor:
        for part in self._products():
            part.recompute(rows)
        return self.norms_of_parts()

    def _products(self) -> list[OuterProductSum]:
        """The weights; other parameters' gradients are formed, so that nothing about them is uncertain."""
        return [part for part in self.parts.values() if isinstance(part, OuterProductSum)]


class RuleCall(PartsCall):
    """One call of a layer whose rule computes gradients from the layer's input and output gradient."""

    def __init__(self, rule: LayerRule, inputs: UnchangedInput | None) -> None:
        super().__init__()
        self.rule = rule
        self.inputs = inputs
        self.masks_rows = rule.masks_rows

    def squared_norms(self, output_gradient: Tensor) -> Tensor:
        self.parts = self.parts_of(self.read(), at_least_float32(output_gradient))
        self.inputs = None
        return self.norms_of_parts()

    def parts_of(self, inputs: Tensor | None, deltas: Tensor) -> Mapping[str, KeptGradients]:
        return self.rule.parts(inputs, deltas, self.rows_per_example, self.row_masks)

    def per_example(self, output_gradient: Tensor, examples: slice) -> Mapping[str, Tensor]:
        rows, inputs = self.rows(examples), self.read()
        deltas = at_least_float32(output_gradient)[rows]
        return self.rule.gradients(None if inputs is None else inputs[rows], deltas, self.rows_per_example)

    @classmethod
    def joined(cls, calls: Sequence[tuple[Any, Tensor]]) -> tuple[LayerCall, Tensor] | None:
        return calls[0][0].rule.joined(calls)

    def read(self) -> Tensor | None:
        return None if self.inputs is None else self.inputs.read()


def sum_of(rows: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape, in one operation."""
    return rows[0] if len(rows) == 1 else torch.stack(list(rows)).sum(0)


def masked(values: Tensor, mask: Tensor | None, dimension: int = 1) -> Tensor:
    """Zeros along this dimension where the mask is zero."""
    return values if mask is None else values * mask.view(-1, *[1] * (values.dim() - dimension - 1))


class LayerRule:
    """The clipping rule of one module: creates a :class:`LayerCall` for each of its forward passes.

    A rule defines :meth:`gradients`. It may define :meth:`parts` to compute norms and sums without forming gradients.
    """

    parameter_names = frozenset({"weight", "bias", "gain"})
    """The names of the parameters that modules with this rule may have."""

    needs_input = frozenset({"weight"})
    """The names of those whose gradients depend on the layer's input."""

    masks_rows = True
    """Whether ``parts`` masks rows of all parameters."""

    def __init__(self, name: str, module: nn.Module, trainable: tuple[str, ...], forced_strategy: str | None = None) -> None:
        self.name = name
        self.module = module
        self.trainable = trainable
        self.forced_strategy = forced_strategy
        # The parameters' names in the model, under which clipped sums are stored.
        self.full_names = {key: f"{name}.{key}" if name else key for key in trainable}
        self.estimate: Estimate | None = None

    def gradients(self, inputs: Tensor | None, deltas: Tensor, rows: int) -> dict[str, Tensor]:
        """The gradients of the trainable parameters for each example, which has so many consecutive ``rows``.

        ``inputs`` is the layer's input, or None if no trainable parameter needs it; ``deltas`` is the output gradient.
        """
        raise NotImplementedError(f"{type(self).__name__} must define gradients")

    def parts(self, inputs: Tensor | None, deltas: Tensor, rows: int, masks: Mapping[str, Tensor]) -> dict[str, KeptGradients]:
        """The same gradients, kept in whatever form norms and clipped sums are taken from; ``masks`` says which rows count."""
        found = self.gradients(inputs, deltas, rows)
        return {key: GradientRows(masked(gradients, masks.get(key))) for key, gradients in found.items()}

    def joined(self, calls: Sequence[tuple[RuleCall, Tensor]]) -> tuple[RuleCall, Tensor] | None:
        """Several calls of layers with the same parameters and family as one call, if the family supports it."""
        return None

    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> LayerCall:
        """Called after the module's forward; returns the call, which is given the output gradient later."""
        return RuleCall(self, self.kept_input(args, kwargs))

    def install(self) -> None:
        """Called before a forward pass that will be observed."""

    def uninstall(self) -> None:
        """Undo ``install``; called on errors too."""

    def only_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The single tensor that the layer was called with."""
        values = (*args, *kwargs.values())
        if len(values) != 1 or not isinstance(values[0], Tensor):
            raise InputError(f"layer {self.name!r} was called with {len(values)} arguments; it takes one tensor")
        return values[0]

    def kept_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnchangedInput | None:
        """The saved input, or None if no trainable parameter needs it: a frozen weight costs no memory."""
        if self.needs_input.isdisjoint(self.trainable):
            return None
        return UnchangedInput(self.name, self.only_input(args, kwargs))


class OuterProductRule(LayerRule, ABC):
    """A layer with a bias, and with a weight whose gradient is a sum of outer products."""

    output_dimension = 1
    """The dimension of output gradients along which outputs, the rows of the weight, are."""

    @abstractmethod
    def factors(self, inputs: Tensor, deltas: Tensor, rows: int) -> Factors:
        """The factors of the weight's gradient for examples of so many rows."""

    @abstractmethod
    def shapes(self, factors: Factors) -> Shapes:
        """The numbers that the choice of a strategy depends on."""

    @abstractmethod
    def bias_gradients(self, deltas: Tensor, rows: int) -> Tensor:
        """The gradient of the bias for each example."""

    def gradients(self, inputs: Tensor | None, deltas: Tensor, rows: int) -> dict[str, Tensor]:
        found = {"bias": self.bias_gradients(deltas, rows)} if "bias" in self.trainable else {}
        if inputs is not None:
            factors = self.factors(inputs, deltas, rows)
            found["weight"] = factors.per_example(slice(0, len(factors)))
        return found

    def parts(self, inputs: Tensor | None, deltas: Tensor, rows: int, masks: Mapping[str, Tensor]) -> dict[str, KeptGradients]:
        found = super().parts(None, deltas, rows, masks)
        if inputs is not None:
            factors = self.factors(inputs, masked(deltas, masks.get("weight"), self.output_dimension % deltas.dim()), rows)
            found["weight"] = OuterProductSum(factors, self.choose(self.shapes(factors)))
        return found

    def choose(self, shapes: Shapes) -> str:
        """The strategy for a weight of these shapes."""
        self.estimate = choose(shapes, self.forced_strategy)
        return self.estimate.strategy


class UnchangedInput:
    """An input saved for the backward pass; reading it raises :class:`InputError` if it was modified in place meanwhile."""

    def __init__(self, layer: str, tensor: Tensor) -> None:
        self._layer = layer
        self._tensor = tensor.detach()
        self._version = self._tensor._version

    def accept(self) -> None:
        """Take the tensor as it is now for the one that was saved."""
        self._version = self._tensor._version

    def read(self) -> Tensor:
        if self._tensor._version != self._version:
            raise InputError(
                f"the input of layer {self._layer!r} was overwritten in place after the layer used it; "
                "use the out-of-place form of the operation that follows, such as relu instead of relu_"
            )
        return at_least_float32(self._tensor)


class GradientRows:
    """Per-example gradients of a small parameter, formed and kept: row i is the gradient of example i."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def squared_norms(self) -> Tensor:
        return torch.linalg.vector_norm(self._rows.reshape(len(self._rows), -1), dim=1).square()

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        return torch.tensordot(coefficients, self._rows, dims=1)
