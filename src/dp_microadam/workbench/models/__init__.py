"""Networks of the paper's experiments, without batch statistics, initialised as published; and text models of transformers."""

from dp_microadam.validation import public
from dp_microadam.workbench.models.hugging_face import text_encoder
from dp_microadam.workbench.models.lora import with_lora
from dp_microadam.workbench.models.registry import build, normalization_of
from dp_microadam.workbench.models.resnets import nf_resnet_50, wide_resnet
from dp_microadam.workbench.models.small import mlp, small_cnn, tanh_cnn
from dp_microadam.workbench.models.vit import Normalization, TransformerSize, deit, vit

__all__ = [
    "build",
    "normalization_of",
    "Normalization",
    "wide_resnet",
    "nf_resnet_50",
    "deit",
    "vit",
    "TransformerSize",
    "small_cnn",
    "tanh_cnn",
    "mlp",
    "text_encoder",
    "with_lora",
]

globals().update({name: public(globals()[name]) for name in __all__})
