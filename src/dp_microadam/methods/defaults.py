"""What "default" means, at every door: one function that gives method and plan for a model."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from dp_microadam.methods.registry import builder_of
from dp_microadam.methods.table import DEFAULT
from dp_microadam.plan.bands import DEFAULT_NOISE_MEMORY_GIB
from dp_microadam.plan.learning_rate import ADAPTER_DISTANCE, DISTANCE, distance_from_scratch
from dp_microadam.plan.plan import PrivacyPlan, UnprotectedPlan
from dp_microadam.training.method import Method

Plan = TypeVar("Plan", bound=PrivacyPlan | UnprotectedPlan)


def default(
    model: nn.Module,
    plan: Plan,
    *,
    pretrained: bool | None = None,
    noise_memory_gib: float = DEFAULT_NOISE_MEMORY_GIB,
) -> tuple[Method, Plan]:
    """The default method for a model, and the plan with bands where these pay.

    The method is ``dp_threshold``: :class:`~dp_microadam.ThresholdAdam` with a distance by :func:`default_distance` and an
    average of the weights. A plan with one band becomes one of the same ε, δ and steps with correlated noise, if that leaves
    at most 0.8 of the noise of the running sum and fits into ``noise_memory_gib``.

    >>> plan = PrivacyPlan.solve(dataset_size=1000, batch_size=16, delta=1e-5, epsilon=20.0, steps=400)
    >>> method, banded = default(nn.Linear(10, 2), plan)
    >>> type(method.optimizer).__name__, banded.bands > 1, round(banded.epsilon)
    ('ThresholdAdam', True, 20)
    """
    method = builder_of(DEFAULT)(model, distance=default_distance(model, pretrained))
    return method, with_bands(plan, _trained(model), noise_memory_gib)


def default_distance(model: nn.Module, pretrained: bool | None = None) -> float:
    """How far the noise of a run walks by default: 0.75 for adapters, 1.5 for parts of a pretrained model, as many weights from
    scratch say otherwise (``plan/learning_rate.py``).

    ``pretrained`` None: a model is taken for pretrained if a part of it is frozen, or a module of it says by ``name_or_path``
    where its weights are from, as those of ``transformers`` do.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if any("lora_" in name for name in trained):
        return ADAPTER_DISTANCE
    if pretrained is None:
        pretrained = len(trained) < len(list(model.parameters())) or any(
            getattr(getattr(module, "config", None), "name_or_path", "") for module in model.modules()
        )
    return DISTANCE if pretrained else distance_from_scratch(_trained(model))


def with_bands(plan: Plan, parameters: int, noise_memory_gib: float = DEFAULT_NOISE_MEMORY_GIB) -> Plan:
    """The plan with as many bands as pay for a model of so many parameters, and the same ε, δ and steps."""
    if not isinstance(plan, PrivacyPlan) or type(plan) is not PrivacyPlan or plan.bands > 1:
        return plan
    found = PrivacyPlan.solve(
        dataset_size=plan.dataset_size,
        batch_size=plan.batch_size,
        delta=plan.delta,
        epsilon=plan.epsilon,
        steps=plan.steps,
        accountant=plan.accountant,
        bands="auto",
        parameters=parameters,
        noise_memory_gib=noise_memory_gib,
        max_batch_size=plan.max_batch_size,
        examples_per_user=plan.examples_per_user,
    )
    return found if found.bands > 1 else plan  # type: ignore[return-value]


def _trained(model: nn.Module) -> int:
    return max(1, sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))
