"""Clip: the second value of a training step. Turns the chunks of a sample into sums of known sensitivity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.clipping.engine import ClippedGradients, ClippedRowNorms
from dp_microadam.errors import InputError
from dp_microadam.training.distributed import Ranks
from dp_microadam.training.evaluation import PerExample
from dp_microadam.training.method import ROW_NORMS, Phase
from dp_microadam.training.settings import PerformanceSettings, PrivacySettings
from dp_microadam.training.torch_randomness import forked_torch
from dp_microadam.training.training_data import PhysicalBatch
from dp_microadam.training.withheld import LOSS, at_stage

_NO_BOUND = 1e12
"""A clipping norm that never clips, for runs without privacy that need per-example gradients."""


class Clip:
    """Sums gradients over the chunks of a step: clipped ones, or ordinary ones in a run without privacy.

    There is an engine for each combination of query and trainable parameters among the phases of the run; parameters that a
    phase does not train are frozen in it.

    Formal guarantees: in a private run, what a call returns differs by at most :attr:`sensitivity` in L2 norm between samples
    that differ by one example, or user, as :class:`~dp_microadam.ClippedGradients` says. It is private until noise is added.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PerExample,
        first: Phase,
        private: bool,
        settings: PrivacySettings,
        performance: PerformanceSettings,
        measures: Mapping[str, PerExample],
    ) -> None:
        self._model, self._loss = model, loss
        self._private, self._settings, self._performance = private, settings, performance
        self._measures = dict(measures)
        self._trainable_before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        self._checked: dict[Any, ClippedGradients | UnclippedGradients] = {}
        self._phase = first
        self._engine = self._new(first)
        self._totals: list[float] = []
        self.scale: Mapping[str, Tensor] = {}
        """What gradients of the next step are multiplied by before they are clipped, by parameter name."""
        self.row_masks: Mapping[str, Tensor] = {}
        """Which rows of a weight train in it, by parameter name."""

    @property
    def sensitivity(self) -> float:
        """The largest change of the sums that one example can cause, in L2 norm."""
        return self._engine.sensitivity

    def enter(self, phase: Phase) -> None:
        """Switch to the engine of ``phase``; from here on only the phase's parameters require gradients."""
        if phase.engine_key != self._phase.engine_key:
            self._phase = phase
            self.reopen()

    def reopen(self) -> None:
        """Close the engine in use and open one for the current phase, already checked if possible."""
        self._engine.close()
        checked = self._checked.pop(self._phase.engine_key, None)
        self._engine = self._new(self._phase) if checked is None else checked
        self._freeze_all_but(self._phase.trainable)

    def check(self, phases: Sequence[Phase], sample: Any, rows_per_unit: Sequence[int] = ()) -> None:
        """Refuse a model in which examples interact, for all phases at once, so that a run does not fail half-way.

        Only the shapes of ``sample`` are used. ``rows_per_unit`` are the numbers of rows that users may have in a batch.
        Checked engines are kept for their phases.
        """
        for phase in {phase.engine_key: phase for phase in phases}.values():
            engine = self._new(phase)
            with forked_torch(self._model):
                engine.check_independence(sample, rows_per_unit=rows_per_unit)
            self._checked[phase.engine_key] = engine
        self.reopen()

    def __call__(self, chunks: Iterable[PhysicalBatch]) -> dict[str, Tensor]:
        """The sums over a sample, for the rows that train."""
        engine = self._engine
        engine.reset()
        engine.scale, engine.row_masks = self.scale, self.row_masks
        totals, count = [0.0] * len(self._measures), 0
        for examples, weights in chunks:
            with at_stage(LOSS):
                engine.accumulate(examples, weights)
            for number, measure in enumerate(self._measures.values()):
                with torch.no_grad():
                    values = measure(self._model, examples)
                values = values if weights is None else (values.view_as(weights) * weights).sum(1)
                totals[number] += float(values.sum())
                count += len(values) if number == 0 else 0
        self._totals = [*totals, count]
        return selected_rows(engine.sums, self.row_masks)

    def means(self, ranks: Ranks) -> dict[str, float]:
        """Means of the training measures over the last sample, over all ranks; they are private, and of users are theirs."""
        if not self._measures:
            return {}
        *sums, count = ranks.total(self._totals)
        names = self._measures
        return {f"training_{name}": total / count for name, total in zip(names, sums, strict=True)} if count else {}

    def forget(self) -> None:
        """Forget the sums, which have no noise."""
        self._engine.reset()

    def close(self) -> None:
        """Release the model and restore ``requires_grad`` of every parameter."""
        self._engine.close()
        self._checked.clear()
        self._freeze_all_but(None)

    def _new(self, phase: Phase) -> ClippedGradients | UnclippedGradients:
        self._freeze_all_but(phase.trainable)
        kind: Callable[..., ClippedGradients] = ClippedRowNorms if phase.query == ROW_NORMS else ClippedGradients
        try:
            if not self._private and phase.query != ROW_NORMS:
                return UnclippedGradients(self._model, self._loss)
            return kind(
                self._model,
                self._loss,
                max_grad_norm=self._settings.max_grad_norm if self._private else _NO_BOUND,
                clipping=self._settings.clipping,
                synthetic_batch=self._settings.synthetic_batch,
                strategy=self._performance.strategy,
                autocast=self._performance.autocast,
            )
        except BaseException:
            self._freeze_all_but(None)  # a model that is refused is left as it was
            raise

    def _freeze_all_but(self, trainable: frozenset[str] | None) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(self._trainable_before[name] if trainable is None else name in trainable)


