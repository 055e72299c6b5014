"""Bags of embeddings: every entry of a bag has the bag's δ as gradient, weighted as the bag weighs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.clipping.embedding import EmbeddingCall, EmbeddingRule, refuse_batch_counts
from dp_microadam.clipping.rule import LayerCall, at_least_float32
from dp_microadam.errors import InputError


class EmbeddingBagCall(EmbeddingCall):
    """Bags as a rectangle of indices, (bags, entries), with a weight for each entry and feature."""

    def __init__(self, table: torch.Size, indices: Tensor, weights: Tensor) -> None:
        super().__init__(table, None, indices)
        self._weights = weights

    def occurrences(self, output_gradient: Tensor) -> tuple[Tensor, Tensor]:
        deltas = at_least_float32(output_gradient).unsqueeze(1) * self._weights
        return super().occurrences(deltas)


class EmbeddingBagRule(EmbeddingRule):
    module: nn.EmbeddingBag

    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> LayerCall:
        refuse_batch_counts(self.name, self.module)
        given = dict(zip(("input", "offsets", "per_sample_weights"), args, strict=False)) | kwargs
        indices, weights = given["input"].detach(), given.get("per_sample_weights")
        if weights is not None and weights.requires_grad:
            raise InputError(
                f"embedding {self.name!r} is given per_sample_weights that require gradients; use an Embedding and "
                "multiply its rows"
            )
        present = torch.ones_like(indices, dtype=torch.bool)
        if indices.dim() == 1:
            indices, weights, present = rectangle(indices, weights, self._starts(given["offsets"], indices))
        if self.module.padding_idx is not None:
            present &= indices != self.module.padding_idx % self.module.num_embeddings
        return EmbeddingBagCall(self.module.weight.shape, indices, self._weights(indices, present, weights))

    def _starts(self, offsets: Tensor, indices: Tensor) -> Tensor:
        """Where each bag starts, and the end of the last one."""
        if self.module.include_last_offset:
            return offsets
        return torch.cat([offsets, offsets.new_full((1,), len(indices))])

    def _weights(self, indices: Tensor, present: Tensor, given: Tensor | None) -> Tensor:
        """∂bag/∂entry, (bags, entries, 1), or (bags, entries, features) for a maximum."""
        table = at_least_float32(self.module.weight)
        if self.module.mode == "max":
            entries = table[indices].masked_fill(~present.unsqueeze(2), -torch.inf)
            largest = torch.zeros_like(entries).scatter_(1, entries.argmax(1, keepdim=True), 1.0)
            return largest * present.unsqueeze(2)
        weights = present.to(table.dtype)
        if given is not None:
            weights = weights * given.detach()
        if self.module.mode == "mean":
            weights = weights / present.sum(1, keepdim=True).clamp(min=1)
        return weights.unsqueeze(2)


def rectangle(indices: Tensor, weights: Tensor | None, starts: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Bags of different lengths as rows of one length, and which entries are there."""
    lengths = starts.diff()
    columns = torch.arange(max(1, int(lengths.max())), device=indices.device)
    present = columns < lengths.unsqueeze(1)
    if len(indices) == 0:
        return present.long(), None, present
    places = (starts[:-1].unsqueeze(1) + columns).clamp(max=len(indices) - 1)
    return indices[places] * present, None if weights is None else weights[places], present
