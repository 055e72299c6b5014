"""The words a recipe may use for its method, model and data, and the options each of them takes.

Those of models are written out because the code behind them imports torch, and a recipe is checked without it. A test compares
them with that code.
"""

from __future__ import annotations

from dp_microadam.data.catalogue import KNOWN_DATA, known
from dp_microadam.methods import table

OPTIMIZER_OPTIONS = {name: entry.all_options for name, entry in table.METHODS.items()}
"""By method: its own, and those of the optimizer it steps with. The step size is the recipe's ``learning_rate``."""

DEFAULT_LEARNING_RATES = {name: entry.learning_rate for name, entry in table.METHODS.items()}
"""By method, for recipes that name none: those of the paper's tables."""

NON_PRIVATE = "non-private"
NON_PRIVATE_LEARNING_RATES = {"dp-sgd": 0.1}
"""Where a method without clipping wants another: 4.0 suits gradients of norm below one."""

_TRANSFORMER_OPTIONS = ("pretrained", "resolution", "patch_size", "trainable")

MODEL_OPTIONS: dict[str, tuple[str, ...]] = {
    "mlp": ("hidden",),
    "tanh-cnn": (),
    "small-cnn": ("width",),
    "wide-resnet": ("depth", "width", "groups", "weight_standardization"),
    "nf-resnet-50": ("width", "alpha", "skip_gain", "stochastic_depth", "gain"),
    **dict.fromkeys(("deit-tiny", "deit-small", "deit-base"), _TRANSFORMER_OPTIONS),
    **dict.fromkeys(("vit-tiny", "vit-small", "vit-base", "vit-large"), _TRANSFORMER_OPTIONS),
}
"""By model."""

DATA_OPTIONS = {name: known(name).options for name in KNOWN_DATA}
"""By data set."""

BASES = tuple(OPTIMIZER_OPTIONS)
METHODS = (*BASES, NON_PRIVATE)
MODELS = tuple(MODEL_OPTIONS)
DATA_SETS = tuple(DATA_OPTIONS)
