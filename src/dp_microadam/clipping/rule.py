"""What every layer family provides: a rule per module, and a record per call of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dp_microadam.clipping.cost import Estimate
from dp_microadam.errors import InputError


def at_least_float32(tensor: Tensor) -> Tensor:
    """Detached, and in a precision in which norms may be taken."""
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class LayerCall(ABC):
    """One call of a layer: its input, then its output gradient, then its share of norms and clipped sums.

    Formal guarantees: row i of what ``squared_norms`` returns is the squared norm of the very gradient that
    ``clipped_sums`` multiplies with coefficient i, over all trainable parameters of the layer; it depends on example i
    alone. Errors of rounding stay below 1e-5 of the norm (see ``outer_product.py``).
    """

    # Consecutive rows that belong to one example: views of an augmented image, windows of an attention.
    rows_per_example = 1

    # Families that can leave out rows of a weight, its outputs, at no cost; ``row_masks`` holds ones and zeros by key.
    masks_rows = False
    row_masks: Mapping[str, Tensor] = MappingProxyType({})

    @abstractmethod
    def squared_norms(self, output_gradient: Tensor) -> Tensor:
        """‖gᵢ‖² for every example i; keeps what ``clipped_sums`` needs and lets go of the rest."""

    @abstractmethod
    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]:
        """Σᵢ cᵢgᵢ for each trainable parameter, by its name in the module."""

    @abstractmethod
    def remove(self, rows: Tensor) -> None:
        """Take these examples out of what is kept, whatever it holds (0·NaN would be NaN)."""

    @abstractmethod
    def per_example(self, output_gradient: Tensor, examples: slice) -> Mapping[str, Tensor]:
        """The gradients themselves, for calls that are not clipped on their own; used instead of ``squared_norms``."""

    @classmethod
    def joined(cls, calls: Sequence[tuple[LayerCall, Tensor]]) -> tuple[LayerCall, Tensor] | None:
        """Several calls with the same parameters as one call with more positions, where the family can do so."""
        return None

    def masked(self, deltas: Tensor, key: str, dimension: int) -> Tensor:
        """δ without the outputs whose row of parameter ``key`` does not train."""
        if key not in self.row_masks:
            return deltas
        shape = [1] * deltas.dim()
        shape[dimension] = -1
        return deltas * self.row_masks[key].view(shape)

    def rows(self, examples: slice) -> slice:
        """The rows of these examples."""
        return slice(examples.start * self.rows_per_example, examples.stop * self.rows_per_example)


class KeptGradients(Protocol):
    """What is kept of one parameter's gradients between their norms and their clipped sum."""

    def squared_norms(self) -> Tensor: ...

    def weighted_sum(self, coefficients: Tensor) -> Tensor: ...

    def remove(self, rows: Tensor) -> None: ...


class PartsCall(LayerCall):
    """A call that keeps a part for each of its parameters; ``squared_norms`` fills ``parts``, by the name in the module."""

    def __init__(self) -> None:
        self.parts: dict[str, KeptGradients] = {}

    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]:
        return {name: part.weighted_sum(coefficients) for name, part in self.parts.items()}

    def remove(self, rows: Tensor) -> None:
        for part in self.parts.values():
            part.remove(rows)


def folded(rows: Tensor, rows_per_example: int) -> Tensor:
    """The sum of each example's rows."""
    return rows if rows_per_example == 1 else rows.unflatten(0, (-1, rows_per_example)).sum(1)


class LayerRule(ABC):
    """How the gradients of one module are clipped: makes a :class:`LayerCall` for each of its forward passes."""

    parameter_names = frozenset({"weight", "bias", "gain"})
    """What the parameters of the modules it serves are called."""

    def __init__(self, name: str, module: nn.Module, trainable: tuple[str, ...], forced_way: str | None = None) -> None:
        self.name = name
        self.module = module
        self.trainable = trainable
        self.forced_way = forced_way
        # The parameters' names in the model, which clipped sums are kept under.
        self.full_names = {key: f"{name}.{key}" if name else key for key in trainable}
        self.estimate: Estimate | None = None

    @abstractmethod
    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> LayerCall:
        """Called after the module's forward; what it returns waits for the output gradient."""

    def install(self) -> None:  # noqa: B027 - most rules have nothing to prepare
        """Called before a forward pass that will be observed."""

    def uninstall(self) -> None:  # noqa: B027
        """Undo ``install``; called on errors too."""

    def only_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The single tensor that layers of torch.nn take."""
        values = (*args, *kwargs.values())
        if len(values) != 1 or not isinstance(values[0], Tensor):
            raise InputError(f"layer {self.name!r} was called with {len(values)} arguments; it takes one tensor")
        return values[0]

    def kept_input(self, args: tuple[Any, ...], kwargs: dict[str, Any], needed_by: set[str]) -> UnchangedInput | None:
        """The input, if one of the trainable parameters needs it: a frozen weight costs no memory."""
        if needed_by.isdisjoint(self.trainable):
            return None
        return UnchangedInput(self.name, self.only_input(args, kwargs))


class UnchangedInput:
    """An input kept for later; refuses to be read after the model wrote into it."""

    def __init__(self, layer: str, tensor: Tensor) -> None:
        self._layer = layer
        self._tensor = tensor.detach()
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

    def remove(self, rows: Tensor) -> None:
        self._rows = self._rows.index_fill(0, rows, 0)
