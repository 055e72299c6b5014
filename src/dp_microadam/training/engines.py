"""The gradient engines of a run: one for each query that its phases run on the training data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from dp_microadam.training.gradients import GradientSums
from dp_microadam.training.method import Phase
from dp_microadam.training.torch_randomness import forked_torch


class Engines:
    """Makes, checks and switches engines as phases change, and freezes the parameters that a phase does not train.

    ``make(phase)`` returns a new engine for the model as it is frozen then.
    """

    def __init__(self, model: nn.Module, make: Callable[[Phase], GradientSums], first: Phase) -> None:
        self._model = model
        self._make = make
        self._trainable_before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        self._checked: dict[Any, GradientSums] = {}
        self._phase = first
        self.current = self._new(first)

    def enter(self, phase: Phase) -> None:
        """Use the engine of ``phase``, whose parameters alone require gradients from here on."""
        if phase.engine_key != self._phase.engine_key:
            self._phase = phase
            self.reopen()

    def reopen(self) -> None:
        """A fresh or checked engine for the current phase; the one in use before is closed."""
        self.current.close()
        checked = self._checked.pop(self._phase.engine_key, None)
        self.current = self._new(self._phase) if checked is None else checked
        self._freeze_all_but(self._phase.trainable)

    def check_independence(self, phases: Sequence[Phase], sample: Any) -> None:
        """Refuse a model in which examples interact, in any phase: a run must not fail half-way for what is known before.

        Only the shapes of ``sample`` are used. What was checked is kept for its phase.
        """
        for phase in {phase.engine_key: phase for phase in phases}.values():
            engine = self._new(phase)
            with forked_torch(self._model):
                engine.check_independence(sample)
            self._checked[phase.engine_key] = engine
        self.reopen()

    def close(self) -> None:
        """Release the model: every parameter requires gradients as it did before."""
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
