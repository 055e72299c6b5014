"""An embedding table that is also the weight of a linear layer, as in language models with tied input and output.

The gradient of such a table W, (V, d), is gᵢ = Eᵢ + Lᵢ: rows Σₛ δₛ for the tokens that example i looks up, and Σₜ λₜxₜᵀ of the
linear layer with inputs xₜ and output gradients λₜ. Forming gᵢ takes V·d numbers for each example. Its norm needs none of them:

    ‖gᵢ‖² = ‖Eᵢ‖² + ‖Lᵢ‖² + 2·Σₜₛ λₜ[tokenₛ]·(xₜ·δₛ)

and the clipped sum is that of both uses, with the same coefficients. A bias of the linear layer adds its own squares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dp_microadam.clipping.embedding import EmbeddingCall
from dp_microadam.clipping.linear import LinearCall
from dp_microadam.clipping.outer_product import OF_POSITIONS, OF_SQUARES, OF_TERMS, Doubt, any_of, flagged_rows, squared_norms
from dp_microadam.clipping.rule import sum_of

if TYPE_CHECKING:
    from dp_microadam.clipping.joint import PendingUse
    from dp_microadam.clipping.recording import Use


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

    def doubt(self) -> Doubt | None:
        of_linear = self._linear.doubt()
        own = Doubt(self._norms, self._least, None)
        return any_of([own] if of_linear is None else [own, of_linear])

    def settle(self, flags: Tensor, count: int) -> Tensor:
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
