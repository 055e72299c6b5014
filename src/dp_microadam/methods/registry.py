"""Which optimizer a method steps with, and whether it is private."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.optimizers.micro_adam import MicroAdam
from dp_microadam.validation import require_one_of


@dataclass(frozen=True)
class Method:
    """How a recipe's ``method`` trains."""

    optimizer: Callable[..., torch.optim.Optimizer]
    private: bool = True


METHODS: Mapping[str, Method] = {
    "dp-microadam": Method(MicroAdam),
    "dp-sgd": Method(torch.optim.SGD),
    "dp-adam": Method(torch.optim.Adam),
    "non-private": Method(MicroAdam, private=False),
}


def build_optimizer(
    method: str, params: Iterable[Tensor], learning_rate: float, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer of ``method`` on ``params``.

    >>> build_optimizer("dp-sgd", [torch.nn.Parameter(torch.zeros(2))], 4.0, {}).defaults["lr"]
    4.0
    """
    require_one_of("method", method, tuple(METHODS))
    named = {name: _value(value) for name, value in options.items()}
    try:
        return METHODS[method].optimizer(params, lr=learning_rate, **named)
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(f"the optimizer of {method} does not take {dict(options)}: {error}") from None


def _value(value: Any) -> Any:
    """A recipe's value as Python wants it: lists are tuples, and dtypes go by their name."""
    if isinstance(value, list):
        return tuple(value)
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    return dtype if isinstance(dtype, torch.dtype) else value
