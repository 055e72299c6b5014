"""Differentially private training and fine-tuning in PyTorch, with DP-MicroAdam as the optimizer of choice.

Public names are loaded on first use: ``import dp_microadam`` alone does not import torch, which takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dp_microadam.validation import public

__version__ = "0.2.0"

# Where each public name lives. Adding one here and below is all that makes it public.
_HOMES = {
    "PrivateTrainer": "dp_microadam.training.trainer",
    "PrivateStep": "dp_microadam.training.private_step",
    "PrivacySettings": "dp_microadam.training.settings",
    "PerformanceSettings": "dp_microadam.training.settings",
    "RecordSettings": "dp_microadam.training.settings",
    "UnprotectedPlan": "dp_microadam.plan.plan",
    "Method": "dp_microadam.training.method",
    "Schedule": "dp_microadam.training.rates",
    "MicroAdam": "dp_microadam.optimizers.micro_adam",
    "ThresholdAdam": "dp_microadam.optimizers.threshold_adam",
    "ClippedGradients": "dp_microadam.clipping.engine",
    "replace_batchnorm": "dp_microadam.layers.batchnorm",
    "register_rule": "dp_microadam.clipping.rules.families",
    "PrivacyPlan": "dp_microadam.plan.plan",
    "GaussianMechanism": "dp_microadam.noise.mechanism",
    "read_ledger": "dp_microadam.ledger.ledger",
    "privacy_report": "dp_microadam.ledger.statement",
    "InputError": "dp_microadam.errors",
    "PrivacyError": "dp_microadam.errors",
}

# Public modules, imported as a whole.
_MODULES = ("methods",)

__all__ = [
    "PrivateTrainer",
    "PrivateStep",
    "PrivacySettings",
    "PerformanceSettings",
    "RecordSettings",
    "UnprotectedPlan",
    "Method",
    "Schedule",
    "MicroAdam",
    "ThresholdAdam",
    "ClippedGradients",
    "replace_batchnorm",
    "register_rule",
    "PrivacyPlan",
    "GaussianMechanism",
    "read_ledger",
    "privacy_report",
    "InputError",
    "PrivacyError",
    "methods",
]

if TYPE_CHECKING:
    from dp_microadam import methods
    from dp_microadam.clipping.engine import ClippedGradients
    from dp_microadam.clipping.rules.families import register_rule
    from dp_microadam.errors import InputError, PrivacyError
    from dp_microadam.layers.batchnorm import replace_batchnorm
    from dp_microadam.ledger.ledger import read_ledger
    from dp_microadam.ledger.statement import privacy_report
    from dp_microadam.noise.mechanism import GaussianMechanism
    from dp_microadam.optimizers.micro_adam import MicroAdam
    from dp_microadam.optimizers.threshold_adam import ThresholdAdam
    from dp_microadam.plan.plan import PrivacyPlan, UnprotectedPlan
    from dp_microadam.training.method import Method
    from dp_microadam.training.private_step import PrivateStep
    from dp_microadam.training.rates import Schedule
    from dp_microadam.training.settings import PerformanceSettings, PrivacySettings, RecordSettings
    from dp_microadam.training.trainer import PrivateTrainer


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"dp_microadam.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'dp_microadam' has no attribute {name!r}")
    value = public(getattr(importlib.import_module(_HOMES[name]), name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
