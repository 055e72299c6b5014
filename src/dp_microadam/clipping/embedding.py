"""Embeddings: an example's gradient is the sum of δ over its occurrences of each index, kept for those indices only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.clipping.rule import LayerCall, LayerRule, at_least_float32
from dp_microadam.errors import InputError


class EmbeddingCall(LayerCall):
    def __init__(self, module: nn.Embedding, indices: Tensor) -> None:
        self._module = module
        self._indices = indices.detach().clone()
        self._rows = self._owners = self._entries = torch.empty(0)

    def squared_norms(self, output_gradient: Tensor) -> Tensor:
        width = output_gradient.shape[-1]
        deltas = at_least_float32(output_gradient).reshape(-1, width)
        batch = len(self._indices)
        indices = self._indices.reshape(batch, -1)
        owners = torch.arange(batch, device=indices.device).view(-1, 1).expand_as(indices)
        keys = (owners * self._module.num_embeddings + indices).flatten()
        keys, positions = torch.unique(keys, return_inverse=True)
        self._rows = deltas.new_zeros(len(keys), width).index_add_(0, positions, deltas)
        self._owners = keys // self._module.num_embeddings
        self._entries = keys % self._module.num_embeddings
        if self._module.padding_idx is not None:
            self._rows[self._entries == self._module.padding_idx] = 0
        squares = torch.linalg.vector_norm(self._rows, dim=1).square()
        return deltas.new_zeros(batch).index_add_(0, self._owners, squares)

    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]:
        total = self._rows.new_zeros(self._module.weight.shape)
        scaled = self._rows * coefficients[self._owners].unsqueeze(1)
        return {"weight": total.index_add_(0, self._entries, scaled)}

    def remove(self, rows: Tensor) -> None:
        self._rows = self._rows.masked_fill(torch.isin(self._owners, rows).unsqueeze(1), 0)


class EmbeddingRule(LayerRule):
    module: nn.Embedding

    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> LayerCall:
        if self.module.max_norm is not None:
            raise InputError(
                f"embedding {self.name!r} has max_norm={self.module.max_norm}, which rewrites the weights by what "
                "the batch contains; build it with max_norm=None"
            )
        if self.module.scale_grad_by_freq:
            raise InputError(
                f"embedding {self.name!r} has scale_grad_by_freq=True, which counts over the whole batch; "
                "build it with scale_grad_by_freq=False"
            )
        return EmbeddingCall(self.module, self.only_input(args, kwargs))
