"""Every method the paper compares with: each a function that wires an optimizer, and what happens around its steps, into the
trainer. Recipes choose from ``registry.METHODS``."""

from dp_microadam.methods.adam_bc import dp_adambc
from dp_microadam.methods.bitfit import dp_bitfit
from dp_microadam.methods.optimizers_alone import dp_adam, dp_adamw, dp_microadam, dp_sgd
from dp_microadam.methods.scale_sources import PublicExamples
from dp_microadam.methods.scale_then_privatize import scale_then_privatize
from dp_microadam.methods.sparta import sparta
from dp_microadam.training.method import Method

__all__ = [
    "Method",
    "PublicExamples",
    "dp_adam",
    "dp_adambc",
    "dp_adamw",
    "dp_bitfit",
    "dp_microadam",
    "dp_sgd",
    "scale_then_privatize",
    "sparta",
]
