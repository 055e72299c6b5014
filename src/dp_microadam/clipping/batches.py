"""Batches are nested tuples, lists and dicts of tensors whose first dimension counts examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dp_microadam.errors import InputError


def batch_size(batch: Any) -> int:
    """The number of examples, which all tensors of a batch must agree on."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not tensors:
        raise InputError(f"batch is {type(batch).__name__} without tensors; pass tensors, or tuples or dicts of them")
    sizes = {len(tensor) if tensor.dim() else None for tensor in tensors}
    if len(sizes) > 1 or None in sizes:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise InputError(f"batch holds tensors of shapes {shapes}; all must share their first dimension, one row per example")
    return len(tensors[0])


def require_weights(weights: Tensor, count: int) -> int:
    """Require the weights of ``count`` examples, (units, examples per unit); returns how many examples a unit has."""
    if weights.dim() != 2 or weights.numel() != count or (count and not weights.shape[1]):
        raise InputError(
            f"weights has shape {tuple(weights.shape)} for a batch of {count}; it must have a row per user and a column for "
            "each of the user's consecutive examples"
        )
    return max(1, weights.shape[1])


def detached(batch: Any) -> Any:
    """The same batch, detached from the graph."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, batch)


def signature(batch: Any) -> tuple[Any, ...]:
    """What two batches must have in common for a check of one to hold for the other: structure, dtypes and ranks."""
    return tuple((leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else type(leaf) for leaf in tree_leaves(batch))


def synthetic(
    batch: Any, count: int, *, seed: int = 0, bounds: Sequence[int] | None = None, spread: bool = False
) -> tuple[Any, Any]:
    """``count`` random examples shaped like those of ``batch``, and ``count`` others; no value of the batch is used.

    Example i of the others differs from example i in every number. Floating-point numbers are uniform in [0, 1), where roots
    and logarithms exist. Integers are 0 or 1, which are valid classes, tokens and masks, unless ``bounds`` has a larger
    bound for their leaf; then they are below that bound.

    In a leaf with one integer per example, such as a class, only two values occur, so that among any three examples two
    agree. In a leaf with many, such as pixels or tokens, some examples reach the bound and others stay far below it, so that
    they differ in their largest integer. ``spread`` exchanges the two: many different classes, and two values of pixels.
    """
    return _random(batch, count, seed, bounds, spread, flip=False), _random(batch, count, seed, bounds, spread, flip=True)


def _random(batch: Any, count: int, seed: int, bounds: Sequence[int] | None, spread: bool, *, flip: bool) -> Any:
    integers = torch.Generator().manual_seed(seed)
    floats = torch.Generator().manual_seed(seed + int(flip))
    leaf_bounds = iter(() if bounds is None else bounds)

    def like(leaf: Any) -> Any:
        bound = next(leaf_bounds, 2)
        if not isinstance(leaf, Tensor):
            return leaf
        shape = (count, *leaf.shape[1:])
        if leaf.is_floating_point() or leaf.is_complex():
            return torch.rand(shape, generator=floats).to(device=leaf.device, dtype=leaf.dtype, non_blocking=True)
        numbers = _integers(shape, bound, spread, integers)
        steps = torch.randint(
            1, bound, shape, generator=integers, dtype=torch.int32
        )  # drawn in both cases: later leaves must not differ
        numbers = (numbers + steps) % bound if flip else numbers
        return numbers.to(device=leaf.device, dtype=leaf.dtype, non_blocking=True)

    return tree_map(like, batch)


def _integers(shape: tuple[int, ...], bound: int, spread: bool, generator: torch.Generator) -> Tensor:
    if bound <= 2:
        return torch.randint(2, shape, generator=generator, dtype=torch.int32)
    single = math.prod(shape[1:]) == 1
    if single and spread:
        return torch.randint(bound, shape, generator=generator, dtype=torch.int32)
    if single or spread:  # two values; beyond 0 and 1, which are often special, where there are as many
        first = int(torch.randint(2, bound, (), generator=generator))
        second = int(torch.randint(1, bound, (), generator=generator))
        second = bound - 1 if bound > 3 and first != bound - 1 else (first + second) % bound
        which = torch.randint(2, shape, generator=generator)
        which[0] = 0
        return torch.tensor([first, second], dtype=torch.int32)[which]
    tops = torch.tensor([bound, 2, max(2, math.isqrt(bound))]).roll(int(torch.randint(3, (), generator=generator)))
    rows = tops[torch.arange(shape[0]) % 3].view(-1, *[1] * (len(shape) - 1))
    return (torch.rand(shape, generator=generator) * rows).int().clamp_(max=bound - 1)


def repeated(given: Any, count: int) -> tuple[Any, Any]:
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


def select(batch: Any, rows: Tensor) -> Any:
    """The examples of these rows, in this order."""
    return tree_map(lambda leaf: leaf[_beside(leaf, rows)] if isinstance(leaf, Tensor) else leaf, batch)


def replace_rows(batch: Any, others: Any, rows: Tensor) -> Any:
    """A copy of the batch with these rows taken from the others."""

    def changed(leaf: Any, other: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        places = _beside(leaf, rows)
        return leaf.index_copy(0, places, other[places])

    return tree_map(changed, batch, others)


def scaled(batch: Any, factors: Sequence[float]) -> Any:
    """Example i multiplied by factor i. Integers stay as they are: they are classes, tokens and masks."""

    def multiplied(leaf: Any) -> Any:
        if not _is_floating(leaf):
            return leaf
        return leaf * torch.tensor(factors).to(leaf, non_blocking=True).view(-1, *[1] * (leaf.dim() - 1))

    return tree_map(multiplied, batch)


def padded(batch: Any, count: int) -> Any:
    """``count`` examples: those of the batch, then copies of its first, which any model accepts that accepts the batch."""

    def longer(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.cat([leaf, leaf[:1].expand(count - len(leaf), *leaf.shape[1:])])

    return tree_map(longer, batch)


def padded_size(count: int, largest: int, sizes: int) -> int:
    """The least of ``sizes`` evenly spaced sizes, the last of which is ``largest``, that holds ``count`` examples.

    >>> [padded_size(count, 64, 4) for count in (1, 16, 17, 64)], padded_size(3, 64, 1)
    ([16, 16, 32, 64], 64)
    """
    step = math.ceil(largest / sizes)
    return max(count, min(largest, step * math.ceil(count / step)))


def in_precision(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point numbers in this precision."""
    return tree_map(lambda leaf: leaf.to(dtype) if _is_floating(leaf) and not leaf.is_complex() else leaf, batch)


