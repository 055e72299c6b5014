"""Any other module without children: torch.func repeats its forward for each example alone and differentiates it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from dp_microadam.clipping.cost import Estimate
from dp_microadam.clipping.outer_product import PIECE_CPU, PIECE_GPU
from dp_microadam.clipping.rule import GradientRows, LayerCall, LayerRule, UnchangedInput, at_least_float32
from dp_microadam.errors import InputError


class GenericCall(LayerCall):
    def __init__(self, rule: GenericRule, leaves: list[Any], structure: Any) -> None:
        self._rule = rule
        self._leaves = leaves
        self._structure = structure
        self._parts: dict[str, GradientRows] = {}

    def squared_norms(self, output_gradient: Tensor) -> Tensor:
        leaves = [leaf.read() if isinstance(leaf, UnchangedInput) else leaf for leaf in self._leaves]
        self._leaves = []
        pieces: list[dict[str, Tensor]] = []
        step = self._rule.examples_at_once(output_gradient.device)
        for start in range(0, len(output_gradient), step):
            rows = slice(start, start + step)
            pieces.append(self._rule.gradients(leaves, self._structure, output_gradient.detach(), rows))
        joined = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        self._parts = {name: GradientRows(at_least_float32(rows)) for name, rows in joined.items()}
        return torch.stack([part.squared_norms() for part in self._parts.values()]).sum(0)

    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]:
        return {name: part.weighted_sum(coefficients) for name, part in self._parts.items()}

    def remove(self, rows: Tensor) -> None:
        for part in self._parts.values():
            part.remove(rows)


class GenericRule(LayerRule):
    """Works for modules that take tensors with a leading batch dimension and return one such tensor."""

    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> LayerCall:
        leaves, structure = tree_flatten((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, Tensor) and (leaf.dim() == 0 or len(leaf) != len(output)):
                raise InputError(
                    f"module {self.name!r} ({type(self.module).__name__}) was given a tensor of shape "
                    f"{tuple(leaf.shape)} beside a batch of {len(output)}; pass it as an attribute, or expand it to "
                    "one row per example"
                )
        kept = [UnchangedInput(self.name, leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        size = sum(dict(self.module.named_parameters())[name].numel() for name in self.trainable)
        self.estimate = Estimate("keep", float("nan"), float("nan"), 4.0 * size)
        return GenericCall(self, kept, structure)

    def examples_at_once(self, device: torch.device) -> int:
        size = sum(parameter.numel() for parameter in self.module.parameters())
        return max(1, (4 * PIECE_CPU if device.type == "cpu" else PIECE_GPU) // max(1, size))

    def gradients(self, leaves: list[Any], structure: Any, deltas: Tensor, rows: slice) -> dict[str, Tensor]:
        """One gradient per example of the slice and trainable parameter."""
        parameters = {name: p.detach() for name, p in self.module.named_parameters()}
        buffers = {name: b.detach() for name, b in self.module.named_buffers()}
        varying = {name: parameters.pop(name) for name in self.trainable}
        tensors = [leaf[rows] for leaf in leaves if isinstance(leaf, Tensor)]

        def of_one_example(delta: Tensor, *example: Tensor) -> dict[str, Tensor]:
            given = iter(example)
            filled = [next(given).unsqueeze(0) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(filled, structure)

            def forward(chosen: dict[str, Tensor]) -> Tensor:
                state = {**parameters, **buffers, **chosen}
                return torch.func.functional_call(self.module, state, args, kwargs)

            pull_back = torch.func.vjp(forward, varying)[1]
            return pull_back(delta.unsqueeze(0))[0]

        try:
            return torch.func.vmap(of_one_example)(deltas[rows], *tensors)
        except RuntimeError as error:
            raise InputError(
                f"module {self.name!r} ({type(self.module).__name__}) cannot be differentiated per example by "
                f"torch.func: {str(error).splitlines()[0]}; move random or in-place operations into modules without "
                "parameters, or freeze it"
            ) from error
