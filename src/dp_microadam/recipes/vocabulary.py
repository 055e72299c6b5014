"""The words a recipe may use for its method, model and data, and the options each of them takes.

They are written out because the code behind them imports torch, and a recipe is checked without it. Tests compare each
list with that code.
"""

from __future__ import annotations

_MICRO_ADAM_OPTIONS = (
    "betas",
    "eps",
    "weight_decay",
    "density",
    "window",
    "scope",
    "quantize",
    "error_feedback",
    "block_size",
    "bucket_size",
    "bias_correction",
    "rounding",
    "fused",
)

OPTIMIZER_OPTIONS: dict[str, tuple[str, ...]] = {
    "dp-microadam": _MICRO_ADAM_OPTIONS,
    "dp-sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
    "dp-adam": ("betas", "eps", "weight_decay", "amsgrad"),
    "non-private": _MICRO_ADAM_OPTIONS,
}
"""By method. The step size is the recipe's ``learning_rate``; the non-private run uses MicroAdam too."""

DEFAULT_LEARNING_RATES = {"dp-microadam": 1e-3, "dp-sgd": 4.0, "dp-adam": 1e-3, "non-private": 1e-3}
"""By method, for recipes that name none."""

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

METHODS = tuple(OPTIMIZER_OPTIONS)
MODELS = tuple(MODEL_OPTIONS)
DATA_SETS = ("digits", "mnist", "fashion-mnist")
