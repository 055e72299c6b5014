"""The base optimizers of methods, by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.methods.table import OPTIMIZERS
from dp_microadam.validation import refuse_unknown, require_one_of


def at_path(path: str) -> Any:
    """Import the object at ``module:name``.

    >>> at_path("torch.optim:SGD").__name__
    'SGD'
    """
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def options_of(name: str) -> list[str]:
    """The options of the optimizer called ``name``, besides its learning rate."""
    return [option for option in inspect.signature(at_path(OPTIMIZERS[name].path)).parameters if option not in ("params", "lr")]


def make_optimizer(
    name: str,
    params: Iterable[Tensor],
    lr: float,
    options: Mapping[str, Any],
    *,
    choices: tuple[str, ...] = tuple(OPTIMIZERS),
) -> torch.optim.Optimizer:
    """Create the optimizer called ``name``; options or values that it does not accept raise an InputError.

    >>> make_optimizer("sgd", [nn.Parameter(torch.zeros(2))], 4.0, {"momentum": 0.9}).defaults["momentum"]
    0.9
    """
    require_one_of("base_optimizer", name, choices)
    refuse_unknown(name, options, options_of(name))
    try:
        optimizer: torch.optim.Optimizer = at_path(OPTIMIZERS[name].path)(params, lr=lr, **options)
        return optimizer
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{option} = {value!r}" for option, value in options.items())
        raise InputError(
            f"{name} does not accept {given or f'lr = {lr}'} ({error}); give options and values that its signature takes"
        ) from None


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
