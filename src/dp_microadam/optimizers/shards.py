"""Sharded parameters (DTensors, as FSDP2 creates them): each rank updates its own shard; no communication is needed.

The state of a sharded parameter is a DTensor with one row per shard. All rows have the length that the largest shard needs,
because shards, and the state of a shard, rarely have equal sizes. ``torch.distributed.checkpoint`` can save and load such
states; with another world size the number of rows differs, and loading is refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor. Avoids the slow import of DTensor: if it was not imported, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of ``tensor``; the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def largest_shard_size(param: Any) -> int:
    """The number of coordinates in the largest shard of a parameter; the same on every rank, without communication."""
    sizes = list(param.shape)
    for count, placement in zip(param.device_mesh.shape, param.placements, strict=True):
        dimension = getattr(placement, "dim", None)
        if dimension is not None:
            sizes[dimension] = -(-sizes[dimension] // count)
    return math.prod(sizes)


def shard_counts(param: Any) -> tuple[int, ...]:
    """The number of shards along each dimension of a parameter's device mesh; 1 where it is replicated."""
    return tuple(
        count if hasattr(placement, "dim") else 1
        for count, placement in zip(param.device_mesh.shape, param.placements, strict=True)
    )


def sharded_zeros(param: Any, length: int, dtype: torch.dtype) -> Tensor:
    """A DTensor with a row of ``length`` zeros for every shard of a parameter, each on the rank of its shard."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = param.device_mesh
    placements = [
        Shard(dimension) if hasattr(placement, "dim") else Replicate() for dimension, placement in enumerate(param.placements)
    ]
    own = torch.zeros(*[1] * mesh.ndim, length, dtype=dtype, device=local_shard(param).device)
    return DTensor.from_local(own, mesh, placements, run_check=False)


def local_row(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """A view of the beginning of this rank's row, with shape ``shape``."""
    return local_shard(rows).view(-1)[: math.prod(shape)].view(*shape)
