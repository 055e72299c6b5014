"""Vision transformers: ViT (Dosovitskiy et al., 2021) and DeiT without distillation (Touvron et al., 2021).

The encoder is that of the package ``transformers``. Weights are random, or come from the Hugging Face hub, a folder, or a
file in timm's format. Like the other models, they map images to class scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.integrations.lora import adapted
from dp_microadam.layers.fixed_norm import FixedNorm
from dp_microadam.validation import require_integer, require_one_of
from dp_microadam.workbench.models.normalization import CENTRED, IMAGENET, Normalization
from dp_microadam.workbench.models.pretrained import config_of, pretrained_weights, transformers
from dp_microadam.workbench.models.trainable_part import freeze_but, require_part
from dp_microadam.workbench.models.transformer_size import SIZES, TransformerSize

if TYPE_CHECKING:
    from transformers import ViTConfig


ADAPTED = ("q_proj", "v_proj")
"""The layers that get adapters by default: queries and values, as in the paper of LoRA."""


class VisionTransformer(nn.Module):
    """Vision transformer with a linear classifier; see :func:`vit`. ``normalization`` is None for random weights."""

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Linear,
        resolution: int,
        normalization: Normalization | None,
        normalize_features: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.features = FixedNorm() if normalize_features else nn.Identity()
        self.head = head
        self.resolution = resolution
        self.normalization = normalization

    def forward(self, images: Tensor) -> Tensor:
        side = self.resolution
        if images.shape[-2:] != (side, side):
            images = F.interpolate(images, size=(side, side), mode="bilinear", antialias=True)
        return self.head(self.features(self.backbone(images).last_hidden_state[:, 0]))


def vit(
    size: str | TransformerSize = "tiny",
    num_classes: int = 1000,
    *,
    pretrained: str | None = None,
    resolution: int = 224,
    patch_size: int = 16,
    trainable: str = "all",
    normalize_features: bool = False,
    lora_rank: int = 0,
    lora_alpha: float | None = None,
    lora_targets: str | Sequence[str] = (),
) -> VisionTransformer:
    """A vision transformer for image classification.

    Args:
        size: ``"tiny"``, ``"small"``, ``"base"``, ``"large"``, or any :class:`TransformerSize`.
        num_classes: size of the output. A pretrained classifier is kept if it has this many classes; otherwise the head is
            initialised anew.
        pretrained: a folder written by ``save_pretrained``, a file in timm's format (``.safetensors``, ``.pth``), or a name
            on the Hugging Face hub. None: random weights. Pretrained weights must be public: trained without the private data.
        resolution: side of the images inside the model, a multiple of ``patch_size``. Images of another size are resized
            (bilinear); position embeddings for another resolution are interpolated (bicubic, over the grid of patches).
        patch_size: side of a patch.
        trainable: ``"all"``; ``"biases"`` to freeze everything but these and the head; or ``"head"`` to freeze everything
            else.
        normalize_features: bring what the head gets to a fixed norm (:class:`~dp_microadam.layers.fixed_norm.FixedNorm`), for
            a head on a frozen encoder or one with adapters. A pretrained classifier is not kept then, since it was trained
            without.
        lora_rank: above 0 the encoder's weights are frozen, and low-rank adapters and the head are trained; ``lora_alpha`` and
            ``lora_targets`` are those of :func:`~dp_microadam.workbench.models.with_lora`, by default for queries and values.

    A new head is initialised as N(0, 0.02²) with bias 0, and not with zeros: all gradients before the head would then be zero
    at the first step, and the clipping engine's independence check, which runs then, would not see the encoder.

    >>> model = vit("tiny", num_classes=10, resolution=32)
    >>> model(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])

    Raises:
        InputError: if a value cannot be used, weights cannot be found or read or are of another shape, or
            ``transformers`` is not installed.
    """
    require_part(trainable, lora_rank)
    model = _build("vit", size, num_classes, pretrained, resolution, patch_size, normalize_features, CENTRED)
    return _partly_trained(model, trainable, lora_rank, lora_alpha, lora_targets)


def deit(
    size: str | TransformerSize = "tiny",
    num_classes: int = 1000,
    *,
    pretrained: str | None = None,
    resolution: int = 224,
    patch_size: int = 16,
    trainable: str = "all",
    normalize_features: bool = False,
    lora_rank: int = 0,
    lora_alpha: float | None = None,
    lora_targets: str | Sequence[str] = (),
) -> VisionTransformer:
    """DeiT without distillation: a :func:`vit` whose published weights expect other normalization constants.

    >>> sum(p.numel() for p in deit("tiny").parameters())
    5717416
    """
    require_part(trainable, lora_rank)
    model = _build("deit", size, num_classes, pretrained, resolution, patch_size, normalize_features, IMAGENET)
    return _partly_trained(model, trainable, lora_rank, lora_alpha, lora_targets)


def _build(
    family: str,
    size: str | TransformerSize,
    num_classes: int,
    pretrained: str | None,
    resolution: int,
    patch_size: int,
    normalize_features: bool,
    normalization: Normalization,
) -> VisionTransformer:
    shape = size if isinstance(size, TransformerSize) else SIZES[require_one_of("size", size, tuple(SIZES))]
    require_integer("num_classes", num_classes, 1)
    require_integer("patch_size", patch_size, 1)
    require_integer("resolution", resolution, patch_size)
    if not isinstance(normalize_features, bool):
        raise InputError(f"normalize_features is {normalize_features!r}; it must be true or false")
    if pretrained is not None and not isinstance(pretrained, str):
        raise InputError(f"pretrained is {pretrained!r}; it must be a hub name, a folder or a file, as a string")
    if resolution % patch_size:
        raise InputError(f"resolution is {resolution}; it must be a multiple of patch_size, which is {patch_size}")
    ViTModel = transformers().ViTModel
    if pretrained:
        weights = pretrained_weights(pretrained, family, shape, patch_size, normalization)
        # The names and shapes of all tensors have been compared: none keeps its random initial value.
        backbone = ViTModel(_at_resolution(weights.config, resolution), add_pooling_layer=False)
        backbone.load_state_dict(_for_grid(weights.encoder, resolution // patch_size))
        head = _head(shape.width, num_classes, None if normalize_features else weights.head)
        model = VisionTransformer(backbone, head, resolution, weights.normalization, normalize_features)
    else:
        backbone = ViTModel(config_of(shape, patch_size, resolution), add_pooling_layer=False)
        model = VisionTransformer(backbone, _head(shape.width, num_classes, None), resolution, None, normalize_features)
    return model


def _partly_trained(
    model: VisionTransformer, trainable: str, rank: int, alpha: float | None, targets: str | Sequence[str]
) -> VisionTransformer:
    freeze_but(model.backbone, trainable)
    model.backbone = adapted(model.backbone, rank, alpha, targets or (ADAPTED if rank else ()))
    return model


def _at_resolution(config: ViTConfig, resolution: int) -> ViTConfig:
    return type(config).from_dict({**config.to_dict(), "image_size": resolution})


def _for_grid(encoder: dict[str, Tensor], side: int) -> dict[str, Tensor]:
    name = "embeddings.position_embeddings"
    return {**encoder, name: resized_positions(encoder[name], side)}


def resized_positions(positions: Tensor, side: int) -> Tensor:
    """Interpolate position embeddings (1, 1 + n², width) to a grid of ``side``² patches; the class token's is kept.

    Bicubic without anti-aliasing, as in DeiT's own code and in ``transformers``.
    """
    class_token, patches = positions[:, :1], positions[:, 1:]
    before = math.isqrt(patches.shape[1])
    if before == side:
        return positions
    grid = patches.unflatten(1, (before, before)).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)
    return torch.cat([class_token, grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


def _head(width: int, num_classes: int, pretrained: dict[str, Tensor] | None) -> nn.Linear:
    head = nn.Linear(width, num_classes)
    if pretrained is not None and len(pretrained["weight"]) == num_classes:
        head.load_state_dict(pretrained)
    else:
        nn.init.normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
    return head
