"""Evaluation: loss and accuracy on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from dp_microadam.errors import DPMicroAdamError
from dp_microadam.sampling.poisson import Chunks
from dp_microadam.training.distributed import Ranks
from dp_microadam.training.withheld import MutedLikeItsParent

PerExample = Callable[[nn.Module, Any], Tensor]
"""``f(model, batch)`` returns one number per example."""


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of each example, for batches of (inputs, labels)."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels, reduction="none")


def weighted_class_loss(weights: Sequence[float]) -> PerExample:
    """Cross-entropy of each example times the weight of its class, in training; in evaluation mode it is :func:`class_loss`.

    Formal guarantees: none are needed. A weight multiplies an example's loss, and so its gradient, before that is clipped: the
    example adds at most the clipping norm to the sum, whatever its weight. The weights themselves must be public numbers. Ones
    that are computed from the labels of the training data, such as one over the size of each class, would reveal those sizes.
    """
    table = torch.tensor(weights)
    tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # copied to a device once: every copy waits for it

    def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = class_loss(model, batch)
        if not model.training:
            return losses
        place = losses.device, losses.dtype
        if place not in tables:
            tables[place] = table.to(losses)
        return losses * tables[place][batch[1]]

    return weighted


def class_hits(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """1 for each example whose most likely class is its label, else 0."""
    inputs, labels = batch
    return (model(inputs).argmax(dim=1) == labels).float()


def over_views(measure: PerExample, example_shape: Sequence[int]) -> PerExample:
    """``measure`` averaged over the views of each example, for batches of (inputs [B, K, *example_shape], labels [B]).

    Averaging happens per example, before clipping. Batches without a dimension of views, as in evaluation, are measured as
    they are.
    """
    dimensions = 1 + len(example_shape)

    def averaged(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        if inputs.dim() == dimensions:
            return measure(model, batch)
        views = inputs.shape[1]
        return measure(model, (inputs.flatten(0, 1), labels.repeat_interleave(views))).view(-1, views).mean(1)

    return averaged


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Any,
    measures: Mapping[str, PerExample],
    *,
    prepare: Callable[[Any], Any],
    batch_size: int = 512,
    num_workers: int = 0,
    ranks: Ranks | None = None,
) -> dict[str, float]:
    """The mean of each measure over ``data``, with the model in evaluation mode; its mode is restored afterwards.

    ``data`` is a map-style Dataset, or tensors with examples along the first dimension (one, or a tuple or dict of them). With
    several ``ranks`` each evaluates its shard with its own weights and buffers, and all get the same means.
    """
    ranks = Ranks() if ranks is None else ranks
    modes = {module: module.training for module in model.modules()}
    totals = dict.fromkeys(measures, 0.0)
    count = 0
    model.eval()
    try:
        with ranks.together():
            for batch in batches(data, batch_size, num_workers, ranks=ranks):
                batch = prepare(batch)
                for name, measure in measures.items():
                    values = measure(model, batch)
                    totals[name] += float(values.double().sum())
                count += len(values)
    finally:
        for module, mode in modes.items():
            module.training = mode
    *sums, whole = ranks.total([*totals.values(), count])
    return {name: total / max(1, whole) for name, total in zip(totals, sums, strict=True)}


@dataclass(frozen=True)
class ClassCounts:
    """How many examples of each class there are, and how many of them were predicted right."""

    hits: tuple[int, ...]
    examples: tuple[int, ...]

    @property
    def accuracy(self) -> float:
        return sum(self.hits) / max(1, sum(self.examples))

    @property
    def recalls(self) -> list[float | None]:
        """Of each class, the fraction that was predicted right; None for a class without examples."""
        return [hit / count if count else None for hit, count in zip(self.hits, self.examples, strict=True)]

    @property
    def majority(self) -> float:
        """The accuracy of always predicting the most frequent class."""
        return max(self.examples, default=0) / max(1, sum(self.examples))


def count_hits(
    model: nn.Module,
    data: Any,
    num_classes: int,
    *,
    prepare: Callable[[Any], Any],
    num_workers: int = 0,
    ranks: Ranks | None = None,
    on: Callable[[PerExample], PerExample] | None = None,
) -> ClassCounts:
    """Count, class by class, the examples of ``data``, batches of (inputs, labels), that the model predicts right.

    ``on`` makes a measure of examples one of what ``data`` holds instead, such as features.
    """
    totals = torch.zeros(2, num_classes, dtype=torch.float64)

    def hits(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        right = class_hits(model, batch)
        labels = batch[1].cpu()
        totals[0].index_add_(0, labels, right.cpu().double())
        totals[1].index_add_(0, labels, torch.ones(len(labels), dtype=torch.float64))
        return right

    evaluate(model, data, {"accuracy": hits if on is None else on(hits)}, prepare=prepare, num_workers=num_workers, ranks=ranks)
    whole = (Ranks() if ranks is None else ranks).total(totals.flatten().tolist())
    counts = [round(number) for number in whole]
    return ClassCounts(tuple(counts[:num_classes]), tuple(counts[num_classes:]))


def batches(data: Any, batch_size: int, num_workers: int = 0, *, ranks: Ranks | None = None) -> Iterator[Any]:
    """Batches of ``data`` in order; a Dataset is read by ``num_workers`` processes. With ``ranks``, only this rank's shard."""
    ranks = Ranks() if ranks is None else ranks
    if isinstance(data, Dataset):
        shard = ranks.shard(len(data))  # type: ignore[arg-type]
        if not shard:
            return
        rows = torch.arange(shard.start, shard.stop).split(batch_size)
        chunks = Chunks(data, default_collate)
        loader: DataLoader[Any] = DataLoader(
            chunks, sampler=rows, batch_size=None, num_workers=num_workers, worker_init_fn=MutedLikeItsParent()
        )
        for batch in loader:
            if isinstance(batch, DPMicroAdamError):
                raise batch
            yield batch
        return
    first = data if isinstance(data, Tensor) else next(iter(data.values() if isinstance(data, Mapping) else data))
    shard = ranks.shard(len(first))
    for start in range(shard.start, shard.stop, batch_size):
        yield _slice(data, slice(start, min(start + batch_size, shard.stop)))


def _slice(data: Any, rows: slice) -> Any:
    if isinstance(data, Tensor):
        return data[rows]
    if isinstance(data, Mapping):
        return {name: value[rows] for name, value in data.items()}
    return tuple(value[rows] for value in data)
