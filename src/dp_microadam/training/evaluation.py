"""Evaluation: loss and accuracy on held-out data, and the metrics of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    return tree_map(lambda value: value[rows], dict(data) if isinstance(data, Mapping) else data)


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters."""
    return next(model.parameters()).device


def moved(batch: Any, model: nn.Module) -> Any:
    """The batch on the model's device."""
    device = device_of(model)
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)


@dataclass
class ValidationMetrics:
    """Evaluates ``model``, and its averaged weights if there are any; prefixes are ``validation_`` and ``ema_validation_``."""

    _model: nn.Module
    _measures: Mapping[str, PerExample]
    _loading: Loading
    _method: Method
    _ranks: Ranks

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the metrics."""
        prefixes = ("validation",) if not self._method.averages else ("validation", "ema_validation")
        return tuple(f"{prefix}_{name}" for prefix in prefixes for name in self._measures)

    def try_once(self, data: Any) -> None:
        """Evaluate one batch of ``data``, before a step is spent on a run whose validation would fail.

        Its error is part of the InputError: validation data is not protected.
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
