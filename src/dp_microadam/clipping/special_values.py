"""Synthetic batches in which numbers are NaN, infinite or exactly zero, and passes over them that always end.

Missing numbers are what code looks for and fills in, often from the whole batch: the column's mean in place of NaN, its
largest number in place of infinity, a column left out because it is zero in every example. On random numbers such code does
nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dp_microadam.clipping.batches import batch_size
from dp_microadam.clipping.check_errors import refuse_if_out_of_memory
from dp_microadam.clipping.integer_ranges import indexed
from dp_microadam.errors import InputError

SPECIAL_VALUES = MappingProxyType({"NaN": math.nan, "infinite": math.inf, "minus infinity": -math.inf, "exactly 0": 0.0})

# The part of an example's numbers that is special.
_PART = 0.3

# How far ordinary neighbours are moved towards the end of the range of their numbers.
_TOWARDS_EXTREME = 0.9999

# A pass may take so many times the operations of a pass over ordinary numbers, and so many more.
_TIMES_AS_LONG = 100
_LONGER = 10_000


@dataclass(frozen=True)
class SpecialBatches:
    """Neighbouring batches around examples with special values; ``middle`` are the rows of those examples.

    Attributes:
        kind: what the values are, in words.
        several: all examples have special values, some of them in the same places.
        one: the examples in the middle as in ``several``, all others replaced by ones without special values.
    """

    kind: str
    several: Any
    one: Any
    middle: Tensor


def rows_needed(batch: Any) -> int:
    """The number of examples in :func:`special_batches`: one for each leaf of floating-point numbers, a first and a last.

    Zero if the batch holds no floating-point numbers.
    """
    leaves = sum(_is_floating(leaf) for leaf in tree_leaves(batch))
    return leaves + 2 if leaves else 0


def with_extremes(ordinary: Any) -> Any:
    """The same examples, but the first is larger and the last smaller than the others, within the range of their numbers.

    Beside ordinary neighbours the largest or smallest number of a column would often stay what it is without them.
    """

    def spread(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()):
            return leaf
        low, high = leaf.amin(), leaf.amax()
        if bool((low >= 0) & (high <= 1)):
            low, high = torch.zeros_like(low), torch.ones_like(high)
        first, last = leaf[:1], leaf[-1:]
        first = first.lerp(high.expand_as(first), _TOWARDS_EXTREME)
        return torch.cat([first, leaf[1:-1], last.lerp(low.expand_as(last), _TOWARDS_EXTREME)])

    return tree_map(spread, ordinary)


def special_batches(examples: Any, ordinary: Any, seed: int) -> Iterator[SpecialBatches]:
    """For each special value: batches of ``rows_needed`` examples; integers stay as they are.

    Each example in the middle has special values in one leaf only, because a target that is NaN would hide what is done about
    an input that is NaN. Zeros hide nothing: all examples have them in every leaf, and the first has nothing else.
    """
    count = batch_size(examples)
    for kind, value in SPECIAL_VALUES.items():
        several = _with_special(examples, value, seed)
        one = tree_map(_middle_of, several, ordinary)
        yield SpecialBatches(kind, several, one, torch.arange(1, count - 1))


def _with_special(examples: Any, value: float, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    last = batch_size(examples) - 1
    own_row = iter(range(1, last))

    def special(leaf: Any) -> Any:
        if not _is_floating(leaf):
            return leaf
        rows = [0, next(own_row), last] if value else list(range(last + 1))
        mask = torch.zeros(leaf.shape, dtype=torch.bool)
        mask[rows] = _some_places(leaf.shape[1:], generator)
        mask[0] |= not value
        return leaf.masked_fill(mask.to(leaf.device), value)

    return tree_map(special, examples)


def _some_places(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Some places in an example of this shape, but not all if there are several."""
    chosen = torch.rand(shape, generator=generator) < _PART
    if chosen.numel():
        chosen.view(-1)[-1] = False
        chosen.view(-1)[0] = True
    return chosen


def _middle_of(leaf: Any, other: Any) -> Any:
    return torch.cat([other[:1], leaf[1:-1], other[-1:]]) if isinstance(leaf, Tensor) else leaf


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


class GuardedPasses:
    """Passes over special values, each of which may fail, and none of which may run forever or end the process.

    Code that tries again until a number is finite or above zero does not end on an example without any. A pass is given up
    after many times the operations of the first, which must be one over ordinary numbers.
    """

    def __init__(self) -> None:
        self._limit: float | None = None

    def try_pass(self, one_pass: Callable[[], Any]) -> Any:
        """What the pass returns, or None if it fails; raises :class:`InputError` where the pass does."""
        guard = _Guard(self._limit)
        try:
            with warnings.catch_warnings(), guard:
                warnings.simplefilter("ignore")  # about numbers that the caller's data need not contain
                result = one_pass()
        except InputError:
            raise
        except Exception as error:  # a model that refuses these numbers
            refuse_if_out_of_memory(error)
            return None
        if self._limit is None:
            self._limit = _TIMES_AS_LONG * guard.operations + _LONGER
        return result


class _Guard(TorchDispatchMode):
    """Raises an exception before an operation that a GPU would answer with the end of the process, or after too many."""

    def __init__(self, limit: float | None) -> None:
        super().__init__()
        self._limit = math.inf if limit is None else limit
        self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations += 1
        if self.operations > self._limit:
            raise RuntimeError("the pass takes too many operations")
        if args and isinstance(args[0], Tensor) and args[0].device.type != "cpu":
            refuse_invalid(func.overloadpacket, args)
        return func(*args, **(kwargs or {}))


_aten = torch.ops.aten
_PROBABILITIES = {_aten.binary_cross_entropy, _aten.bernoulli, _aten.multinomial}


def refuse_invalid(operation: Any, args: tuple[Any, ...]) -> None:
    """Raise :class:`IndexError` or :class:`ValueError` for an index or a probability out of range, as the CPU does."""
    for index, size in indexed(operation, args):
        if index.numel() and bool(((index < -size) | (index >= size)).any()):
            raise IndexError("an index is out of range")
    if operation in _PROBABILITIES and not bool(((args[0] >= 0) & torch.isfinite(args[0])).all()):
        raise ValueError("a probability is not a number from 0 to 1")
