"""Builds models by name, as recipes do."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from dp_microadam.errors import InputError
from dp_microadam.validation import refuse_unknown, require_integer, require_one_of
from dp_microadam.workbench.models.hugging_face import language_model, text_classifier
from dp_microadam.workbench.models.nf_resnet import nf_resnet_50
from dp_microadam.workbench.models.small import mlp, small_cnn, tanh_cnn
from dp_microadam.workbench.models.vit import CENTRED, IMAGENET, Normalization, deit, vit
from dp_microadam.workbench.models.wide_resnet import wide_resnet

ImageShape = tuple[int, int, int]
"""Channels, height, width."""


def _mlp(num_classes: int, shape: ImageShape, *, hidden: int | Sequence[int] = (128,)) -> nn.Module:
    return mlp(math.prod(shape), hidden, num_classes)


def _tanh_cnn(num_classes: int, shape: ImageShape) -> nn.Module:
    _require_shape("tanh-cnn", shape, shape == (1, 28, 28), "28×28 images with one channel")
    return tanh_cnn(num_classes)


def _small_cnn(num_classes: int, shape: ImageShape, *, width: int = 32) -> nn.Module:
    _require_shape("small-cnn", shape, min(shape[1:]) >= 8, "images of at least 8×8 pixels")
    return small_cnn(num_classes, width, in_channels=shape[0])


def _wide_resnet(num_classes: int, shape: ImageShape, *, depth: int = 16, width: int = 4, **options: Any) -> nn.Module:
    _require_shape("wide-resnet", shape, shape[0] == 3, "images with three channels")
    return wide_resnet(depth, width, num_classes, **options)


def _nf_resnet_50(num_classes: int, shape: ImageShape, **options: Any) -> nn.Module:
    fits = shape[0] == 3 and min(shape[1:]) >= 32
    _require_shape("nf-resnet-50", shape, fits, "images of at least 32×32 pixels with three channels")
    return nf_resnet_50(num_classes, **options)


def _transformer(family: Callable[..., nn.Module], size: str) -> Callable[..., nn.Module]:
    def build(num_classes: int, shape: ImageShape, **options: Any) -> nn.Module:
        fits, name = shape[0] == 3 and shape[1] == shape[2], f"{family.__name__}-{size}"
        _require_shape(name, shape, fits, "square images with three channels")
        return family(size, num_classes, **options)

    return build


def _hugging_face(num_classes: int, shape: Sequence[int], *, pretrained: str = "", **options: Any) -> nn.Module:
    return text_classifier(num_classes, pretrained=pretrained, **options)


def _hugging_face_causal(
    num_classes: int, shape: Sequence[int], *, pretrained: str = "", prompt: str = "", **options: Any
) -> nn.Module:
    """``prompt`` is what samples of text begin with; the model itself does not need it."""
    return language_model(pretrained=pretrained, **options)


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "mlp": _mlp,
    "tanh-cnn": _tanh_cnn,
    "small-cnn": _small_cnn,
    "wide-resnet": _wide_resnet,
    "nf-resnet-50": _nf_resnet_50,
    **{f"deit-{size}": _transformer(deit, size) for size in ("tiny", "small", "base")},
    **{f"vit-{size}": _transformer(vit, size) for size in ("tiny", "small", "base", "large")},
    "hugging-face": _hugging_face,
    "hugging-face-causal": _hugging_face_causal,
}
"""Functions of the number of classes and the image shape, with the model's options as keywords."""

_FURTHER: dict[str, Callable[..., nn.Module]] = {
    "wide-resnet": wide_resnet,
    "nf-resnet-50": nf_resnet_50,
    "hugging-face": text_classifier,
    "hugging-face-causal": language_model,
}
"""The function whose keywords a builder's further options are; of vision transformers it is ``vit``."""


def options_of(name: str) -> tuple[str, ...]:
    """Names of the options of a model."""
    further = vit if name.startswith(("deit", "vit")) else _FURTHER.get(name, BUILDERS[name])
    functions = (inspect.signature(function) for function in (BUILDERS[name], further))
    keywords = (each.name for one in functions for each in one.parameters.values() if each.kind is each.KEYWORD_ONLY)
    return tuple(dict.fromkeys(keyword for keyword in keywords if keyword != "normalization"))


def build(name: str, num_classes: int, image_shape: Sequence[int], **options: Any) -> nn.Module:
    """Build the model called ``name`` for images of ``image_shape``, randomly initialised unless ``pretrained`` is given.

    Models of texts need ``pretrained``, and take any length.

    >>> build("mlp", 10, (1, 28, 28), hidden=32)[1]
    Linear(in_features=784, out_features=32, bias=True)

    Raises:
        InputError: for an unknown name or option, or images that the model cannot take.
    """
    require_one_of("model", name, tuple(BUILDERS))
    require_integer("num_classes", num_classes, 1)
    refuse_unknown(f"model {name}", options, options_of(name))
    return BUILDERS[name](num_classes, image_shape, **options)


def normalization_of(model: str | nn.Module) -> Normalization | None:
    """The normalization constants that a model's pretrained weights expect.

    For a name, those of the family's published weights; for a model, those of the weights it was built with. None if there
    are none, as for random weights; use the constants of the data set then.

    >>> normalization_of("deit-tiny").mean, normalization_of("vit-tiny").mean, normalization_of("wide-resnet")
    ((0.485, 0.456, 0.406), (0.5, 0.5, 0.5), None)

    Raises:
        InputError: for an unknown name.
    """
    if isinstance(model, nn.Module):
        return getattr(model, "normalization", None)
    family = require_one_of("model", model, tuple(BUILDERS)).partition("-")[0]
    return {"deit": IMAGENET, "vit": CENTRED}.get(family)


def _require_shape(name: str, shape: ImageShape, fits: bool, wanted: str) -> None:
    if not fits:
        channels, height, width = shape
        raise InputError(f"model {name} takes {wanted}; these are {height}×{width} with {channels} channels")
