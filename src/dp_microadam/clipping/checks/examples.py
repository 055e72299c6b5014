"""Where the checks get their examples from: random ones shaped like a batch, or those of ``synthetic_batch``."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dp_microadam.clipping.batches import batch_size, is_floating, select
from dp_microadam.errors import InputError

# Most checks run on this many examples: a first, a middle and a last one.
CHECK_SIZE = 3

_FEWEST_GIVEN = 4

_SEEDS = 2**31
_BETWEEN_SEEDS = 1_000_003

# What is tried for integers of which an example has several: the range of a pixel.
_PIXELS = 256


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
        """The same with integers of the range of a pixel, in each leaf where the examples are accepted then.

        Elsewhere than on the CPU only bytes are tried: an index out of range may end the process there.
        """
        leaves = tree_leaves(self.batch)
        bounds = [2] * len(leaves)
        for position, leaf in enumerate(leaves):
            if self.given is None and _has_several_integers(leaf) and (leaf.device.type == "cpu" or leaf.dtype == torch.uint8):
                bounds[position] = min(_PIXELS, torch.iinfo(leaf.dtype).max + 1)
                if not accepts(self._with_largest(position, bounds[position] - 1)):
                    bounds[position] = 2
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
            numbers = (numbers + steps) % bound if flip else numbers
            return numbers.to(device=leaf.device, dtype=leaf.dtype, non_blocking=True)

        return tree_map(like, self.batch)


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


def scaled(batch: Any, factors: Sequence[float]) -> Any:
    """Example i multiplied by factor i. Integers stay as they are: they are classes, tokens and masks."""

    def multiplied(leaf: Any) -> Any:
        if not is_floating(leaf):
            return leaf
        return leaf * torch.tensor(factors).to(leaf, non_blocking=True).view(-1, *[1] * (leaf.dim() - 1))

    return tree_map(multiplied, batch)


def joined(*batches: Any) -> Any:
    """The examples of all batches in one."""
    return tree_map(lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *batches)


def repeat_example(batch: Any, index: int, count: int) -> Any:
    """``count`` examples: those of the batch before ``index``, then copies of the one at ``index``."""
    return select(batch, torch.arange(count).clamp(max=index))


def with_missing_numbers(batch: Any) -> list[Any]:
    """For each leaf of floating-point numbers: the first example with every third of them NaN there."""
    leaves = tree_leaves(batch)
    found = []
    for position, leaf in enumerate(leaves):
        if is_floating(leaf):
            counter = iter(range(len(leaves)))

            def missing(leaf: Any, position: int = position, counter: Iterator[int] = counter) -> Any:
                if next(counter) != position:
                    return leaf
                changed = leaf.clone()
                changed.view(1, -1)[:, ::3] = torch.nan
                return changed

            found.append(tree_map(missing, select(batch, torch.zeros(1, dtype=torch.long))))
    return found


def resembling(batch: Any, others: Any) -> tuple[Any, int]:
    """Example 0 and the same with the other example's last leaf (its target, say), and these again at the end.

    Between them are near copies of both, and example 0 with each further leaf of the other example. In a near copy
    floating-point numbers are a millionth larger, and of each leaf with several integers the last is one closer to that of the
    other example. A batch that is a single tensor has the example and its near copy only. Also returns how many are repeated.
    """
    count = sum(isinstance(leaf, Tensor) for leaf in tree_leaves(batch))
    position = iter(range(count))

    def rows(leaf: Any, other: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        own, of_other, index = leaf[:1], other[:1], next(position)
        ends, near = [own], [_near(own, of_other)]
        if count > 1:
            last = index == count - 1
            ends, near = [own, of_other if last else own], [*near, of_other if last else near[0]]
        return torch.cat([*ends, *near, *(of_other if index == i else own for i in range(count - 1)), *ends])

    return tree_map(rows, batch, others), min(count, 2)


def _near(own: Tensor, other: Tensor) -> Tensor:
    if is_floating(own):
        return own * (1 + 1e-6)
    near = own.clone()
    if own.numel() > 1:
        last, target = (part.flatten()[-1].long() for part in (own, other))
        # Negative numbers, such as labels to ignore, have no valid ones beside them.
        near.view(-1)[-1] = last + (target - last).sign() * ((last >= 0) & (target >= 0))
    return near
