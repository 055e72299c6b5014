"""The gradient engines of a run: one for each combination of query and trainable parameters among its phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from dp_microadam.training.gradients import GradientSums
from dp_microadam.training.method import Phase
from dp_microadam.training.torch_randomness import forked_torch


class Engines:
    """Creates, checks and switches gradient engines as phases change, and freezes parameters that a phase does not train.

    ``make(phase)`` returns a new engine; parameters are frozen as the phase requires when it is called.
    """

    def __init__(self, model: nn.Module, make: Callable[[Phase], GradientSums], first: Phase) -> None:
        self._model = model
        self._make = make
        self._trainable_before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        self._checked: dict[Any, GradientSums] = {}
        self._phase = first
        self.current = self._new(first)

    def enter(self, phase: Phase) -> None:
        """Switch to the engine of ``phase``; from here on only the phase's parameters require gradients."""
        if phase.engine_key != self._phase.engine_key:
            self._phase = phase
            self.reopen()

    def reopen(self) -> None:
        """Close the engine in use and open one for the current phase, already checked if possible."""
        self.current.close()
        checked = self._checked.pop(self._phase.engine_key, None)
        self.current = self._new(self._phase) if checked is None else checked
        self._freeze_all_but(self._phase.trainable)

    def check_independence(self, phases: Sequence[Phase], sample: Any, rows_per_unit: Sequence[int] = ()) -> None:
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

    def close(self) -> None:
        """Release the model and restore ``requires_grad`` of every parameter."""
        self.current.close()
        self._checked.clear()
        self._freeze_all_but(None)

    def _new(self, phase: Phase) -> GradientSums:
        self._freeze_all_but(phase.trainable)
        try:
            return self._make(phase)
        except BaseException:
            self._freeze_all_but(None)  # a model that is refused is left as it was
            raise

    def _freeze_all_but(self, trainable: frozenset[str] | None) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(self._trainable_before[name] if trainable is None else name in trainable)
