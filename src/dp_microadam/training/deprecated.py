"""Arguments of version 0.1 that still work, with a DeprecationWarning, until the next release."""

from __future__ import annotations

import warnings

import torch

from dp_microadam.errors import InputError
from dp_microadam.training.method import Method
from dp_microadam.validation import require_one_of


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
        if procedure.optimizer is not optimizer:
            raise InputError("optimizer is not that of the method whose procedure is given; pass the method itself")
        optimizer = procedure
    return optimizer, private
