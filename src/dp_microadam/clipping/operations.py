"""Per-example gradients of one operation that combines shared parameters with rows of examples.

With δ the gradient of the operation's result, an example's gradient of a shared operand follows from its own rows of δ.
Additions have a formula; any other operation is repeated for each example alone and differentiated by torch.func. An operand
that was itself computed from parameters passes the gradient on through its graph.

While a model is recorded, its parameters are stand-ins, whose operations are observed one by one. What is computed from
parameters alone (a resized position embedding, a gathered table, a normalized weight) stays shared: it is the same
for every example and keeps its graph. The first operation whose result has rows for each example is the use of the
parameter that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dp_microadam.clipping.cost import Estimate
from dp_microadam.clipping.outer_product import piece_elements
from dp_microadam.clipping.rules.embedding import EmbeddingCall
from dp_microadam.clipping.rules.linear import LinearRule
from dp_microadam.clipping.rules.rule import (
    GradientRows,
    LayerCall,
    LayerRule,
    PartsCall,
    RuleCall,
    UnchangedInput,
    at_least_float32,
)
from dp_microadam.errors import InputError

if TYPE_CHECKING:
    from dp_microadam.clipping.recording import Recording

_SUMS = {
    torch.add,
    torch.Tensor.add,
    torch.Tensor.add_,
    torch.Tensor.__add__,
    torch.Tensor.__radd__,
    torch.Tensor.__iadd__,
}


class SharedTensor(torch.Tensor):
    """A tensor computed from parameters alone; operations on it are reported to the recording.

    Attributes:
        plain: the same values as an ordinary tensor, with the graph that leads to ``roots``.
        roots: the leaves of that graph, by parameter name.
    """

    plain: Tensor
    roots: Mapping[str, Tensor]
    recording: Recording

    @staticmethod
    def standing_for(name: str, parameter: nn.Parameter, recording: Recording) -> SharedTensor:
        root = parameter.detach().requires_grad_()
        shared = SharedTensor.holding(root, {name: root}, recording)
        shared._is_param = True  # isinstance(shared, nn.Parameter) still holds
        return shared

    @staticmethod
    def holding(plain: Tensor, roots: Mapping[str, Tensor], recording: Recording) -> SharedTensor:
        shared = plain.detach().as_subclass(SharedTensor)
        shared.plain, shared.roots, shared.recording = plain, roots, recording
        return shared

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves, structure = tree_flatten((args, kwargs or {}))
        recording = next(leaf.recording for leaf in leaves if is_shared(leaf))
        return recording.operation(Operation(function, leaves, structure))


def is_shared(value: Any) -> TypeGuard[SharedTensor]:
    return type(value) is SharedTensor


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_shared(value)


@dataclass(frozen=True)
class Operation:
    """An operation that has shared tensors among its arguments.

    ``rows`` holds the rows per example of its result and of each of its other tensors; 0 for those that are the same for all
    examples, negative where examples are along the second dimension.
    """

    function: Callable[..., Any]
    leaves: Sequence[Any]
    structure: Any
    rows: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "operation")

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors that are not shared."""
        return [leaf for leaf in self.leaves if _is_plain(leaf)]

    @property
    def operands(self) -> list[SharedTensor]:
        return [leaf for leaf in self.leaves if is_shared(leaf)]

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that take part."""
        return sorted(set().union(*(operand.roots for operand in self.operands)))

    def arguments(self, of: Callable[[SharedTensor], Any] = lambda operand: operand) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Its arguments, with something else in place of shared tensors."""
        return tree_unflatten([of(leaf) if is_shared(leaf) else leaf for leaf in self.leaves], self.structure)

    def run(self, of: Callable[[SharedTensor], Any]) -> Any:
        args, kwargs = self.arguments(of)
        return self.function(*args, **kwargs)

    def batch_first(self) -> Operation:
        """The operation on tensors whose second dimension, where that is the batch, has changed places with the first."""
        rows_of = iter(self.rows[1:])
        second = [_is_plain(leaf) and next(rows_of) < 0 for leaf in self.leaves]

        def turned(values: Sequence[Any]) -> list[Any]:
            return [value.transpose(0, 1) if turn else value for value, turn in zip(values, second, strict=True)]

        @wraps(self.function)
        def operation(*args: Any, **kwargs: Any) -> Tensor:
            values, structure = tree_flatten((args, kwargs))
            args, kwargs = tree_unflatten(turned(values), structure)
            output = self.function(*args, **kwargs)
            return output.transpose(0, 1) if self.rows[0] < 0 else output

        # These take all positions alike and need not know which dimension is which.
        function = self.function if self.function in (F.linear, F.embedding) else operation
        return Operation(function, turned(self.leaves), self.structure, tuple(map(abs, self.rows)))


