"""Loss and accuracy on data that is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

PerExample = Callable[[nn.Module, Any], Tensor]
"""``f(model, batch)`` returns one number per example."""


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of each example, for batches of (inputs, labels)."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels, reduction="none")


def class_hits(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """1 for each example whose most likely class is its label, else 0."""
    inputs, labels = batch
    return (model(inputs).argmax(dim=1) == labels).float()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Any,
    measures: Mapping[str, PerExample],
    *,
    prepare: Callable[[Any], Any],
    batch_size: int = 512,
) -> dict[str, float]:
    """The mean of each measure over ``data``, with the model in evaluation mode; its mode comes back afterwards.

    ``data`` is tensors with examples along the first dimension (one, or a tuple or dict of them), or a map-style Dataset.
    """
    modes = {module: module.training for module in model.modules()}
    totals = dict.fromkeys(measures, 0.0)
    count = 0
    model.eval()
    try:
        for batch in batches(data, batch_size):
            batch = prepare(batch)
            for name, measure in measures.items():
                values = measure(model, batch)
                totals[name] += float(values.double().sum())
            count += len(values)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return {name: total / max(1, count) for name, total in totals.items()}


def batches(data: Any, batch_size: int) -> Iterator[Any]:
    """``data`` in order, ``batch_size`` examples at a time."""
    if isinstance(data, Dataset):
        yield from DataLoader(data, batch_size=batch_size)
        return
    first = data if isinstance(data, Tensor) else next(iter(data.values() if isinstance(data, Mapping) else data))
    for start in range(0, len(first), batch_size):
        yield _slice(data, slice(start, start + batch_size))


def _slice(data: Any, rows: slice) -> Any:
    if isinstance(data, Tensor):
        return data[rows]
    if isinstance(data, Mapping):
        return {name: value[rows] for name, value in data.items()}
    return tuple(value[rows] for value in data)
