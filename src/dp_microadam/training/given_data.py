"""Refuses models, data and settings of a wrong kind in one sentence, before anything of a run is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from dp_microadam.errors import InputError

_WANTED = "a map-style Dataset, or tensors with examples along the first dimension, such as (inputs, labels)"


def count_examples(name: str, data: Any) -> int:
    """The number of examples of ``data``, which the caller's argument ``name`` gave: a map-style Dataset, or tensors.

    >>> import torch
    >>> count_examples("train", (torch.zeros(5, 2), torch.zeros(5)))
    5

    Raises:
        InputError: for anything else.
    """
    kind = type(data).__name__
    if isinstance(data, DataLoader):
        weighted = not (isinstance(data.sampler, SequentialSampler | RandomSampler) or data.batch_size is None)
        weigh = ", and give some examples more weight in the loss: ε is computed for equal sample rates" if weighted else ""
        raise InputError(f"{name} is a DataLoader, which chooses its own batches; pass its dataset{weigh}")
    if isinstance(data, IterableDataset):
        raise InputError(f"{name} is an IterableDataset ({kind}), whose examples have no numbers to draw; pass {_WANTED}")
    if isinstance(data, np.ndarray):
        raise InputError(f"{name} is a numpy array; pass tensors, which torch.from_numpy makes of arrays without a copy")
    if isinstance(data, Tensor):
        return _common_length(name, [data])
    if isinstance(data, tuple | Mapping):
        parts = list(data.values() if isinstance(data, Mapping) else data)
        if parts and all(isinstance(part, Tensor) for part in parts):
            return _common_length(name, parts)
        wrong = next((type(part).__name__ for part in parts if not isinstance(part, Tensor)), "nothing")
        hint = "torch.from_numpy makes tensors of arrays" if wrong == "ndarray" else f"it must be {_WANTED}"
        raise InputError(f"{name} is a {kind} with {wrong} in it; {hint}")
    indexed = hasattr(type(data), "__getitem__") and hasattr(type(data), "__len__")
    if not indexed or isinstance(data, str | bytes | list) or hasattr(data, "iloc"):
        what = f"a list of {len(data)} items" if isinstance(data, list) else f"of type {kind}"
        missing = ", which has no __len__" if isinstance(data, Dataset) else ""
        raise InputError(f"{name} is {what}{missing}; it must be {_WANTED}")
    return len(data)


def _common_length(name: str, tensors: list[Tensor]) -> int:
    if not all(tensor.dim() for tensor in tensors):
        raise InputError(f"{name} has a tensor without dimensions; examples must lie along the first dimension")
    lengths = sorted({len(tensor) for tensor in tensors})
    if len(lengths) != 1:
        raise InputError(f"the tensors of {name} have {' and '.join(map(str, lengths[:4]))} rows; all must have one each")
    return lengths[0]


def refuse_wrapped_model(model: Any) -> None:
    """Raise InputError for what is no module, or a module wrapped by what would clip, average or shard on its own.

    >>> refuse_wrapped_model(nn.Linear(2, 1))
    """
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise InputError(f"model is of type {kind}; it must be a torch.nn.Module")
    if kind.startswith("GradSampleModule"):
        raise InputError(f"model is Opacus' {kind}; pass the module in it, model._module: models are not wrapped here")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(f"model is a {kind}, which averages gradients on its own; pass model.module")
    sharded = [name for name, parameter in model.named_parameters() if hasattr(parameter, "placements")]
    if sharded or kind in ("FullyShardedDataParallel", "DeepSpeedEngine"):
        what = f"parameter {sharded[0]!r} is sharded, as fully_shard does" if sharded else f"model is a {kind}"
        raise InputError(f"{what}; each process needs the whole model here, leave it unsharded")


def require_norm(value: Any) -> float:
    """``max_grad_norm`` as a number.

    >>> require_norm([1.0, 0.5])
    Traceback (most recent call last):
        ...
    dp_microadam.errors.InputError: max_grad_norm is of type list; it must be one number above 0, which clipping='per-layer' ...
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        what = f"{value!r}" if isinstance(value, str | bool) else f"of type {type(value).__name__}"
        raise InputError(
            f"max_grad_norm is {what}; it must be one number above 0, which clipping='per-layer' divides between the layers"
        )
    return float(value)
