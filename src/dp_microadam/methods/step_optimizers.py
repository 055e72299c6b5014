"""The optimizers that methods step with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.optimizers.adam_bc import AdamBC
from dp_microadam.optimizers.micro_adam import MicroAdam
from dp_microadam.validation import require_one_of

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adambc": AdamBC,
    "microadam": MicroAdam,
}


def make_optimizer(
    name: str, params: Iterable[Tensor], lr: float, options: Mapping[str, Any], *, choices: tuple[str, ...] = tuple(OPTIMIZERS)
) -> torch.optim.Optimizer:
    """The optimizer called ``name``; options it does not know, or values it does not take, are refused.

    >>> make_optimizer("sgd", [nn.Parameter(torch.zeros(2))], 4.0, {"momentum": 0.9}).defaults["momentum"]
    0.9
    """
    require_one_of("behind", name, choices)
    try:
        return OPTIMIZERS[name](params, lr=lr, **options)
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{option} = {value!r}" for option, value in options.items())
        raise InputError(f"{name} does not take {given or f'lr = {lr}'}: {error}") from None


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
