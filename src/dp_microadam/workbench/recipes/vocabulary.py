"""Names that a recipe may use for its method, model and data, and the options of each.

Models are listed by hand because their code imports torch and recipes are checked without it. A test compares the list with
that code.
"""

from __future__ import annotations

from dp_microadam.methods import table
from dp_microadam.workbench.data.catalogue import KNOWN_DATA, known

OPTIMIZER_OPTIONS = {name: entry.all_options for name, entry in table.METHODS.items()}
"""By method: its own options and those of its optimizer. The learning rate is the recipe's ``learning_rate``."""

NON_PRIVATE = "non-private"

PARTLY_TRAINED = ("dp-bitfit", "sparta")
"""Methods that train a part of the parameters, or other parts in other phases."""

TEXT_CLASSIFIER = "hugging-face"
LANGUAGE_MODEL = "hugging-face-causal"
TEXT_MODELS = (TEXT_CLASSIFIER, LANGUAGE_MODEL)
TEXT_SETS = tuple(name for name in KNOWN_DATA if known(name).kind == "text")

_LORA_OPTIONS = ("lora_rank", "lora_alpha", "lora_targets")
_TRANSFORMER_OPTIONS = ("pretrained", "resolution", "patch_size", "trainable", "normalize_features", *_LORA_OPTIONS)

MODEL_OPTIONS: dict[str, tuple[str, ...]] = {
    "mlp": ("hidden",),
    "tanh-cnn": (),
    "small-cnn": ("width",),
    "wide-resnet": ("depth", "width", "groups", "weight_standardization"),
    "nf-resnet-50": ("width", "alpha", "skip_gain", "stochastic_depth", "gain"),
    **dict.fromkeys(("deit-tiny", "deit-small", "deit-base"), _TRANSFORMER_OPTIONS),
    **dict.fromkeys(("vit-tiny", "vit-small", "vit-base", "vit-large"), _TRANSFORMER_OPTIONS),
    TEXT_CLASSIFIER: ("pretrained", "trainable", "pooling", *_LORA_OPTIONS),
    LANGUAGE_MODEL: ("pretrained", "prompt", *_LORA_OPTIONS),
}
"""Options by model."""

DATA_OPTIONS = {name: known(name).options for name in KNOWN_DATA}
"""Options by data set."""

TABLES = {"optimizer": OPTIMIZER_OPTIONS, "model_options": MODEL_OPTIONS, "data_options": DATA_OPTIONS}
"""A recipe's tables of options, by the method, model or data that has them."""

USER_OPTIONS = ("user_column", "user_table", "user_pattern")
"""Options of data that say whose each example is."""

BASES = tuple(OPTIMIZER_OPTIONS)
METHODS = (*BASES, NON_PRIVATE)
MODELS = tuple(MODEL_OPTIONS)
DATA_SETS = tuple(DATA_OPTIONS)
