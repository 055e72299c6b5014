"""Builds models by name, as recipes do."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from dp_microadam.errors import InputError
from dp_microadam.validation import refuse_unknown, require_integer, require_one_of
from dp_microadam.workbench.models.hugging_face import language_model, text_classifier
from dp_microadam.workbench.models.resnets import nf_resnet_50, wide_resnet
from dp_microadam.workbench.models.small import mlp, small_cnn, tanh_cnn
from dp_microadam.workbench.models.vit import CENTRED, IMAGENET, Normalization, deit, vit


class _Builder(NamedTuple):
    """A function that makes a model, and which of its arguments follow from the shape of images: channels, height, width."""

    function: Callable[..., nn.Module]
    given: Callable[[Sequence[int]], dict[str, Any]] = lambda shape: {}
    fits: Callable[[Sequence[int]], bool] = lambda shape: True
    takes: str = "images"


def _transformer(family: Callable[..., nn.Module], size: str) -> _Builder:
    square = "square images with three channels"
    return _Builder(family, lambda shape: {"size": size}, lambda shape: shape[0] == 3 and shape[1] == shape[2], square)


BUILDERS: dict[str, _Builder] = {
    "mlp": _Builder(mlp, lambda shape: {"inputs": math.prod(shape)}),
    "tanh-cnn": _Builder(tanh_cnn, fits=lambda shape: tuple(shape) == (1, 28, 28), takes="28×28 images with one channel"),
    "small-cnn": _Builder(
        small_cnn, lambda shape: {"in_channels": shape[0]}, lambda shape: min(shape[1:]) >= 8, "images of at least 8×8 pixels"
    ),
    "wide-resnet": _Builder(wide_resnet, fits=lambda shape: shape[0] == 3, takes="images with three channels"),
    "nf-resnet-50": _Builder(
        nf_resnet_50,
        fits=lambda shape: shape[0] == 3 and min(shape[1:]) >= 32,
        takes="images of at least 32×32 pixels with three channels",
    ),
    **{f"deit-{size}": _transformer(deit, size) for size in ("tiny", "small", "base")},
    **{f"vit-{size}": _transformer(vit, size) for size in ("tiny", "small", "base", "large")},
    "hugging-face": _Builder(text_classifier),
    "hugging-face-causal": _Builder(language_model),
}


def options_of(name: str) -> tuple[str, ...]:
    """Names of the options of a model."""
    builder = BUILDERS[name]
    given = {"num_classes", "normalization", *builder.given((1, 1, 1))}
    return tuple(option for option in inspect.signature(builder.function).parameters if option not in given)


def build(name: str, num_classes: int, image_shape: Sequence[int], **options: Any) -> nn.Module:
    """Build the model called ``name`` for images of ``image_shape``, randomly initialised unless ``pretrained`` is given.

    Models of texts need ``pretrained``, and take any length.

    >>> build("mlp", 10, (1, 28, 28), hidden=32)[1]
    Linear(in_features=784, out_features=32, bias=True)

    Raises:
        InputError: for an unknown name or option, or images that the model cannot take.
    """
    builder = BUILDERS[require_one_of("model", name, tuple(BUILDERS))]
    require_integer("num_classes", num_classes, 1)
    refuse_unknown(f"model {name}", options, options_of(name))
    if not builder.fits(image_shape):
        channels, height, width = image_shape
        raise InputError(f"model {name} takes {builder.takes}; these are {height}×{width} with {channels} channels")
    classes = {} if builder.function is language_model else {"num_classes": num_classes}
    return builder.function(**classes, **builder.given(image_shape), **options)


def normalization_of(model: str | nn.Module) -> Normalization | None:
    """The normalization constants that a model's pretrained weights expect.

    For a name, those of the family's published weights; for a model, those of the weights it was built with. None if there
    are none, as for random weights; use the constants of the data set then.

    >>> normalization_of("deit-tiny").mean, normalization_of("vit-tiny").mean, normalization_of("wide-resnet")
    ((0.485, 0.456, 0.406), (0.5, 0.5, 0.5), None)
    """
    if isinstance(model, nn.Module):
        return getattr(model, "normalization", None)
    family = require_one_of("model", model, tuple(BUILDERS)).partition("-")[0]
    return {"deit": IMAGENET, "vit": CENTRED}.get(family)
