"""Records one forward and backward pass of a model: freezes parameters and installs hooks, and undoes both afterwards.

A first dimension that equals the batch size may be a coincidence: 32 positions in a batch of 32. Which tensors
grow with the batch is therefore learned once, from two synthetic batches of different sizes, and only looked up afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dp_microadam.clipping.operations import Operation, SharedTensor, call_of_operation, is_shared
from dp_microadam.clipping.rules import attention, recurrent
from dp_microadam.clipping.rules.rule import LayerCall, LayerRule
from dp_microadam.errors import InputError

# Two small sizes that few dimensions are multiples of; one that is takes another two passes.
LEARNING_SIZES = (7, 5)

Kind = tuple[str, ...]


class RestartLearning(Exception):
    """A size turned out to equal the batch size by coincidence; what was learned before may be wrong too."""


class RowTable:
    """Rows per example of the tensors that take part in an event; 0 for those without rows of examples.

    It is -1 where examples are along the second dimension, as in sequences with time first. An event is one call of a layer,
    or one operation on a shared parameter; ``kind`` says which, and ``ordinal`` tells its occurrences in one forward pass
    apart.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Kind, int], tuple[int, ...]] = {}
        self._shapes: dict[tuple[Kind, int], tuple[int, torch.Size]] = {}
        self._coincidences: set[tuple[Kind, int, int, bool]] = set()
        self.learning = False

    def look_up(self, kind: Kind, ordinal: int, shapes: Sequence[torch.Size], batch_size: int) -> tuple[int, ...]:
        """Rows per example of each tensor; the first is the event's result, the others what it was given."""
        known = self._known.get((kind, ordinal)) or (None if self.learning else self._common(kind))
        if known is None or len(known) != len(shapes):
            if not self.learning:
                raise InputError(
                    f"{describe(kind)} is used differently than when the model was checked; a forward pass must run the same "
                    "operations for every batch"
                )
            known = tuple(self._guess(kind, ordinal, index, shape, batch_size) for index, shape in enumerate(shapes))
            self._known[kind, ordinal] = known
        for index, (shape, rows) in enumerate(zip(shapes, known, strict=True)):
            if rows and _size(shape, second=rows < 0) != abs(rows) * batch_size:
                self._contradiction(kind, ordinal, index, shape, batch_size, rows < 0)
        if self.learning and not known[0]:
            self._refuse_growth_elsewhere(kind, ordinal, shapes[0], batch_size)
        return known

    def _guess(self, kind: Kind, ordinal: int, index: int, shape: torch.Size, batch_size: int) -> int:
        first = _size(shape)
        if first % batch_size == 0 and (kind, ordinal, index, False) not in self._coincidences:
            return first // batch_size
        second = _size(shape, second=True) == batch_size and (kind, ordinal, index, True) not in self._coincidences
        return -1 if second else 0

    def _common(self, kind: Kind) -> tuple[int, ...] | None:
        """The rows that all known occurrences of this kind agree on: longer sequences repeat an operation more often."""
        found = {rows for (other, _), rows in self._known.items() if other == kind}
        return found.pop() if len(found) == 1 else None

    def _contradiction(self, kind: Kind, ordinal: int, index: int, shape: torch.Size, batch_size: int, second: bool) -> None:
        if not self.learning:
            raise InputError(
                f"{describe(kind)} has a tensor of shape {tuple(shape)} in a batch of {batch_size}; its first dimension must "
                "be the batch, or its second, as where sequences have time first"
            )
        self._coincidences.add((kind, ordinal, index, second))
        self._known.clear()
        self._shapes.clear()
        raise RestartLearning

    def _refuse_growth_elsewhere(self, kind: Kind, ordinal: int, shape: torch.Size, batch_size: int) -> None:
        other_size, other_shape = self._shapes.setdefault((kind, ordinal), (batch_size, shape))
        if other_size != batch_size and other_shape != shape:
            raise InputError(
                f"{describe(kind)} results in shape {tuple(shape)} for a batch of {batch_size} and "
                f"{tuple(other_shape)} for one of {other_size}; its first dimension must be the batch, or its second, "
                "as where sequences have time first (keep several views of an example next to each other)"
            )


def _size(shape: torch.Size, *, second: bool = False) -> int:
    return shape[int(second)] if len(shape) > second else 0


def describe(kind: Kind) -> str:
    """The event as it is named in error messages."""
    if kind[0] == "layer":
        return f"layer {kind[1]!r}"
    return f"parameter {kind[1]!r} in {kind[0]!r}"


@dataclass(frozen=True)
class Use:
    """One use of some parameters in a forward pass; ``names`` maps the call's own keys to names in the model."""

    call: LayerCall
    names: Mapping[str, str]
    label: str


