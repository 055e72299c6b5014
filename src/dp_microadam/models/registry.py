"""Models by the names recipes use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from dp_microadam.errors import InputError
from dp_microadam.models.mlp import mlp
from dp_microadam.models.small_cnn import small_cnn, tanh_cnn
from dp_microadam.models.wide_resnet import wide_resnet
from dp_microadam.validation import require_integer, require_one_of

ImageShape = tuple[int, int, int]
"""Channels, height, width."""


def _mlp(num_classes: int, shape: ImageShape, *, hidden: int | Sequence[int] = (128,)) -> nn.Module:
    channels, height, width = shape
    return mlp(channels * height * width, hidden, num_classes)


def _tanh_cnn(num_classes: int, shape: ImageShape) -> nn.Module:
    _require_shape("tanh-cnn", shape, shape == (1, 28, 28), "28×28 images with one channel")
    return tanh_cnn(num_classes)


def _small_cnn(num_classes: int, shape: ImageShape, *, width: int = 32) -> nn.Module:
    _require_shape("small-cnn", shape, min(shape[1:]) >= 8, "images of at least 8×8 pixels")
    return small_cnn(num_classes, width, in_channels=shape[0])


def _wide_resnet(
    num_classes: int,
    shape: ImageShape,
    *,
    depth: int = 16,
    width: int = 4,
    groups: int = 16,
    weight_standardization: bool = True,
) -> nn.Module:
    _require_shape("wide-resnet", shape, shape[0] == 3, "images with three channels")
    if not isinstance(weight_standardization, bool):
        raise InputError(f"weight_standardization is {weight_standardization!r}; it must be true or false")
    return wide_resnet(depth, width, num_classes, groups=groups, weight_standardization=weight_standardization)


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "mlp": _mlp,
    "tanh-cnn": _tanh_cnn,
    "small-cnn": _small_cnn,
    "wide-resnet": _wide_resnet,
}
"""Each takes the number of classes and the image shape, and its options as keywords."""


def options_of(name: str) -> tuple[str, ...]:
    """Names of the options the model takes."""
    parameters = inspect.signature(BUILDERS[name]).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


def build(name: str, num_classes: int, image_shape: ImageShape, **options: Any) -> nn.Module:
    """The model called ``name`` for images of ``image_shape``, with freshly initialised weights.

    >>> build("mlp", 10, (1, 28, 28), hidden=32)[1]
    Linear(in_features=784, out_features=32, bias=True)

    Raises:
        InputError: for an unknown name or option, or images that the model cannot take.
    """
    require_one_of("model", name, tuple(BUILDERS))
    require_integer("num_classes", num_classes, 1)
    known = options_of(name)
    for option, value in options.items():
        if option not in known:
            what = f"its options are {', '.join(known)}" if known else "it has no options"
            raise InputError(f"model option {option} = {value!r} is unknown to {name}; {what}")
    return BUILDERS[name](num_classes, image_shape, **options)


def _require_shape(name: str, shape: ImageShape, fits: bool, wanted: str) -> None:
    if not fits:
        channels, height, width = shape
        raise InputError(f"model {name} takes {wanted}; these are {height}×{width} with {channels} channels")
