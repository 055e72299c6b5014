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
    "window_dtype",
    "bias_correction",
    "rounding",
    "fused",
)

_SGD_OPTIONS = ("momentum", "dampening", "weight_decay", "nesterov")
_ADAM_OPTIONS = ("betas", "eps", "weight_decay", "amsgrad")
_ANY_BEHIND = tuple(dict.fromkeys((*_SGD_OPTIONS, *_ADAM_OPTIONS, *_MICRO_ADAM_OPTIONS)))

OPTIMIZER_OPTIONS: dict[str, tuple[str, ...]] = {
    "dp-microadam": _MICRO_ADAM_OPTIONS,
    "dp-sgd": _SGD_OPTIONS,
    "dp-adam": _ADAM_OPTIONS,
    "dp-adamw": _ADAM_OPTIONS,
    "dp-adambc": ("floor", "betas", "weight_decay"),
    "scale-then-privatize": (
        "source",
        "behind",
        "scale_eps",
        "interval",
        "decay",
        "norm_ratio",
        "rate_ratio",
        "public",
        *_ANY_BEHIND,
    ),
    "dp-bitfit": ("behind", "head", *_ANY_BEHIND),
    "sparta": ("keep", "scores", "first_phase", "scoring_epochs", "rows_only", "head", "behind", *_ANY_BEHIND),
}
"""By method: its own, and those of the optimizer it steps with. The step size is the recipe's ``learning_rate``."""

DEFAULT_LEARNING_RATES = {
    "dp-microadam": 1e-3,
    "dp-sgd": 4.0,
    "dp-adam": 1e-3,
    "dp-adamw": 1e-3,
    "dp-adambc": 1e-3,
    "scale-then-privatize": 1e-3,
    "dp-bitfit": 1e-3,
    "sparta": 1e-3,
}
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

DATA_OPTIONS: dict[str, tuple[str, ...]] = {
    "digits": (),
    "mnist": (),
    "fashion-mnist": (),
    "cifar10": (),
    "cifar100": ("labels",),
    "imagenet": (),
    "image-folder": ("mean", "std"),
    "table": ("label", "classes", "mean", "std"),
}
"""By data set."""

BASES = tuple(OPTIMIZER_OPTIONS)
METHODS = (*BASES, NON_PRIVATE)
MODELS = tuple(MODEL_OPTIONS)
DATA_SETS = tuple(DATA_OPTIONS)
