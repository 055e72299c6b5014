"""Evaluation: loss and accuracy on held-out data, and the metrics of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Subset, default_collate

from dp_microadam.clipping.checks.randomness import no_side_effects
from dp_microadam.errors import DPMicroAdamError, InputError
from dp_microadam.sampling.poisson import Chunks
from dp_microadam.training.distributed import Ranks
from dp_microadam.training.given_data import count_examples
from dp_microadam.training.withheld import MutedLikeItsParent

if TYPE_CHECKING:
    from dp_microadam.training.method import Method
    from dp_microadam.training.training_data import Loading

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
                rows = _rows(batch)
                for name, measure in measures.items():
                    totals[name] += float(_one_per_example(name, measure(model, batch), rows).double().sum())
                count += rows
    finally:
        for module, mode in modes.items():
            module.training = mode
    *sums, whole = ranks.total([*totals.values(), count])
    return {name: total / max(1, whole) for name, total in zip(totals, sums, strict=True)}


def _rows(batch: Any) -> int:
    return next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _one_per_example(name: str, values: Any, rows: int) -> Tensor:
    if isinstance(values, Tensor) and values.shape == (rows,):
        return values
    what = f"a tensor of shape {list(values.shape)}" if isinstance(values, Tensor) else f"of type {type(values).__name__}"
    if isinstance(values, Tensor) and not values.dim():
        what = "one number for all, such as a mean"
    raise InputError(f"the {name} of a batch of {rows} examples is {what}; it must be a tensor with one value per example")


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
    shard = (Ranks() if ranks is None else ranks).shard(count_examples("data", data))
    if not shard:
        return
    rows = torch.arange(shard.start, shard.stop).split(batch_size)
    if isinstance(data, Tensor | tuple | Mapping):
        yield from (_slice(data, slice(int(part[0]), int(part[-1]) + 1)) for part in rows)
        return
    loader: DataLoader[Any] = DataLoader(
        Chunks(data, default_collate),
        sampler=rows,
        batch_size=None,
        num_workers=num_workers,
        worker_init_fn=MutedLikeItsParent(),
    )
    for batch in loader:
        if isinstance(batch, DPMicroAdamError):
            raise batch
        yield batch


def _slice(data: Any, rows: slice) -> Any:
    if isinstance(data, Tensor):
        return data[rows]
    if isinstance(data, Mapping):
        return {name: value[rows] for name, value in data.items()}
    return tuple(value[rows] for value in data)


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters."""
    return next(model.parameters()).device


def moved(batch: Any, model: nn.Module) -> Any:
    """The batch on the model's device."""
    device = device_of(model)
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)


class ValidationMetrics:
    """Evaluates ``model``, and its averaged weights if there are any; prefixes are ``validation_`` and ``ema_validation_``."""

    def __init__(
        self,
        model: nn.Module,
        measures: Mapping[str, PerExample],
        loading: Loading,
        method: Method,
        ranks: Ranks,
    ) -> None:
        self._model = model
        self._measures = measures
        self._loading = loading
        self._method = method
        self._ranks = ranks

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the metrics."""
        prefixes = ("validation",) if not self._method.averages else ("validation", "ema_validation")
        return tuple(f"{prefix}_{name}" for prefix in prefixes for name in self._measures)

    def try_once(self, data: Any) -> None:
        """Evaluate one batch of ``data``, before a step is spent on a run whose validation would fail.

        Raises:
            InputError: in one sentence, if that fails: validation data is not protected, so errors may be shown.
        """
        if data is None:
            return
        count = count_examples("validation", data)
        if not count:
            raise InputError("validation has no examples; leave it out, or pass some")
        some = range(min(count, _TRIED))
        first = _slice(data, slice(len(some))) if isinstance(data, Tensor | tuple | Mapping) else Subset(data, some)
        try:
            with no_side_effects(self._model), self._ranks.together():
                self._means(first, Ranks())
        except DPMicroAdamError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())[:_SHOWN]
            raise InputError(
                f"validation fails on its first examples ({type(error).__name__}: {text}); make it run on one batch"
            ) from error

    def __call__(self, data: Any) -> dict[str, float]:
        """Means over ``data``, the same on every rank; empty if ``data`` is None."""
        if data is None:
            return {}
        found = self._measure(data, "validation")
        if self._method.averages:
            with self._method.averaged(self._model):
                found.update(self._measure(data, "ema_validation"))
        return found

    def _measure(self, data: Any, prefix: str) -> dict[str, float]:
        # Without privacy, buffers of batch normalization depend on a rank's own shard of the examples.
        self._ranks.broadcast_(dict(self._model.named_buffers()))
        return {f"{prefix}_{name}": value for name, value in self._means(data, self._ranks).items()}

    def _means(self, data: Any, ranks: Ranks) -> dict[str, float]:
        prepare, workers = self._loading.prepared, self._loading.performance.num_workers
        return evaluate(
            self._model,
            data,
            self._measures,
            prepare=lambda batch: prepare(moved(batch, self._model)),
            num_workers=workers,
            ranks=ranks,
        )


_TRIED, _SHOWN = 8, 300
"""Examples of validation data that are tried before the first step, and characters of an error that are shown."""


def in_words(metrics: Mapping[str, float], of_training: Mapping[str, float]) -> str:
    """Metrics in words for the user; those of training examples are marked as private.

    >>> in_words({"validation_loss": 0.5}, {"training_loss": 0.25})
    'validation loss 0.5000, training loss 0.2500 (private, outside the guarantee)'
    """
    words = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items()]
    outside = "(private, outside the guarantee)"
    words += [f"{name.replace('_', ' ')} {value:.4f} {outside}" for name, value in of_training.items()]
    return ", ".join(words)


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