class OperationCall(PartsCall):
    """One use of parameters in an operation; its clipped sums have the parameters' names in the model."""

    def __init__(self, operands: Sequence[SharedTensor], rows: int) -> None:
        super().__init__()
        self._operands = operands
        self.rows_per_example = rows
        self.roots = {name: root for operand in operands for name, root in operand.roots.items()}
        self.names = {name: name for name in self.roots}
        self.first = next(iter(self.names))

    def cotangents(self, deltas: Tensor, examples: slice) -> list[Tensor]:
        """For each operand, the gradient of each of these examples; ``deltas`` is (examples, rows, …)."""
        raise NotImplementedError

    def squared_norms(self, output_gradient: Tensor) -> Tensor:
        count = len(output_gradient) // self.rows_per_example
        step = self._examples_at_once(output_gradient.device)
        pieces = [self.per_example(output_gradient, slice(start, min(start + step, count))) for start in range(0, count, step)]
        self.parts = {name: GradientRows(torch.cat([piece[name] for piece in pieces])) for name in self.names}
        return self.norms_of_parts()

    def per_example(self, output_gradient: Tensor, examples: slice) -> Mapping[str, Tensor]:
        deltas = at_least_float32(output_gradient)[self.rows(examples)].unflatten(0, (-1, self.rows_per_example))
        with torch.enable_grad():
            return self._through_graphs(self.cotangents(deltas, examples))

    def _through_graphs(self, cotangents: list[Tensor]) -> dict[str, Tensor]:
        found = {name: cotangents[0].new_zeros(len(cotangents[0]), *root.shape) for name, root in self.roots.items()}
        for operand, cotangent in zip(self._operands, cotangents, strict=True):
            if is_root(operand):
                (name,) = operand.roots
                found[name] = found[name] + cotangent
                continue
            gradients = torch.autograd.grad(
                operand.plain,
                list(operand.roots.values()),
                cotangent.to(operand.plain.dtype),
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
            for name, gradient in zip(operand.roots, gradients, strict=True):
                if gradient is not None:
                    found[name] = found[name] + at_least_float32(gradient)
        return {name: gradient.detach() for name, gradient in found.items()}

    def _examples_at_once(self, device: torch.device) -> int:
        size = sum(max(operand.plain.numel(), 1) for operand in self._operands)
        return max(1, 4 * piece_elements(device) // size)


def is_root(operand: SharedTensor) -> bool:
    """Whether it is a parameter itself rather than something computed from parameters."""
    return any(operand.plain is root for root in operand.roots.values())


def unbroadcast(deltas: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of an operand that was broadcast to (examples, rows, …): summed over what it was repeated for."""
    count, dimensions = len(deltas), deltas.dim() - 1
    aligned = (1,) * (dimensions - len(shape)) + tuple(shape)
    repeated = [index + 1 for index in range(dimensions) if aligned[index] == 1 and deltas.shape[index + 1] > 1]
    return (deltas.sum(repeated, keepdim=True) if repeated else deltas).reshape(count, *shape)


class SumCall(OperationCall):
    """examples + parameter."""

    def cotangents(self, deltas: Tensor, examples: slice) -> list[Tensor]:
        return [unbroadcast(deltas, operand.plain.shape) for operand in self._operands]


class CopyCall(OperationCall):
    """A result with rows for each example that was made from parameters alone."""

    def __init__(self, result: SharedTensor, rows: int, all_rows_equal: bool) -> None:
        super().__init__([result], rows)
        self._all_rows_equal = all_rows_equal

    def cotangents(self, deltas: Tensor, examples: slice) -> list[Tensor]:
        shape = self._operands[0].plain.shape
        if self._all_rows_equal:
            return [deltas.sum(1, keepdim=True)]
        blocks = deltas.new_zeros(len(deltas), shape[0] // self.rows_per_example, *deltas.shape[1:])
        own = torch.arange(len(deltas), device=deltas.device)
        blocks[own, own + examples.start] = deltas
        return [blocks.flatten(1, 2)]


class RepeatedCall(OperationCall):
    """Any other operation, repeated for each example alone."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(operation.operands, operation.rows[0])
        self._operation = operation
        rows_of = iter(operation.rows[1:])
        # Of each tensor: how many rows an example has of it, 0 if it is the same for all.
        self._leaves: list[tuple[Any, int]] = []
        for leaf in operation.leaves:
            kept = _is_plain(leaf)
            self._leaves.append((UnchangedInput(self.first, leaf), next(rows_of)) if kept else (leaf, 0))

    def cotangents(self, deltas: Tensor, examples: slice) -> list[Tensor]:
        values: list[Any] = []
        varying: list[int] = []
        for index, (leaf, rows) in enumerate(self._leaves):
            value = leaf.read() if isinstance(leaf, UnchangedInput) else leaf
            if rows:
                value = value[examples.start * rows : examples.stop * rows].unflatten(0, (-1, rows))
                varying.append(index)
            values.append(value)
        shared = [index for index, (leaf, _) in enumerate(self._leaves) if is_shared(leaf)]
        operands = [at_least_float32(operand.plain) for operand in self._operands]

        def of_one_example(delta: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
            def forward(*parameters: Tensor) -> Tensor:
                filled = list(values)
                for index, value in zip(varying, own, strict=True):
                    filled[index] = value
                for index, parameter in zip(shared, parameters, strict=True):
                    filled[index] = parameter
                args, kwargs = tree_unflatten(filled, self._operation.structure)
                return self._operation.function(*args, **kwargs)

            return torch.func.vjp(forward, *operands)[1](delta)

        return list(self._for_each(of_one_example, deltas, [values[index] for index in varying]))

    def _for_each(
        self, of_one_example: Callable[..., tuple[Tensor, ...]], deltas: Tensor, own: list[Tensor]
    ) -> Sequence[Tensor]:
        before = torch.random.get_rng_state()
        try:
            return torch.func.vmap(of_one_example)(deltas, *own)
        except RuntimeError as error:
            if "random" in str(error):
                raise self._refusal("draws random numbers together with it") from error
        try:
            found = [of_one_example(deltas[i], *[value[i] for value in own]) for i in range(len(deltas))]
        except RuntimeError as error:
            raise self._refusal(f"cannot be repeated for one example: {str(error).splitlines()[0]}") from error
        if not torch.equal(before, torch.random.get_rng_state()):
            raise self._refusal("draws random numbers together with it")
        return [torch.stack(column) for column in zip(*found, strict=True)]

    def _refusal(self, why: str) -> InputError:
        return InputError(
            f"parameter {self.first!r} is used in {self._operation.name!r}, which {why}; use separate operations, or freeze "
            "it with requires_grad_(False)"
        )


def call_of_operation(
    operation: Operation, copied: SharedTensor | None, rules: dict[str, LayerRule]
) -> tuple[LayerCall, Mapping[str, str]]:
    """The call that computes this operation's gradients, and the names of its parameters.

    ``copied`` is the result itself, with its graph, if it was made from parameters alone.
    """
    if any(rows < 0 for rows in operation.rows):
        operation = operation.batch_first()
        if copied is not None:
            copied = SharedTensor.holding(copied.plain.transpose(0, 1), copied.roots, copied.recording)
    found = _layer_like(operation, rules)
    if found is not None:
        return found
    call = _by_formula(operation, copied)
    rule = rules.setdefault(f"{call.first} ({operation.name})", LayerRule(call.first, nn.Identity(), tuple(call.names)))
    rule.estimate = Estimate("keep", float("nan"), float("nan"), 4.0 * sum(r.numel() for r in call.roots.values()))
    return call, call.names


def _layer_like(operation: Operation, rules: dict[str, LayerRule]) -> tuple[LayerCall, Mapping[str, str]] | None:
    """F.linear and F.embedding on parameters themselves are clipped like the layers."""
    function = operation.function
    if function not in (F.linear, F.embedding) or not all(map(is_root, operation.operands)):
        return None
    args, kwargs = operation.arguments()
    signature = ("input", "weight", "bias") if function is F.linear else ("input", "weight", "padding_idx", "max_norm")
    given = dict(zip(signature, args, strict=False)) | kwargs
    keys = [key for key in ("weight", "bias") if is_shared(given.get(key))]
    names = {key: next(iter(given[key].roots)) for key in keys}
    if is_shared(given["input"]) or len(set(names.values())) < len(names):
        return None
    label = f"{names[keys[0]]} ({operation.name})"
    call: LayerCall
    if function is F.linear:
        rule = rules.setdefault(label, LinearRule(label, nn.Identity(), tuple(keys)))
        call = RuleCall(rule, UnchangedInput(label, given["input"]) if "weight" in keys else None)
    elif given.get("max_norm") is None and not given.get("scale_grad_by_freq"):
        call = EmbeddingCall(given["weight"].plain.shape, given.get("padding_idx"), given["input"])
    else:
        return None
    call.rows_per_example = operation.rows[0]
    return call, names


def _by_formula(operation: Operation, copied: SharedTensor | None) -> OperationCall:
    function, operands, rows = operation.function, operation.operands, operation.rows[0]
    if copied is not None:
        equal = function is torch.Tensor.expand or (function is torch.Tensor.repeat and len(operands[0].plain) == 1)
        if equal:
            copied = SharedTensor.holding(copied.plain[:1], copied.roots, copied.recording)
        return CopyCall(copied, rows, equal)
    if function in _SUMS and not operation.arguments()[1]:
        return SumCall(operands, rows)
    return RepeatedCall(operation)
