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

from dp_microadam.clipping.outer_product import PIECE_CPU, PIECE_GPU
from dp_microadam.clipping.recording import Use

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

    def doubt(self) -> None:
        """No norm is in doubt: it is that of the tensor that is summed."""

    def settle(self, flags: Tensor, count: int) -> Tensor:
        raise NotImplementedError("no norm is in doubt")

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
