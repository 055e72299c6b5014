"""Model families of the experiments: each function builds one, with the initialisation its experiment uses."""

from dp_microadam.models.mlp import mlp
from dp_microadam.models.registry import build
from dp_microadam.models.small_cnn import small_cnn, tanh_cnn
from dp_microadam.models.wide_resnet import wide_resnet

__all__ = ["build", "mlp", "small_cnn", "tanh_cnn", "wide_resnet"]
