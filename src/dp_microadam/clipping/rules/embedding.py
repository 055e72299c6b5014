"""Embeddings: an example's gradient is the sum of δ over its occurrences of each index, kept for those indices only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.clipping.rules.rule import LayerCall, LayerRule, at_least_float32
from dp_microadam.errors import InputError


class EmbeddingCall(LayerCall):
    """A lookup of ``indices``, (rows, …), in a table of shape ``table``."""

    def __init__(self, table: torch.Size, padding_idx: int | None, indices: Tensor) -> None:
        self._table = table
        self._padding_idx = padding_idx
        self._indices = indices.detach().clone()
        self._rows = self._owners = self._entries = torch.empty(0)

    def occurrences(self, output_gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Indices as (examples, occurrences), and the gradient of each occurrence."""
        examples = len(self._indices) // self.rows_per_example
        indices = self._indices.reshape(examples, -1)
        deltas = at_least_float32(output_gradient).reshape(*indices.shape, output_gradient.shape[-1])
        if self._padding_idx is not None:
            padding = self._padding_idx % self._table[0]
            deltas = deltas.masked_fill((indices == padding).unsqueeze(2), 0)
        return indices, deltas

    def squared_norms(self, output_gradient: Tensor) -> Tensor:
        indices, deltas = self.occurrences(output_gradient)
        owners = torch.arange(len(indices), device=indices.device).view(-1, 1).expand_as(indices)
        keys, positions = distinct((owners * self._table[0] + indices).flatten())
        self._rows = deltas.new_zeros(len(keys), self._table[1]).index_add_(0, positions, deltas.flatten(0, 1))
        self._owners = keys // self._table[0]
        self._entries = keys % self._table[0]
        squares = torch.linalg.vector_norm(self._rows, dim=1).square()
        return deltas.new_zeros(len(indices)).index_add_(0, self._owners, squares)

    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]:
        total = self._rows.new_zeros(self._table)
        scaled = self._rows * coefficients[self._owners].unsqueeze(1)
        return {"weight": total.index_add_(0, self._entries, scaled)}

    def per_example(self, output_gradient: Tensor, examples: slice) -> Mapping[str, Tensor]:
        indices, deltas = (part[examples] for part in self.occurrences(output_gradient))
        gradients = deltas.new_zeros(len(indices), *self._table)
        return {"weight": gradients.scatter_add_(1, indices.unsqueeze(2).expand_as(deltas), deltas)}

    @classmethod
    def joined(cls, calls: Sequence[tuple[EmbeddingCall, Tensor]]) -> tuple[LayerCall, Tensor] | None:
        """Occurrences of all calls side by side."""
        parts = [call.occurrences(gradient) for call, gradient in calls]
        indices = torch.cat([indices for indices, _ in parts], 1)
        return EmbeddingCall(calls[0][0]._table, None, indices), torch.cat([deltas for _, deltas in parts], 1)


def distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of at least zero without repetitions, in ascending order, and the place of each given one among them.

    Unlike :func:`torch.unique`, it does not wait for a GPU to say how many there are: the result is as long as the keys, and
    ends in zeros that no place refers to.
    """
    ascending, order = keys.sort()
    ranks = torch.zeros_like(keys)
    ranks[1:] = (ascending[1:] != ascending[:-1]).cumsum(0)
    return torch.zeros_like(keys).scatter_(0, ranks, ascending), torch.empty_like(keys).scatter_(0, order, ranks)


class EmbeddingRule(LayerRule):
    module: nn.Embedding | nn.EmbeddingBag

    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> LayerCall:
        refuse_batch_counts(self.name, self.module)
        return EmbeddingCall(self.module.weight.shape, self.module.padding_idx, self.only_input(args, kwargs))


def refuse_batch_counts(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Raise :class:`InputError` for options that use statistics of the whole batch."""
    if module.max_norm is not None:
        raise InputError(
            f"embedding {name!r} has max_norm={module.max_norm}, which rewrites the weights by what the batch "
            "contains; build it with max_norm=None"
        )
    if module.scale_grad_by_freq:
        raise InputError(
            f"embedding {name!r} has scale_grad_by_freq=True, which counts over the whole batch; build it with "
            "scale_grad_by_freq=False"
        )


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
