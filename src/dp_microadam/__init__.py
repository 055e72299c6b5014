"""Differentially private training and fine-tuning in PyTorch, with DP-MicroAdam as the optimizer of choice.

Public names are loaded on first use: ``import dp_microadam`` alone does not import torch, which takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dp_microadam.moved import answer_old_names

__version__ = "0.1.0"

# Where each public name lives. Adding one here and below is all that makes it public.
_HOMES = {
    "PrivateTrainer": "dp_microadam.training.trainer",
    "PrivateStep": "dp_microadam.training.private_step",
    "MicroAdam": "dp_microadam.optimizers.micro_adam",
    "AdamBC": "dp_microadam.optimizers.adam_bc",
    "ClippedGradients": "dp_microadam.clipping.engine",
    "replace_batchnorm": "dp_microadam.clipping.batchnorm",
    "PrivacyPlan": "dp_microadam.privacy.plan",
    "PoissonSampler": "dp_microadam.privacy.sampling",
    "GaussianMechanism": "dp_microadam.privacy.mechanism",
    "PrivacyLedger": "dp_microadam.privacy.ledger",
    "Randomness": "dp_microadam.privacy.randomness",
    "DPMicroAdamError": "dp_microadam.errors",
    "InputError": "dp_microadam.errors",
    "PrivacyError": "dp_microadam.errors",
}

# Public modules, imported as a whole.
_MODULES = ("methods", "models")

__all__ = [
    "PrivateTrainer",
    "PrivateStep",
    "MicroAdam",
    "AdamBC",
    "ClippedGradients",
    "replace_batchnorm",
    "PrivacyPlan",
    "PoissonSampler",
    "GaussianMechanism",
    "PrivacyLedger",
    "Randomness",
    "methods",
    "models",
    "DPMicroAdamError",
    "InputError",
    "PrivacyError",
    "__version__",
]

if TYPE_CHECKING:
    from dp_microadam import methods, models
    from dp_microadam.clipping.batchnorm import replace_batchnorm
    from dp_microadam.clipping.engine import ClippedGradients
    from dp_microadam.errors import DPMicroAdamError, InputError, PrivacyError
    from dp_microadam.optimizers.adam_bc import AdamBC
    from dp_microadam.optimizers.micro_adam import MicroAdam
    from dp_microadam.privacy.ledger import PrivacyLedger
    from dp_microadam.privacy.mechanism import GaussianMechanism
    from dp_microadam.privacy.plan import PrivacyPlan
    from dp_microadam.privacy.randomness import Randomness
    from dp_microadam.privacy.sampling import PoissonSampler
    from dp_microadam.training.private_step import PrivateStep
    from dp_microadam.training.trainer import PrivateTrainer

answer_old_names()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"dp_microadam.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'dp_microadam' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
