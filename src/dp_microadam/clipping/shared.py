"""Tensor subclass that stands in for parameters outside layers with a rule: class tokens, position embeddings, layer scales.

While a model is recorded, its parameters are such stand-ins, whose operations are observed one by one. What is computed from
parameters alone (a resized position embedding, a gathered table, a normalized weight) stays shared: it is the same
for every example and keeps its graph. The first operation whose result has rows for each example is the use of the
parameter that counts; ``operations.py`` turns its output gradient into one gradient per example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

if TYPE_CHECKING:
    from dp_microadam.clipping.recording import Recording


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
        return recording.operation(function, leaves, structure)


def is_shared(value: Any) -> TypeGuard[SharedTensor]:
    return type(value) is SharedTensor