@dataclass(frozen=True)
class Observed:
    """What is observed of a model: layers with rules, and every trainable parameter with the modules that hold it.

    ``table`` is filled by the independence check.
    """

    rules: Mapping[str, LayerRule]
    parameters: Mapping[str, nn.Parameter]
    holders: Mapping[str, Sequence[tuple[nn.Module, str]]]
    recurrent: Sequence[nn.RNNBase]
    strategy: str | None
    table: RowTable
    operations: dict[str, LayerRule]


OutputGradientHook = Callable[[Use, Tensor], None]


class _Source(torch.autograd.Function):
    """Makes the first observed output require gradients, so that output gradients are computed although no parameter
    requires one; reports the gradient of that output."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, report: Callable[[Tensor], None]) -> Tensor:
        ctx.report = report
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        ctx.report(gradient)
        return None, torch.zeros(()), None


class Recording:
    """Context manager that observes a model's forward pass; ``backward`` then reports the output gradient of every use.

    Within it no parameter requires a gradient, so the backward pass computes output gradients and nothing else. A layer
    with a rule is observed as a whole. Elsewhere a parameter is a :class:`SharedTensor`, and the first operation that
    combines it with rows of examples is observed. Hooks exist only within the context: between two recordings
    the model can be saved, copied and evaluated like any other.

    Of ``batch_size`` examples, ``per_unit`` consecutive ones belong together; all calls then take the rows of such a unit for
    the rows of one example.
    """

    def __init__(
        self, observed: Observed, batch_size: int, on_output_gradient: OutputGradientHook, *, per_unit: int = 1
    ) -> None:
        self._observed = observed
        self._batch_size = batch_size
        self._per_unit = per_unit
        self._on_output_gradient = on_output_gradient
        self._handles: list[RemovableHandle] = []
        self._installed: list[LayerRule] = []
        self._anchor = torch.zeros((), requires_grad=True)
        self._step_by_step = ExitStack()
        self._in_backward = False
        self._over = False
        self._ordinals: Counter[tuple[str, ...]] = Counter()
        # Parameters of layers that are running: the layer's rule handles them.
        self._running: Counter[str] = Counter()
        self.uses: Counter[str] = Counter()

    def __enter__(self) -> Recording:
        try:
            for rule in self._observed.rules.values():
                rule.install()
                self._installed.append(rule)
                self._handles.append(rule.module.register_forward_pre_hook(self._before(rule)))
                self._handles.append(rule.module.register_forward_hook(self._after(rule), with_kwargs=True))
            for name, parameter in self._observed.parameters.items():
                parameter.requires_grad_(False)
                stand_in = SharedTensor.standing_for(name, parameter, self)
                for module, key in self._observed.holders[name]:
                    module._parameters[key] = stand_in  # type: ignore[assignment]
            self._step_by_step.enter_context(recurrent.step_by_step(self._observed.recurrent))
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self._restore()

    def _restore(self) -> None:
        for handle in self._handles:
            handle.remove()
        for rule in self._installed:
            rule.uninstall()
        for name, parameter in self._observed.parameters.items():
            parameter.requires_grad_(True)
            for module, key in self._observed.holders[name]:
                module._parameters[key] = parameter
        self._step_by_step.close()
        self._over = True
        # The hook usually holds a reference to this recording and to what was recorded. Such a cycle would keep all
        # activations alive until the garbage collector runs, which counts objects and not their size.
        self._on_output_gradient = _recording_is_over

    def backward(self, losses: Tensor, weights: Tensor) -> None:
        """Backpropagate Σ weights·losses; reports the output gradient of every observed use.

        Backpropagates to all leaves, not only to the anchor: a model may let a tensor of its own require gradients, as
        transformers does for checkpointing. Such tensors do not keep their gradient, because it is not clipped.
        """
        self._in_backward = True
        leaves = [leaf for leaf in _leaves(losses) if leaf is not self._anchor]
        before = [leaf.grad for leaf in leaves]
        try:
            for leaf in leaves:
                leaf.grad = None
            # Of one number, since torch imports sympy, for a second, where it is given gradients to start from.
            torch.autograd.backward((losses * weights).sum())
        finally:
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient

    def _before(self, rule: LayerRule) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._running.update(rule.full_names.values())

        return hook

    def _after(self, rule: LayerRule) -> Callable[..., Any]:
        kind = ("layer", rule.name, type(rule.module).__name__)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            self._running.subtract(rule.full_names.values())
            if not isinstance(output, Tensor):
                raise InputError(
                    f"layer {rule.name!r} ({kind[2]}) returns {type(output).__name__}, not a tensor; wrap it so that "
                    "its parameters sit in layers that return one tensor, or freeze it with requires_grad_(False)"
                )
            (rows,) = self._rows(kind, [output])
            if rows <= 0:
                return module.forward(*args, **kwargs)  # once more, with its parameters as shared tensors
            if self._in_backward:
                return self._repeated(output)
            call = rule.observe(args, kwargs, output)
            call.rows_per_example = rows
            return self._watch(Use(call, rule.full_names, f"layer {rule.name!r} ({kind[2]})"), output)

        return hook

    def operation(self, operation: Operation) -> Any:
        """Runs an operation that has at least one shared tensor among its arguments."""
        if operation.function is F.multi_head_attention_forward and not self._over:
            args, kwargs = operation.arguments()
            return attention.multi_head_attention_forward(*args, **kwargs)
        layer_does_it = any(self._running[name] > 0 for name in operation.parameters)
        with torch._C.DisableTorchFunctionSubclass():
            if layer_does_it or self._over or not torch.is_grad_enabled():
                return operation.run(lambda operand: operand.plain.detach())
            return self._observed_operation(operation)

    def _observed_operation(self, operation: Operation) -> Any:
        """A result that is the same for the whole batch is shared too; one with rows for each example is a use."""
        copied = None
        if not operation.tensors:
            copied = self._shared(operation)
            if not is_shared(copied):
                return copied
            output = copied.plain.detach().clone()
        else:
            output = operation.run(lambda operand: operand.plain.detach())
            _refuse_unsupported_results(operation, output)
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return output
        rows = self._rows((operation.name, *operation.parameters), [output, *operation.tensors])
        if not rows[0]:
            return self._shared(operation) if copied is None else copied
        if self._in_backward:
            return self._repeated(output)
        label = f"parameter {operation.parameters[0]!r} in {operation.name!r}"
        call, names = call_of_operation(replace(operation, rows=rows), copied, self._observed.operations)
        return self._watch(Use(call, names, label), output, second=rows[0] < 0)

    def _shared(self, operation: Operation) -> Any:
        """The operation with its graph; results that depend on parameters are shared tensors."""
        # A checkpointed block neither drops nor recomputes what belongs to parameters alone.
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            output = operation.run(lambda operand: operand.plain)
        roots = {name: root for operand in operation.operands for name, root in operand.roots.items()}

        def wrapped(value: Any) -> Any:
            depends = isinstance(value, Tensor) and value.requires_grad
            return SharedTensor.holding(value, roots, self) if depends else value

        return type(output)(map(wrapped, output)) if type(output) in (tuple, list) else wrapped(output)

    def _rows(self, kind: tuple[str, ...], tensors: Sequence[Tensor]) -> tuple[int, ...]:
        ordinal = -1
        if not self._in_backward:
            ordinal = self._ordinals[kind]
            self._ordinals[kind] += 1
        rows = self._observed.table.look_up(kind, ordinal, [tensor.shape for tensor in tensors], self._batch_size)
        return rows if self._per_unit == 1 else tuple(count * self._per_unit for count in rows)

    def _watch(self, use: Use, output: Tensor, *, second: bool = False) -> Tensor:
        self.uses.update(use.names.values())

        def report(gradient: Tensor) -> None:
            self._on_output_gradient(use, gradient.detach().transpose(0, 1) if second else gradient.detach())

        if output.requires_grad:
            output.register_hook(report)
            return output
        return _Source.apply(output.detach(), self._anchor, report)

    def _repeated(self, output: Tensor) -> Tensor:
        """A checkpointed block runs again during the backward pass: it must build the graph it built before."""
        return output if output.requires_grad else _Source.apply(output.detach(), self._anchor, _ignore)


def _leaves(output: Tensor) -> Iterator[Tensor]:
    """The tensors in which a backward pass from ``output`` would leave gradients."""
    seen: set[Any] = set()
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions]


def _refuse_unsupported_results(operation: Operation, output: Any) -> None:
    parameter = f"parameter {operation.parameters[0]!r}"
    if operation.name == "__setitem__":
        raise InputError(
            f"{parameter} is written into a tensor by index; use torch.where or torch.cat instead, or "
            "freeze it with requires_grad_(False)"
        )
    if isinstance(output, tuple) and any(isinstance(x, Tensor) and x.is_floating_point() for x in output):
        raise InputError(
            f"{parameter} is used in {operation.name!r}, which returns several tensors; freeze it with "
            "requires_grad_(False), or use operations that return one"
        )


def _ignore(gradient: Tensor) -> None:
    """For gradients that the first run has already reported."""


def _recording_is_over(use: Use, gradient: Tensor) -> None:
    """For a backward pass after the recording is over."""
