"""DP-BiTFiT: train biases and the new head, freeze the rest.

Bu, Wang, Zha and Karypis, "Differentially Private Bias-Term Fine-tuning of Foundation Models" (2024).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dp_microadam.errors import InputError
from dp_microadam.methods.parts import biases_of, head_of
from dp_microadam.methods.step_optimizers import make_optimizer
from dp_microadam.training.method import Method, Phase, PlanLike

MOMENTUM = 0.9


def dp_bitfit(
    model: nn.Module, *, lr: float = 1e-3, head: str | None = None, base_optimizer: str = "sgd", **options: Any
) -> Method:
    """DP-BiTFiT: trains only the biases and the head.

    ``base_optimizer`` is ``"sgd"`` (with momentum 0.9), ``"adam"``, ``"adamw"`` or ``"microadam"``; ``options`` are that
    optimizer's. ``head`` is the name of the head's module, by default the one with the model's last parameter. All
    other parameters are frozen while the trainer runs: their gradients are neither computed nor clipped. Biases need no stored
    activations, since the gradient of a bias is the output gradient summed over positions.

    Raises:
        InputError: for a model without trainable biases outside its head.
    """
    own_head = head_of(model, head)
    chosen = own_head | biases_of(model)
    if chosen == own_head:
        raise InputError("model has no trainable bias outside its head; dp-bitfit needs a model with biases")
    params = [model.get_parameter(name) for name, _ in model.named_parameters() if name in chosen]
    given = {"momentum": MOMENTUM, **options} if base_optimizer == "sgd" else options
    optimizer = make_optimizer(base_optimizer, params, lr, given, choices=("sgd", "adam", "adamw", "microadam"))
    return TrainOnly(optimizer, chosen)


class TrainOnly(Method):
    """A method with one phase, in which only the parameters with these names train."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: frozenset[str]) -> None:
        super().__init__(optimizer)
        self._names = names

    def phases(self, plan: PlanLike) -> tuple[Phase, ...]:
        return (Phase("training", plan.steps, self._names),)
