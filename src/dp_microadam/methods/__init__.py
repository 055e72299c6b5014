"""The private training methods of the paper's comparison: functions of a model that return a :class:`Method` for the trainer.

``table.py`` lists them; ``methods.dp_sgd(model, lr=4.0)`` builds the one called ``"dp-sgd"`` there. They are loaded on first
use, because their code imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dp_microadam.methods.table import METHODS
from dp_microadam.validation import public

if TYPE_CHECKING:
    from dp_microadam.methods.defaults import default
    from dp_microadam.methods.scaling import PublicExamples
    from dp_microadam.training.method import Method

    dp_threshold: Callable[..., Method]
    dp_walk: Callable[..., Method]
    dp_microadam: Callable[..., Method]
    dp_sgd: Callable[..., Method]
    dp_adam: Callable[..., Method]
    dp_adamw: Callable[..., Method]
    dp_adambc: Callable[..., Method]
    dp_bitfit: Callable[..., Method]
    scale_then_privatize: Callable[..., Method]
    sparta: Callable[..., Method]

__all__ = [
    "Method",
    "PublicExamples",
    "default",
    "dp_adam",
    "dp_adambc",
    "dp_adamw",
    "dp_bitfit",
    "dp_microadam",
    "dp_sgd",
    "dp_threshold",
    "dp_walk",
    "scale_then_privatize",
    "sparta",
]


def __getattr__(name: str) -> Any:
    found: Any
    if name == "Method":
        from dp_microadam.training.method import Method as found
    elif name == "default":
        from dp_microadam.methods.defaults import default

        found = public(default)
    elif name == "PublicExamples":
        from dp_microadam.methods.scaling import PublicExamples

        found = public(PublicExamples)
    elif name.replace("_", "-") in METHODS:
        from dp_microadam.methods.registry import builder_of

        found = builder_of(name.replace("_", "-"))
    else:
        raise AttributeError(f"module 'dp_microadam.methods' has no attribute {name!r}")
    globals()[name] = found
    return found
