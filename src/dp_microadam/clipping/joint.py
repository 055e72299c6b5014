"""Gradients of parameters that are used several times in one forward pass, or that are scaled before they are clipped.

A parameter's gradient is the sum over its uses, and only the norm of that sum may be compared with the bound. Uses that
can be joined become one call with more positions. For others, and for scaled gradients, each example's gradient is
formed: a few examples at a time, once for the norm and, unless it could be kept, once more for the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dp_microadam.clipping.outer_product import (
    OF_POSITIONS,
    OF_SQUARES,
    OF_TERMS,
    PIECE_CPU,
    PIECE_GPU,
    UncertainNorms,
    any_uncertain,
    flagged_rows,
    squared_norms,
)
from dp_microadam.clipping.recording import Use
from dp_microadam.clipping.rules.embedding import EmbeddingCall
from dp_microadam.clipping.rules.linear import LinearCall
from dp_microadam.clipping.rules.rule import sum_of

# Elements of formed gradients that are kept between norms and sum: 128 MB in float32.
KEPT_ELEMENTS = 1 << 25


@dataclass(frozen=True)
class PendingUse:
    """A use and its output gradient, waiting for the other uses of its parameters."""

    use: Use
    gradient: Tensor


class JointCall:
    """Norms and clipped sum of gradients to which several uses contribute, each scaled elementwise.

    Formal guarantees: what is added to the sum are the tensors whose norms were taken, times the coefficients, so
    that no example contributes more than the bound, up to the rounding of one multiplication.
    """

    def __init__(self, members: Sequence[PendingUse], scales: Mapping[str, Tensor], count: int) -> None:
        self._members = members
        self._scales = scales
        self._count = count
        self._kept: list[dict[str, Tensor]] | None = None
        self._gone: Tensor | None = None  # which examples are removed
        self._step = 1

    def squared_norms(self) -> Tensor:
        size = sum(gradient[0].numel() for gradient in self._gradients(slice(0, 1)).values())
        limit = PIECE_CPU if self._members[0].gradient.device.type == "cpu" else PIECE_GPU
        self._step = max(1, 4 * limit // max(1, size))
        keep: list[dict[str, Tensor]] | None = [] if size * self._count <= KEPT_ELEMENTS else None
        norms = []
        for examples in self._pieces():
            gradients = self._gradients(examples)
            squares = [torch.linalg.vector_norm(part.reshape(len(part), -1), dim=1).square() for part in gradients.values()]
            norms.append(torch.stack(squares).sum(0))
            if keep is not None:
                keep.append(gradients)
        self._kept = keep
        if keep is not None:
            self._members = []  # inputs and output gradients are free
        return torch.cat(norms)

    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]:
        return self._weighted(coefficients, lambda gradients: gradients)

    def clipped_row_norms(self, coefficients: Tensor) -> Mapping[str, Tensor]:
        """Σᵢ cᵢ‖row of gᵢ‖ for every row, the first dimension, of each parameter."""
        return self._weighted(coefficients, lambda rows: torch.linalg.vector_norm(rows.reshape(*rows.shape[:2], -1), dim=2))

    def _weighted(self, coefficients: Tensor, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Σᵢ cᵢ·of(gᵢ), where ``of`` takes the gradients of several examples at once."""
        total: dict[str, Tensor] = {}
        for index, examples in enumerate(self._pieces()):
            gradients = self._gradients(examples) if self._kept is None else self._kept[index]
            for name, part in gradients.items():
                if self._gone is not None:
                    part = part.masked_fill(self._gone[examples].view(-1, *[1] * (part.dim() - 1)), 0)
                piece = torch.tensordot(coefficients[examples], of(part), dims=1)
                total[name] = piece if name not in total else total[name] + piece
        return total

    def remove(self, rows: Tensor) -> None:
        self._gone = torch.zeros(self._count, dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)

    def uncertain(self) -> None:
        """No norm is uncertain: it is that of the tensor that is summed."""

    def recompute(self, flags: Tensor, count: int) -> Tensor:
        raise NotImplementedError("no norm is uncertain")

    def _pieces(self) -> Iterator[slice]:
        return (slice(start, min(start + self._step, self._count)) for start in range(0, self._count, self._step))

    def _gradients(self, examples: slice) -> dict[str, Tensor]:
        """The scaled gradients of these examples, by parameter name."""
        total: dict[str, Tensor] = {}
        for member in self._members:
            for key, part in member.use.call.per_example(member.gradient, examples).items():
                name = member.use.names[key]
                total[name] = part if name not in total else total[name] + part
        return {name: part * self._scales[name] if name in self._scales else part for name, part in total.items()}


def group_by_parameter(uses: Sequence[PendingUse]) -> list[list[PendingUse]]:
    """Groups of uses that share a parameter, directly or through other uses."""
    groups: list[tuple[set[str], list[PendingUse]]] = []
    for item in uses:
        names, members = set(item.use.names.values()), [item]
        apart = []
        for other_names, others in groups:
            if names.isdisjoint(other_names):
                apart.append((other_names, others))
            else:
                names |= other_names
                members = others + members
        groups = [*apart, (names, members)]
    return [members for _, members in groups]