def _beside(leaf: Tensor, rows: Tensor) -> Tensor:
    """The rows on the device of the leaf; the host does not wait until they are there."""
    return rows.to(leaf.device, non_blocking=True)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def repeat_example(batch: Any, index: int, count: int) -> Any:
    """``count`` examples: those of the batch before ``index``, then copies of the one at ``index``."""
    return select(batch, torch.arange(count).clamp(max=index))


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
    if _is_floating(own):
        return own * (1 + 1e-6)
    near = own.clone()
    if own.numel() > 1:
        last, target = (part.flatten()[-1].long() for part in (own, other))
        # Negative numbers, such as labels to ignore, have no valid ones beside them.
        near.view(-1)[-1] = last + (target - last).sign() * ((last >= 0) & (target >= 0))
    return near


def with_extreme_integers(batch: Any, bounds: Sequence[int]) -> Any:
    """A copy whose first example has the largest integers within the bounds, and whose second has zeros there."""
    leaf_bounds = iter(bounds)

    def extreme(leaf: Any) -> Any:
        bound = next(leaf_bounds)
        if bound <= 2 or not isinstance(leaf, Tensor):
            return leaf
        changed = leaf.clone()
        changed[0], changed[1] = bound - 1, 0
        return changed

    return tree_map(extreme, batch)
