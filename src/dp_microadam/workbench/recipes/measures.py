"""What recipes measure of a model: weighted losses, views, classes one by one, and language models, document by document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.training.distributed import Ranks
from dp_microadam.training.evaluation import PerExample, class_hits, class_loss, evaluate


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


Batch = tuple[Tensor, Tensor]
"""Tokens [B, length], negative where there is none, and labels, which are not used."""


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of each document's own tokens given those before them; 0 for a document of a single token.

    Formal guarantees: the loss of a document depends on its own tokens alone. Its length does not weigh it: a long document is
    clipped as a short one is.
    """
    losses, counted = _token_losses(model, batch[0])
    return losses.sum(1) / counted.sum(1).clamp(min=1)


def next_token_hits(model: nn.Module, batch: Batch) -> Tensor:
    """The fraction of each document's tokens that are the most likely one, given those before them."""
    scores, targets, counted = _shifted(model, batch[0])
    hits = (scores.argmax(-1) == targets) & counted
    return hits.sum(1) / counted.sum(1).clamp(min=1)


def document_hits(model: nn.Module, batch: Batch) -> Tensor:
    """The number of each document's tokens that are the most likely one."""
    scores, targets, counted = _shifted(model, batch[0])
    return ((scores.argmax(-1) == targets) & counted).sum(1)


def document_nats(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of each document's cross-entropies; with :func:`document_tokens` it gives the perplexity."""
    return _token_losses(model, batch[0])[0].sum(1)


def document_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """The number of predicted tokens of each document."""
    return (batch[0][:, 1:] >= 0).sum(1)


def _token_losses(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    scores, targets, counted = _shifted(model, tokens)
    losses = nn.functional.cross_entropy(scores.transpose(1, 2), targets, reduction="none")
    return torch.where(counted, losses, 0.0), counted


def _shifted(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of all tokens but the last, the tokens after them, and which of these exist."""
    targets = tokens[:, 1:]
    return model(tokens)[:, :-1], targets.clamp(min=0).long(), targets >= 0
