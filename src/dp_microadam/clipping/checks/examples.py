"""Synthetic examples for the checks, and the company in which they are tried: who is beside whom, at which scale and size."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dp_microadam.clipping.batches import batch_size, is_floating, replace_rows, select
from dp_microadam.errors import InputError

# Most checks run on this many examples: a first, a middle and a last one.
CHECK_SIZE = 3

_FEWEST_GIVEN = 4

_SEEDS = 2**31
_BETWEEN_SEEDS = 1_000_003

# What is tried for integers of which an example has several: the range of a pixel, then fewer, as for a short vocabulary.
_BOUNDS = (256, 128, 64, 32, 16, 8, 4)

# The last example keeps its scale: its loss is not saturated, and shows what the large ones do to it.
_SCALES = ((1e3, -30.0, 1.0), (-1e4, 1e6, 1.0))

# In a large batch of copies of one example.
_COPIES_REPLACED = 4


def new_seed() -> int:
    """A seed from the operating system's entropy."""
    return secrets.randbelow(_SEEDS)


@dataclass(frozen=True)
class SyntheticExamples:
    """Draws examples shaped like those of ``batch``, of which no value is used, or takes those of ``given``.

    Floating-point numbers are uniform in [0, 1), where roots and logarithms exist. Integers are 0 or 1, which are valid
    classes, tokens and masks. So among any three examples two have the same class. Where an example has several integers and
    ``bounds`` has a larger bound for their leaf, the first example goes up to it, others up to a fourth and a sixteenth of it.
    """

    batch: Any
    given: Any = None
    seed: int = 0
    bounds: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.given is not None and batch_size(self.given) < _FEWEST_GIVEN:
            raise InputError(f"synthetic_batch holds {batch_size(self.given)} examples; it must hold at least {_FEWEST_GIVEN}")

    def draw(self, count: int) -> tuple[Any, Any]:
        """``count`` examples, and ``count`` others: example i of these differs from example i in every number."""
        if self.given is not None:
            return _repeated(self.given, count)
        return self._random(count, flip=False), self._random(count, flip=True)

    def simple(self) -> SyntheticExamples:
        """The same with seed 0, and integers of 0 and 1."""
        return replace(self, seed=0, bounds=())

    def reseeded(self, step: int) -> SyntheticExamples:
        """The same with another seed, which follows from this one and ``step``."""
        return replace(self, seed=(self.seed + _BETWEEN_SEEDS * step) % _SEEDS)

    def with_large_integers(self, accepts: Callable[[Any], bool]) -> SyntheticExamples:
        """The same with integers up to the largest power of two that is accepted in each leaf, at most the range of a pixel.

        Elsewhere than on the CPU only bytes are tried: an index out of range may end the process there.
        """
        leaves = tree_leaves(self.batch)
        bounds = [2] * len(leaves)
        for position, leaf in enumerate(leaves):
            if self.given is None and _has_several_integers(leaf) and (leaf.device.type == "cpu" or leaf.dtype == torch.uint8):
                largest = torch.iinfo(leaf.dtype).max
                tried = (
                    bound for bound in _BOUNDS if bound <= largest + 1 and accepts(self._with_largest(position, bound - 1))
                )
                bounds[position] = next(tried, 2)
        return replace(self, bounds=bounds)

    def _with_largest(self, position: int, number: int) -> Any:
        """Examples with ``number`` in all of one leaf: a drawn one may happen to stay below the size of a small table."""
        leaves, structure = tree_flatten(self.simple().draw(CHECK_SIZE)[0])
        leaves[position] = torch.full_like(leaves[position], number)
        return tree_unflatten(leaves, structure)

    def _random(self, count: int, *, flip: bool) -> Any:
        integers = torch.Generator().manual_seed(self.seed)
        floats = torch.Generator().manual_seed(self.seed + int(flip))
        bounds = iter(self.bounds or [2] * len(tree_leaves(self.batch)))

        def like(leaf: Any) -> Any:
            bound = next(bounds)
            if not isinstance(leaf, Tensor):
                return leaf
            shape = (count, *leaf.shape[1:])
            if is_floating(leaf):
                return torch.rand(shape, generator=floats).to(device=leaf.device, dtype=leaf.dtype, non_blocking=True)
            tops = torch.tensor([bound, max(2, bound // 4), max(2, bound // 16)])[torch.arange(count) % 3]
            numbers = (torch.rand(shape, generator=integers) * tops.view(-1, *[1] * (len(shape) - 1))).int()
            # Steps are drawn in both cases: later leaves must not differ.
            steps = torch.randint(1, bound, shape, generator=integers, dtype=torch.int32)
            return ((numbers + steps) % bound if flip else numbers).to(device=leaf.device, dtype=leaf.dtype, non_blocking=True)

        return tree_map(like, self.batch)


class Company(NamedTuple):
    """A batch, and the places in it of examples that must give there what each of ``alone``, batches of one, gives."""

    batch: Any
    places: Sequence[int]
    alone: Sequence[Any]


def company(source: SyntheticExamples, cast: Callable[[Any], Any] = lambda batch: batch) -> Iterator[list[Company]]:
    """Who is tried beside whom. Of each list the first counts on which no exception is raised.

    Beside one and two others, beside one that is a thousand and one that is a million times as large, beside examples that
    resemble them, and beside missing numbers.
    """
    drawn, others = map(cast, source.draw(CHECK_SIZE))
    # The first has smaller integers than the others, and differs from the last in every number; two of three classes agree.
    batch = joined(_row(drawn, 1), _row(drawn, 0), _row(others, 1))
    first, last = _row(batch, 0), _row(batch, 2)
    yield [Company(batch, [0, 2], [first, last])]
    yield [Company(joined(last, first), [0, 1], [last, first])]
    for factors in _SCALES if any(map(is_floating, tree_leaves(batch))) else ():
        yield [Company(_scaled(batch, factors), [2], [last])]
    yield [_resembling(_row(drawn, 0), _row(others, 0)), Company(repeat_example(drawn, 0, 3), [0, 2], 2 * [_row(drawn, 0)])]
    missing = [_without_numbers(first, index) for index, leaf in enumerate(tree_leaves(first)) if is_floating(leaf)]
    if missing and all(leaf.device.type == "cpu" for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)):
        yield [Company(joined(batch, *missing), [2, *range(3, 3 + len(missing))], [last, *missing])]


def half_replaced(source: SyntheticExamples) -> tuple[Any, Any, Tensor]:
    """Six examples, the same with half of them replaced, and the places of those that are not.

    Each of these has a replaced one before it, after it, and in the same place of the other half.
    """
    batch, others = source.draw(6)
    return batch, replace_rows(batch, others, torch.tensor([1, 3, 4])), torch.tensor([0, 2, 5])


def copies_replaced(source: SyntheticExamples, count: int) -> tuple[Any, Any, Tensor]:
    """A batch of this size, the same with some examples replaced, and the places of those that are not.

    Three quarters of it are copies of one example, all of whose tokens are 1, so that a layer with room for only a part of the
    batch, or of the tokens in it, runs out of it.
    The first four copies and the last are replaced, together with the first example of the batch. A single one could be
    replaced by an example that takes the same room.
    """
    quarter = count // 4
    replaced = torch.tensor([0, *range(quarter, quarter + min(_COPIES_REPLACED, max(1, quarter))), count - 1])
    examples, others = source.draw(count)
    batch = repeat_example(examples, quarter, count)
    if source.given is None:
        for leaf in filter(_has_several_integers, tree_leaves(batch)):
            leaf[quarter:] = 1
    places = torch.arange(count)
    return batch, replace_rows(batch, others, replaced), places[~torch.isin(places, replaced)]


def joined(*batches: Any) -> Any:
    """The examples of all batches in one."""
    return tree_map(lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *batches)


def repeat_example(batch: Any, index: int, count: int) -> Any:
    """``count`` examples: those of the batch before ``index``, then copies of the one at ``index``."""
    return select(batch, torch.arange(count).clamp(max=index))


def _row(batch: Any, index: int) -> Any:
    return select(batch, torch.tensor([index]))


def _has_several_integers(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or is_floating(leaf) or leaf.dtype == torch.bool:
        return False
    return math.prod(leaf.shape[1:]) > 1


def _repeated(given: Any, count: int) -> tuple[Any, Any]:
    """``count`` of the given examples, repeated from the start if there are fewer, and ``count`` others.

    Example i of the others is the given example that differs from example i in the largest part of its numbers.
    """
    size = batch_size(given)
    differing = torch.zeros(size, size)
    for leaf in tree_leaves(given):
        if isinstance(leaf, Tensor):
            rows = leaf.detach().reshape(size, -1).cpu()
            differing += torch.stack([(rows != row).float().mean(1) for row in rows])
    chosen = torch.arange(count) % size
    return select(given, chosen), select(given, differing.argmax(1)[chosen])


def _scaled(batch: Any, factors: Sequence[float]) -> Any:
    """Example i multiplied by factor i. Integers stay as they are: they are classes, tokens and masks."""

    def multiplied(leaf: Any) -> Any:
        if not is_floating(leaf):
            return leaf
        return leaf * torch.tensor(factors).to(leaf).view(-1, *[1] * (leaf.dim() - 1))

    return tree_map(multiplied, batch)


def _without_numbers(example: Any, index: int) -> Any:
    """The example with every third number of one leaf NaN."""
    leaves, structure = tree_flatten(example)
    leaves[index] = leaves[index].clone()
    leaves[index].view(1, -1)[:, ::3] = torch.nan
    return tree_unflatten(leaves, structure)


def _resembling(own: Any, other: Any) -> Company:
    """An example, and it with the target of another, beside themselves and what is almost the same.

    The target is the last leaf. Beside them are near copies of both, and the example with each further leaf of the other. In a
    near copy floating-point numbers are a millionth larger, and of each leaf with several integers the last is one closer to
    that of the other. A batch that is a single tensor has the example and its near copy only.
    """
    leaves, structure = tree_flatten(own)
    others = tree_leaves(other)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def exchanged(base: list[Any], index: int) -> Any:
        return tree_unflatten([others[at] if at == index else leaf for at, leaf in enumerate(base)], structure)

    near = [_near(leaf, others[at]) if isinstance(leaf, Tensor) else leaf for at, leaf in enumerate(leaves)]
    ends, beside = [own], [tree_unflatten(near, structure)]
    if len(tensors) > 1:
        ends.append(exchanged(leaves, tensors[-1]))
        beside = [tree_unflatten(near, structure), exchanged(near, tensors[-1])]
        beside += [exchanged(leaves, index) for index in tensors[:-1]]
    batch = [*ends, *beside, *ends]
    places = [*range(len(ends)), *range(len(batch) - len(ends), len(batch))]
    return Company(joined(*batch), places, [*ends, *ends])


def _near(own: Tensor, other: Tensor) -> Tensor:
    if is_floating(own):
        return own * (1 + 1e-6)
    near = own.clone()
    if own.numel() > 1:
        last, target = (part.flatten()[-1].long() for part in (own, other))
        # Negative numbers, such as labels to ignore, have no valid ones beside them.
        near.view(-1)[-1] = last + (target - last).sign() * ((last >= 0) & (target >= 0))
    return near
