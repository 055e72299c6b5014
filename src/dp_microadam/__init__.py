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
    "UnprotectedPlan": "dp_microadam.plan.unprotected",
    "Method": "dp_microadam.training.method",
    "Phase": "dp_microadam.training.method",
    "RunNoise": "dp_microadam.training.rates",
    "Schedule": "dp_microadam.training.rates",
    "Ranks": "dp_microadam.training.distributed",
    "RunResult": "dp_microadam.training.run_folder",
    "FrozenFeatures": "dp_microadam.training.frozen_features",
    "PrivateSearch": "dp_microadam.training.search",
    "SearchResult": "dp_microadam.training.search",
    "PerExample": "dp_microadam.training.evaluation",
    "StepReport": "dp_microadam.training.run_folder",
    "RawInput": "dp_microadam.training.raw_inputs",
    "RawImages": "dp_microadam.workbench.data.raw",
    "RawRows": "dp_microadam.workbench.data.raw",
    "MicroAdam": "dp_microadam.optimizers.micro_adam",
    "AdamBC": "dp_microadam.optimizers.adam_bc",
    "TensorAdam": "dp_microadam.optimizers.tensor_adam",
    "ThresholdAdam": "dp_microadam.optimizers.threshold_adam",
    "ClippedGradients": "dp_microadam.clipping.engine",
    "replace_batchnorm": "dp_microadam.layers.batchnorm",
    "register_rule": "dp_microadam.clipping.rules.families",
    "LayerRule": "dp_microadam.clipping.rules.rule",
    "LayerCall": "dp_microadam.clipping.rules.rule",
    "PartsCall": "dp_microadam.clipping.rules.rule",
    "UncertainNorms": "dp_microadam.clipping.outer_product",
    "GradientRows": "dp_microadam.clipping.rules.rule",
    "UnchangedInput": "dp_microadam.clipping.rules.rule",
    "per_example_gradients": "dp_microadam.clipping.per_example",
    "PrivacyPlan": "dp_microadam.plan.plan",
    "SelectionPlan": "dp_microadam.plan.selection_plan",
    "PoissonSampler": "dp_microadam.sampling.poisson",
    "GaussianMechanism": "dp_microadam.noise.mechanism",
    "CorrelatedNoise": "dp_microadam.noise.correlated",
    "PrivacyLedger": "dp_microadam.ledger.ledger",
    "RunSettings": "dp_microadam.ledger.ledger",
    "LedgerRecord": "dp_microadam.ledger.ledger",
    "read_ledger": "dp_microadam.ledger.ledger",
    "SubsampledGaussian": "dp_microadam.accounting.costs",
    "PrivacyCost": "dp_microadam.accounting.costs",
    "Cap": "dp_microadam.accounting.one_step",
    "Units": "dp_microadam.sampling.users",
    "WeightedRows": "dp_microadam.sampling.users",
    "LogicalStep": "dp_microadam.sampling.poisson",
    "privacy_report": "dp_microadam.ledger.statement",
    "Randomness": "dp_microadam.noise.randomness",
    "DPMicroAdamError": "dp_microadam.errors",
    "InputError": "dp_microadam.errors",
    "PrivacyWarning": "dp_microadam.errors",
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
    "Phase",
    "RunNoise",
    "Schedule",
    "Ranks",
    "RunResult",
    "FrozenFeatures",
    "PrivateSearch",
    "SearchResult",
    "PerExample",
    "StepReport",
    "RawInput",
    "RawImages",
    "RawRows",
    "MicroAdam",
    "AdamBC",
    "TensorAdam",
    "ThresholdAdam",
    "ClippedGradients",
    "replace_batchnorm",
    "register_rule",
    "LayerRule",
    "LayerCall",
    "PartsCall",
    "UncertainNorms",
    "GradientRows",
    "UnchangedInput",
    "per_example_gradients",
    "PrivacyPlan",
    "SelectionPlan",
    "PoissonSampler",
    "GaussianMechanism",
    "CorrelatedNoise",
    "PrivacyLedger",
    "RunSettings",
    "LedgerRecord",
    "read_ledger",
    "SubsampledGaussian",
    "PrivacyCost",
    "Cap",
    "Units",
    "WeightedRows",
    "LogicalStep",
    "privacy_report",
    "Randomness",
    "DPMicroAdamError",
    "InputError",
    "PrivacyWarning",
    "PrivacyError",
    "methods",
    "__version__",
]

if TYPE_CHECKING:
    from dp_microadam import methods
    from dp_microadam.accounting.costs import PrivacyCost, SubsampledGaussian
    from dp_microadam.accounting.one_step import Cap
    from dp_microadam.clipping.engine import ClippedGradients
    from dp_microadam.clipping.outer_product import UncertainNorms
    from dp_microadam.clipping.per_example import per_example_gradients
    from dp_microadam.clipping.rules.families import register_rule
    from dp_microadam.clipping.rules.rule import GradientRows, LayerCall, LayerRule, PartsCall, UnchangedInput
    from dp_microadam.errors import DPMicroAdamError, InputError, PrivacyError, PrivacyWarning
    from dp_microadam.layers.batchnorm import replace_batchnorm
    from dp_microadam.ledger.ledger import LedgerRecord, PrivacyLedger, RunSettings, read_ledger
    from dp_microadam.ledger.statement import privacy_report
    from dp_microadam.noise.correlated import CorrelatedNoise
    from dp_microadam.noise.mechanism import GaussianMechanism
    from dp_microadam.noise.randomness import Randomness
    from dp_microadam.optimizers.adam_bc import AdamBC
    from dp_microadam.optimizers.micro_adam import MicroAdam
    from dp_microadam.optimizers.tensor_adam import TensorAdam
    from dp_microadam.optimizers.threshold_adam import ThresholdAdam
    from dp_microadam.plan.plan import PrivacyPlan
    from dp_microadam.plan.selection_plan import SelectionPlan
    from dp_microadam.plan.unprotected import UnprotectedPlan
    from dp_microadam.sampling.poisson import LogicalStep, PoissonSampler
    from dp_microadam.sampling.users import Units, WeightedRows
    from dp_microadam.training.distributed import Ranks
    from dp_microadam.training.evaluation import PerExample
    from dp_microadam.training.frozen_features import FrozenFeatures
    from dp_microadam.training.method import Method, Phase
    from dp_microadam.training.private_step import PrivateStep
    from dp_microadam.training.rates import RunNoise, Schedule
    from dp_microadam.training.raw_inputs import RawInput
    from dp_microadam.training.run_folder import RunResult, StepReport
    from dp_microadam.training.search import PrivateSearch, SearchResult
    from dp_microadam.training.settings import PerformanceSettings, PrivacySettings, RecordSettings
    from dp_microadam.training.trainer import PrivateTrainer
    from dp_microadam.workbench.data.raw import RawImages, RawRows


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
