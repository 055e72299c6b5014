"""Builds models by name, as recipes do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from dp_microadam.errors import InputError
from dp_microadam.validation import refuse_unknown, require_integer, require_one_of
from dp_microadam.workbench.models.hugging_face import language_model, text_classifier
from dp_microadam.workbench.models.mlp import mlp
from dp_microadam.workbench.models.nf_resnet import nf_resnet_50
from dp_microadam.workbench.models.normalization import CENTRED, IMAGENET, Normalization
from dp_microadam.workbench.models.small_cnn import small_cnn, tanh_cnn
from dp_microadam.workbench.models.vit import VisionTransformer, deit, vit
from dp_microadam.workbench.models.wide_resnet import wide_resnet

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
    _require_flag("weight_standardization", weight_standardization)
    return wide_resnet(depth, width, num_classes, groups=groups, weight_standardization=weight_standardization)


def _nf_resnet_50(
    num_classes: int,
    shape: ImageShape,
    *,
    width: int = 4,
    alpha: float = 0.2,
    skip_gain: float = 1.0,
    stochastic_depth: float = 0.0,
    gain: bool = True,
) -> nn.Module:
    fits = shape[0] == 3 and min(shape[1:]) >= 32
    _require_shape("nf-resnet-50", shape, fits, "images of at least 32×32 pixels with three channels")
    for name, value in {"alpha": alpha, "skip_gain": skip_gain, "stochastic_depth": stochastic_depth}.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{name} is {value!r}; it must be a number")
    _require_flag("gain", gain)
    return nf_resnet_50(
        num_classes, width=width, alpha=alpha, skip_gain=skip_gain, stochastic_depth=stochastic_depth, gain=gain
    )


def _transformer(family: Callable[..., VisionTransformer], size: str) -> Callable[..., nn.Module]:
    name = f"{family.__name__}-{size}"

    def build(
        num_classes: int,
        shape: ImageShape,
        *,
        pretrained: str = "",
        resolution: int = 224,
        patch_size: int = 16,
        trainable: str = "all",
        normalize_features: bool = False,
        lora_rank: int = 0,
        lora_alpha: float | None = None,
        lora_targets: str | Sequence[str] = (),
    ) -> nn.Module:
        _require_shape(name, shape, shape[0] == 3 and shape[1] == shape[2], "square images with three channels")
        return family(
            size,
            num_classes,
            pretrained=pretrained,
            resolution=resolution,
            patch_size=patch_size,
            trainable=trainable,
            normalize_features=normalize_features,
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            lora_targets=lora_targets,
        )

    return build


def _hugging_face(
    num_classes: int,
    shape: Sequence[int],
    *,
    pretrained: str = "",
    trainable: str = "all",
    pooling: str = "own",
    lora_rank: int = 0,
    lora_alpha: float | None = None,
    lora_targets: str | Sequence[str] = (),
) -> nn.Module:
    return text_classifier(
        num_classes,
        pretrained=pretrained,
        trainable=trainable,
        pooling=pooling,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        lora_targets=lora_targets,
    )


def _hugging_face_causal(
    num_classes: int,
    shape: Sequence[int],
    *,
    pretrained: str = "",
    prompt: str = "",
    lora_rank: int = 0,
    lora_alpha: float | None = None,
    lora_targets: str | Sequence[str] = (),
) -> nn.Module:
    """``prompt`` is what samples of text begin with; the model itself does not need it."""
    return language_model(pretrained=pretrained, lora_rank=lora_rank, lora_alpha=lora_alpha, lora_targets=lora_targets)


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


def options_of(name: str) -> tuple[str, ...]:
    """Names of the options of a model."""
    parameters = inspect.signature(BUILDERS[name]).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


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


def _require_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; it must be true or false")


def _require_shape(name: str, shape: ImageShape, fits: bool, wanted: str) -> None:
    if not fits:
        channels, height, width = shape
        raise InputError(f"model {name} takes {wanted}; these are {height}×{width} with {channels} channels")
