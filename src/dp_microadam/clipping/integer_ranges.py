"""Finds out which integers a model or transform accepts, by tracking what they index.

Synthetic classes and tokens must be valid: below the number of classes, or of rows in a table. A class or token is used as
an index, in an embedding, a gather or the loss itself, and the indexed tensor's size is the bound. Integers that index
nothing, such as pixels, go up to 255.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten

# What is tried for integers that index nothing: the range of a pixel.
_PIXELS = 256

# Operations whose results hold numbers of their arguments. Views are recognised by their memory.
_COPIES = {
    _aten._to_copy,
    _aten.clone,
    _aten.copy_,
    _aten.cat,
    _aten.stack,
    _aten.index,
    _aten.index_select,
    _aten.gather,
    _aten.where,
    _aten.masked_fill,
    _aten.constant_pad_nd,
    _aten.repeat,
    _aten.flip,
    _aten.roll,
    _aten.clamp,
    _aten.clamp_min,
    _aten.clamp_max,
}


@dataclass
class _Leaf:
    """How one tensor of a batch was used: sizes it indexed, and whether something computed from it was an index."""

    sizes: list[int] = field(default_factory=list)
    computed: bool = False


class IndexTracker(TorchDispatchMode):
    """Tracks the integers of a batch through the operations of a pass, to those that use them as an index.

    Afterwards ``candidates`` says how large the integers of each leaf may be: at most 1 where nothing larger is known to be
    safe.
    """

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self._batch = tree_leaves(batch)
        self._leaves = {position: _Leaf() for position, leaf in enumerate(self._batch) if is_integer(leaf)}
        # By address of the memory: the leaves whose integers it holds, and whether they are unchanged.
        self._origins: dict[int, tuple[frozenset[int], bool]] = {}
        self._alive: list[Tensor] = []  # so that no address is used again
        for position in self._leaves:
            self._mark(self._batch[position], frozenset([position]), True)

    def candidates(self) -> list[list[int]]:
        """Exclusive upper bounds in the order of the batch's leaves, to be tried in turn.

        Integers that index several tensors are valid in the smallest of them. But its size may depend on the batch, as that
        of a count of classes does. So the largest is tried first where an index out of range raises an exception, and before
        it, sizes are ignored that the integers of this very batch would need, as in ``one_hot`` without a number of classes.
        """
        on_cpu = all(self._batch[position].device.type == "cpu" for position in self._leaves)
        found: list[list[int]] = []
        for choose, ignore in ((max, True), (max, False), (min, False)) if on_cpu else ((min, False),):
            bounds = [self._bound(i, choose, ignore) if i in self._leaves else 2 for i in range(len(self._batch))]
            if max(bounds, default=2) > 2 and bounds not in found:
                found.append(bounds)
        return found

    def magnitude(self, bounds: Sequence[int]) -> float:
        """The largest integer within these bounds that is computed with rather than used as an index."""
        free = [bounds[position] - 1 for position, leaf in self._leaves.items() if not leaf.sizes]
        return float(max([1, *free]))

    def _bound(self, position: int, choose: Callable[[Sequence[int]], int], ignore_needed: bool) -> int:
        tensor, leaf = self._batch[position], self._leaves[position]
        needed = int(tensor.max()) + 1 if ignore_needed and tensor.numel() else 0
        sizes = [size for size in leaf.sizes if size != needed]
        largest = torch.iinfo(tensor.dtype).max + 1
        # An index out of range is an exception on the CPU; elsewhere it may end the process. Of integers that an index is
        # computed from, such as lengths, it is unknown which are valid, and others may mix examples without an exception.
        if leaf.computed or (tensor.device.type != "cpu" and not (leaf.sizes or tensor.dtype == torch.uint8)):
            return 2
        return max(2, min(largest, choose(sizes) if sizes else _PIXELS))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = func.overloadpacket
        for index, size in indexed(operation, args):
            origins, same = self._origin(index)
            for position in origins:
                self._leaves[position].sizes.append(size)
                self._leaves[position].computed |= not same
        known = [self._origin(leaf) for leaf in tree_leaves((args, kwargs)) if is_integer(leaf)]
        if known:
            positions = frozenset().union(*(origins for origins, _ in known))
            same = operation in _COPIES and all(same for origins, same in known if origins)
            for leaf in tree_leaves(result):
                if positions and is_integer(leaf):
                    self._mark(leaf, positions, same)
        return result

    def _origin(self, tensor: Tensor) -> tuple[frozenset[int], bool]:
        return self._origins.get(_address(tensor), (frozenset(), True))

    def _mark(self, tensor: Tensor, positions: frozenset[int], same: bool) -> None:
        before = self._origins.get(_address(tensor))
        if before is not None and before[0] >= positions:  # a view, or written in place
            return
        self._origins[_address(tensor)] = positions, same
        self._alive.append(tensor)


def is_integer(leaf: Any) -> bool:
    """Whether a leaf is a tensor of integers; booleans do not count."""
    return isinstance(leaf, Tensor) and not (leaf.is_floating_point() or leaf.is_complex()) and leaf.dtype != torch.bool


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
        return 0


def indexed(operation: Any, args: tuple[Any, ...]) -> Iterator[tuple[Tensor, int]]:
    """Index tensors of an operation, each with the size of what it indexes."""
    found: list[tuple[Any, int]] = []
    if operation in (_aten.embedding, _aten._embedding_bag, _aten._embedding_bag_forward_only):
        found = [(args[1], args[0].shape[0])]
        if operation is not _aten.embedding:
            found.append((args[2], args[1].shape[0]))  # where bags begin
    elif operation in (_aten.nll_loss_forward, _aten.nll_loss2d_forward, _aten.nll_loss, _aten.nll_loss2d):
        found = [(args[1], args[0].shape[1] if args[0].dim() > 1 else args[0].shape[0])]
    elif operation in (_aten.gather, _aten.index_select, _aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.scatter_add_):
        found = [(args[2], args[0].shape[args[1]] if args[0].dim() else 1)]
    elif operation in (_aten.index, _aten.index_put, _aten.index_put_) and all(
        index is None or index.dtype != torch.bool for index in args[1]
    ):
        found = [(index, args[0].shape[dimension]) for dimension, index in enumerate(args[1])]
    return ((index, size) for index, size in found if is_integer(index))