def merge_uses(members: Sequence[PendingUse]) -> list[PendingUse]:
    """Uses of the same parameters by the same layer family as one use, where the family supports it."""
    kinds: dict[object, list[PendingUse]] = {}
    for item in members:
        kinds.setdefault((type(item.use.call), tuple(sorted(item.use.names.items()))), []).append(item)
    found = []
    for same in kinds.values():
        both = None
        if len(same) > 1:
            both = type(same[0].use.call).joined([(item.use.call, item.gradient) for item in same])
        if both is None:
            found.extend(same)
        else:
            call, gradient = both
            found.append(PendingUse(Use(call, same[0].use.names, same[0].use.label), gradient))
    return found


class TiedCall:
    """Norms and clipped sum of a table that one linear layer and one embedding share.

    Formal guarantees: those of ``outer_product.py``. The three terms of a squared norm may cancel. Where their sum is below a
    fraction of what may have been cancelled, gᵢ is formed, its norm is taken from that tensor, and that tensor enters the sum.
    """

    def __init__(
        self, linear: LinearCall, of_linear: Tensor, embedding: EmbeddingCall, of_embedding: Tensor, has_bias: bool
    ) -> None:
        self._linear, self._embedding = linear, embedding
        self._of_linear, self._of_embedding = of_linear, of_embedding
        self._inputs, self._deltas = linear.factors(of_linear)
        self._has_bias = has_bias
        self._norms = self._least = torch.empty(0)
        self._formed: Sequence[Tensor] = ()  # pieces of the examples whose gradient is formed

    def squared_norms(self) -> Tensor:
        tokens, shifts = self._embedding.occurrences(self._of_embedding)
        looked_up = self._deltas.gather(2, tokens.unsqueeze(1).expand(-1, self._deltas.shape[1], -1))
        cross = (looked_up * (self._inputs @ shifts.transpose(1, 2))).sum((1, 2))
        of_inputs, of_shifts = (torch.linalg.vector_norm(part, dim=2) for part in (self._inputs, shifts))
        of_cross = (looked_up.abs() * of_inputs.unsqueeze(2) * of_shifts.unsqueeze(1)).sum((1, 2))
        own = self._linear.squared_norms(self._of_linear) + self._embedding.squared_norms(self._of_embedding)
        self._norms = own + 2 * cross
        of_positions = max(OF_TERMS, OF_POSITIONS / self._deltas.shape[1])
        self._least = (OF_SQUARES * own).maximum(2 * of_positions * of_cross)
        return self._norms

    def uncertain(self) -> UncertainNorms | None:
        of_linear = self._linear.uncertain()
        own = UncertainNorms(self._norms, self._least, None)
        return any_uncertain([own] if of_linear is None else [own, of_linear])

    def recompute(self, flags: Tensor, count: int) -> Tensor:
        rows = flagged_rows(flags, count)
        rows = rows[self._deltas[rows].flatten(1).any(1)] if rows.device.type == "cpu" else rows
        self._formed = rows.split(1) if len(rows) else ()  # a table each: as large as all weights of a small model
        for row in self._formed:
            squares = sum_of([squared_norms(part) for part in self._gradients(row).values()])
            self._norms = self._norms.index_copy(0, row, squares)
        return self._norms

    def clipped_sums(self, coefficients: Tensor) -> Mapping[str, Tensor]:
        ordinary = coefficients.index_fill(0, torch.cat(list(self._formed)), 0) if self._formed else coefficients
        totals = dict(self._linear.clipped_sums(ordinary))
        totals["weight"] = totals["weight"] + self._embedding.clipped_sums(ordinary)["weight"]
        for row in self._formed:
            if bool(coefficients[row] != 0):  # 0·∞ is NaN
                for name, part in self._gradients(row).items():
                    totals[name] = totals[name] + coefficients[row] * part[0]
        return totals

    def remove(self, rows: Tensor) -> None:
        self._linear.remove(rows)
        self._embedding.remove(rows)

    def _gradients(self, row: Tensor) -> dict[str, Tensor]:
        """The gradients of one example, as a batch of one, by the linear layer's names."""
        found = {"weight": self._deltas[row].transpose(1, 2) @ self._inputs[row]}
        if self._has_bias:
            found["bias"] = self._deltas[row].sum(1)
        only = slice(int(row), int(row) + 1)
        found["weight"] += self._embedding.per_example(self._of_embedding, only)["weight"]
        return found


def tied_call(members: Sequence[PendingUse]) -> tuple[TiedCall, Use] | None:
    """The call of a table that one linear layer and one embedding share, and the linear layer's use; None for other members."""
    linear = [member for member in members if type(member.use.call) is LinearCall]
    embedding = [member for member in members if type(member.use.call) is EmbeddingCall]
    if not (len(members) == 2 and len(linear) == len(embedding) == 1):
        return None
    (head,), (table,) = linear, embedding
    if head.use.names.get("weight") != table.use.names["weight"]:
        return None
    assert isinstance(head.use.call, LinearCall)
    assert isinstance(table.use.call, EmbeddingCall)
    return TiedCall(head.use.call, head.gradient, table.use.call, table.gradient, "bias" in head.use.names), head.use
