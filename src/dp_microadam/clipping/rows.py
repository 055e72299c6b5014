"""Learns which tensors have a batch dimension, and which are the same for the whole batch.

A first dimension that equals the batch size may be a coincidence: 32 positions in a batch of 32. Which tensors
grow with the batch is therefore learned once, from two synthetic batches of different sizes, and only looked up afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dp_microadam.errors import InputError

# Two sizes that few dimensions are multiples of.
LEARNING_SIZES = (13, 11)

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