def selected_rows(tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rows that train, gathered; tensors without a mask as they are."""
    return {name: tensor[masks[name]] if name in masks else tensor for name, tensor in tensors.items()}


def scatter_rows(selected: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo :func:`selected_rows`, with zeros in the rows that do not train."""
    whole = dict(selected)
    for name, mask in masks.items():
        if name in selected:
            rows = selected[name]
            whole[name] = rows.new_zeros(len(mask), *rows.shape[1:])
            whole[name][mask] = rows
    return whole


class UnclippedGradients:
    """The sum of ordinary gradients, computed by autograd, for runs without privacy: they have no bounded sensitivity.

    ``scale`` and ``row_masks`` are those of :class:`~dp_microadam.clipping.engine.ClippedGradients`.
    """

    sensitivity = float("inf")

    def __init__(self, model: nn.Module, per_example_loss: PerExample) -> None:
        self._model = model
        self._loss = per_example_loss
        self._trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._trainable:
            raise InputError("model has no trainable parameter; call requires_grad_(True) on those to be trained")
        self.sums: dict[str, Tensor] = {}
        self.scale: Mapping[str, Tensor] | None = None
        self.row_masks: Mapping[str, Tensor] | None = None
        self.reset()

    def accumulate(self, batch: Any, weights: Tensor | None = None) -> Tensor:
        with torch.enable_grad():
            losses = self._loss(self._model, batch)
            if weights is not None:
                losses = (losses.view_as(weights) * weights.to(losses)).sum(1)
            gradients = torch.autograd.grad(losses.sum(), list(self._trainable.values()), allow_unused=True)
        for (name, total), gradient in zip(self.sums.items(), gradients, strict=True):
            if gradient is not None:
                total += gradient if not self.scale or name not in self.scale else gradient * self.scale[name]
        return losses.detach()

    def check_independence(self, batch: Any, *, rows_per_unit: Sequence[int] = ()) -> None:
        """Nothing to check: without privacy examples may interact, as in batch normalization."""

    def reset(self) -> None:
        self.sums = {name: torch.zeros_like(p, requires_grad=False) for name, p in self._trainable.items()}

    def close(self) -> None:
        self.sums = {}
