"""Model families of the experiments: each function builds one, with the initialisation its experiment uses."""

from dp_microadam.models.small_cnn import small_cnn, tanh_cnn
from dp_microadam.models.wide_resnet import wide_resnet

__all__ = ["small_cnn", "tanh_cnn", "wide_resnet"]
