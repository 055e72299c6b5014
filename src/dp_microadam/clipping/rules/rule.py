"""The interface of layer families: a :class:`LayerRule` for each module, and a :class:`LayerCall` for each call of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dp_microadam.clipping.cost import Estimate
from dp_microadam.clipping.outer_product import OuterProductSum, UncertainNorms, any_uncertain
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

    # Whether the family can mask rows of a weight, its outputs, at no cost; ``row_masks`` holds ones and zeros by key.
    masks_rows = False
    row_masks: Mapping[str, Tensor] = MappingProxyType({})

    @abstractmethod
    def squared_norms(self, output_gradient: Tensor) -> Tensor:
        """‖gᵢ‖² for every example i; keeps what ``clipped_sums`` needs and releases the rest."""

    @abstractmethod
    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]:
        """Σᵢ cᵢgᵢ for each trainable parameter, by its name in the module."""

    @abstractmethod
    def remove(self, rows: Tensor) -> None:
        """Set what is kept of these examples to zero; a coefficient of zero is not enough, as 0·NaN is NaN."""

    @abstractmethod
    def per_example(self, output_gradient: Tensor, examples: slice) -> Mapping[str, Tensor]:
        """The gradients of these examples; called instead of ``squared_norms`` for parameters that are used several times."""

    @classmethod
    def joined(cls, calls: Sequence[tuple[LayerCall, Tensor]]) -> tuple[LayerCall, Tensor] | None:
        """Several calls with the same parameters merged into one call with more positions, or None if that is not supported."""
        return None

    def masked(self, deltas: Tensor, key: str, dimension: int) -> Tensor:
        """δ with zeros for outputs whose row of parameter ``key`` is not trained."""
        if key not in self.row_masks:
            return deltas
        shape = [1] * deltas.dim()
        shape[dimension] = -1
        return deltas * self.row_masks[key].view(shape)

    def rows(self, examples: slice) -> slice:
        """The rows of these examples."""
        return slice(examples.start * self.rows_per_example, examples.stop * self.rows_per_example)

    def uncertain(self) -> UncertainNorms | None:
        """Which of the norms may have to be recomputed; None, the default, if all are right as they are."""
        return None

    def recompute(self, flags: Tensor, count: int) -> Tensor:
        """The squared norms after those of the ``count`` flagged examples were taken again; called if there are any."""
        raise NotImplementedError("a call with uncertain norms must recompute them")


class KeptGradients(Protocol):
    """The gradients of one parameter, in whatever form they are kept until their clipped sum is taken."""

    def squared_norms(self) -> Tensor: ...

    def weighted_sum(self, coefficients: Tensor) -> Tensor: ...

    def remove(self, rows: Tensor) -> None: ...


class PartsCall(LayerCall):
    """A call that keeps the gradients of each parameter in ``parts``, by name in the module; ``squared_norms`` fills it."""

    def __init__(self) -> None:
        self.parts: dict[str, KeptGradients] = {}

    def norms_of_parts(self) -> Tensor:
        """The squared norms of all parts together."""
        return sum_of([part.squared_norms() for part in self.parts.values()])

    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]:
        return {name: part.weighted_sum(coefficients) for name, part in self.parts.items()}

    def uncertain(self) -> UncertainNorms | None:
        return any_uncertain([found for part in self._products() if (found := part.uncertain()) is not None])

    def recompute(self, flags: Tensor, count: int) -> Tensor:
        for part in self._products():
            part.recompute(flags, count)
        return self.norms_of_parts()

    def _products(self) -> list[OuterProductSum]:
        """The weights; other parameters' gradients are formed, so that nothing about them is uncertain."""
        return [part for part in self.parts.values() if isinstance(part, OuterProductSum)]

    def remove(self, rows: Tensor) -> None:
        for part in self.parts.values():
            part.remove(rows)


def sum_of(rows: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape, in one operation."""
    return rows[0] if len(rows) == 1 else torch.stack(list(rows)).sum(0)


def folded(rows: Tensor, rows_per_example: int) -> Tensor:
    """The sum of each example's rows."""
    return rows if rows_per_example == 1 else rows.unflatten(0, (-1, rows_per_example)).sum(1)


class LayerRule(ABC):
    """The clipping rule of one module: creates a :class:`LayerCall` for each of its forward passes."""

    parameter_names = frozenset({"weight", "bias", "gain"})
    """The names of the parameters that modules with this rule may have."""

    def __init__(self, name: str, module: nn.Module, trainable: tuple[str, ...], forced_strategy: str | None = None) -> None:
        self.name = name
        self.module = module
        self.trainable = trainable
        self.forced_strategy = forced_strategy
        # The parameters' names in the model, under which clipped sums are stored.
        self.full_names = {key: f"{name}.{key}" if name else key for key in trainable}
        self.estimate: Estimate | None = None

    @abstractmethod
    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> LayerCall:
        """Called after the module's forward; returns the call, which is given the output gradient later."""

    def install(self) -> None:  # noqa: B027 - most rules have nothing to prepare
        """Called before a forward pass that will be observed."""

    def uninstall(self) -> None:  # noqa: B027
        """Undo ``install``; called on errors too."""

    def only_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The single tensor that the layer was called with."""
        values = (*args, *kwargs.values())
        if len(values) != 1 or not isinstance(values[0], Tensor):
            raise InputError(f"layer {self.name!r} was called with {len(values)} arguments; it takes one tensor")
        return values[0]

    def kept_input(self, args: tuple[Any, ...], kwargs: dict[str, Any], needed_by: set[str]) -> UnchangedInput | None:
        """The saved input, or None if no trainable parameter needs it: a frozen weight costs no memory."""
        if needed_by.isdisjoint(self.trainable):
            return None
        return UnchangedInput(self.name, self.only_input(args, kwargs))


class UnchangedInput:
    """An input saved for the backward pass; reading it raises :class:`InputError` if it was modified in place meanwhile."""

    def __init__(self, layer: str, tensor: Tensor) -> None:
        self._layer = layer
        self._tensor = tensor.detach()
        self._version = self._tensor._version
        self.dtype = tensor.dtype

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

    def remove(self, rows: Tensor) -> None:
        self._rows = self._rows.index_fill(0, rows, 0)
