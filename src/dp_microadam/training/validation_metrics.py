"""Metrics of the weights, and of their average, on validation data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dp_microadam.training.distributed import Ranks
from dp_microadam.training.ema import WeightAverage
from dp_microadam.training.evaluation import PerExample, evaluate
from dp_microadam.training.training_data import Loading, moved


class ValidationMetrics:
    """Evaluates ``model``, and its averaged weights if there are any; prefixes are ``validation_`` and ``ema_validation_``."""

    def __init__(
        self,
        model: nn.Module,
        measures: Mapping[str, PerExample],
        loading: Loading,
        average: WeightAverage | None,
        ranks: Ranks,
    ) -> None:
        self._model = model
        self._measures = measures
        self._loading = loading
        self._average = average
        self._ranks = ranks

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the metrics."""
        prefixes = ("validation",) if self._average is None else ("validation", "ema_validation")
        return tuple(f"{prefix}_{name}" for prefix in prefixes for name in self._measures)

    def __call__(self, data: Any) -> dict[str, float]:
        """Means over ``data``, the same on every rank; empty if ``data`` is None."""
        if data is None:
            return {}
        found = self._measure(data, "validation")
        if self._average is not None:
            with self._average.in_place_of(self._model):
                found.update(self._measure(data, "ema_validation"))
        return found

    def _measure(self, data: Any, prefix: str) -> dict[str, float]:
        # Without privacy, buffers of batch normalization depend on a rank's own shard of the examples.
        self._ranks.broadcast_(dict(self._model.named_buffers()))
        found = evaluate(
            self._model,
            data,
            self._measures,
            prepare=lambda batch: self._loading.prepared(moved(batch, self._model)),
            num_workers=self._loading.num_workers,
            ranks=self._ranks,
        )
        return {f"{prefix}_{name}": value for name, value in found.items()}


def in_words(metrics: Mapping[str, float], of_training: Mapping[str, float]) -> str:
    """Metrics in words for the user; those of training examples are marked as private.

    >>> in_words({"validation_loss": 0.5}, {"training_loss": 0.25})
    'validation loss 0.5000, training loss 0.2500 (private, outside the guarantee)'
    """
    words = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items()]
    outside = "(private, outside the guarantee)"
    words += [f"{name.replace('_', ' ')} {value:.4f} {outside}" for name, value in of_training.items()]
    return ", ".join(words)
