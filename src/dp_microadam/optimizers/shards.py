"""Parameters divided over processes, as FSDP2 does it: each process steps its own part and says nothing to the others.

The state of such a parameter is a DTensor of one row per part, each as long as the largest part needs, because parts and what
the state holds of them rarely divide evenly. ``torch.distributed.checkpoint`` then writes every row and reads it back; another
number of processes finds another number of rows, and is refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_divided(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Loading their module takes a while; where nobody has, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own_part(tensor: Tensor) -> Tensor:
    """What this process has of ``tensor``: all of it, unless it is divided."""
    return tensor.to_local() if is_divided(tensor) else tensor  # type: ignore[attr-defined]


def largest_part(param: Any) -> int:
    """Coordinates of the largest part of a divided parameter; every process computes the same without asking."""
    sizes = list(param.shape)
    for count, placement in zip(param.device_mesh.shape, param.placements, strict=True):
        dimension = getattr(placement, "dim", None)
        if dimension is not None:
            sizes[dimension] = -(-sizes[dimension] // count)
    return math.prod(sizes)


def parts_of(param: Any) -> tuple[int, ...]:
    """How many parts a divided parameter has, for each dimension of its mesh; 1 where it is replicated."""
    return tuple(
        count if hasattr(placement, "dim") else 1
        for count, placement in zip(param.device_mesh.shape, param.placements, strict=True)
    )


def zero_rows(param: Any, length: int, dtype: torch.dtype) -> Tensor:
    """A row of ``length`` zeros for every part of a divided parameter, each where its part is."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = param.device_mesh
    placements = [
        Shard(dimension) if hasattr(placement, "dim") else Replicate() for dimension, placement in enumerate(param.placements)
    ]
    own = torch.zeros(*[1] * mesh.ndim, length, dtype=dtype, device=own_part(param).device)
    return DTensor.from_local(own, mesh, placements, run_check=False)


def own_row(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """The beginning of this process' row, in ``shape``: a view."""
    return own_part(rows).view(-1)[: math.prod(shape)].view(*shape)
