"""Names and arguments of version 0.1 that still work, with a DeprecationWarning, until the next release."""

from __future__ import annotations

import warnings

import torch

from dp_microadam.errors import InputError
from dp_microadam.training.method import GRADIENTS, ROW_NORMS, Method, Phase, Steps, phase_at, phases_from
from dp_microadam.validation import require_one_of

__all__ = ["GRADIENTS", "ROW_NORMS", "Phase", "Procedure", "Steps", "as_in_version_0_1", "phase_at", "phases_from"]


class Procedure(Method):
    """Deprecated: the hooks of a method without its optimizer. A method is now a subclass of :class:`Method`."""

    def __init__(self) -> None:
        self.phase = Method.phase

    def __init_subclass__(cls) -> None:
        warnings.warn(
            "Procedure is deprecated; make a subclass of Method with the same hooks", DeprecationWarning, stacklevel=2
        )


def as_in_version_0_1(
    optimizer: torch.optim.Optimizer | Method, private: bool, method: str | None, procedure: Method | None
) -> tuple[torch.optim.Optimizer | Method, bool]:
    """Translate the arguments ``method="non-private"`` and ``procedure=method.procedure`` into current ones."""
    if method is not None:
        require_one_of("method", method, ("private", "non-private"))
        warnings.warn('method="non-private" is deprecated; pass private=False', DeprecationWarning, stacklevel=3)
        private = method == "private"
    if procedure is not None:
        warnings.warn(
            "procedure= is deprecated; pass the method itself: PrivateTrainer(model, method, plan, loss)",
            DeprecationWarning,
            stacklevel=3,
        )
        if getattr(procedure, "optimizer", optimizer) is not optimizer:
            raise InputError("optimizer is not that of the method whose procedure is given; pass the method itself")
        procedure.optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer
        optimizer = procedure
    return optimizer, private
