"""Vision transformers: ViT (Dosovitskiy et al., 2021) and DeiT without distillation (Touvron et al., 2021).

The encoder is that of the package ``transformers``. Weights are random, or come from the Hugging Face hub, a folder, or a
safetensors file in timm's format. Like the other models, they map images to class scores.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.layers.fixed_norm import FixedNorm
from dp_microadam.validation import explicit, require_flag, require_integer, require_one_of
from dp_microadam.workbench.models.pretrained import first_line, loaded, new_head, partly_trained, transformers


class Normalization(NamedTuple):
    """(x − mean)/std per channel, for pixels in [0, 1]. Public numbers, never computed from private data."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Constants that DeiT was trained with."""

CENTRED = Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Maps pixels to [−1, 1], as in the ViTs of Google and of "How to train your ViT" (Steiner et al., 2021)."""


class TransformerSize(NamedTuple):
    """Size of a transformer encoder; the hidden layers of its MLPs have four times the embedding width."""

    width: int
    layers: int
    heads: int


SIZES = {
    "tiny": TransformerSize(192, 12, 3),
    "small": TransformerSize(384, 12, 6),
    "base": TransformerSize(768, 12, 12),
    "large": TransformerSize(1024, 24, 16),
}

_ADAPTED = ("q_proj", "v_proj")
"""The layers that get adapters by default: queries and values, as in the paper of LoRA."""

_LAYER_NORM_EPS = 1e-6
"""Of timm and the original code; transformers has another default."""

_POSITIONS = "embeddings.position_embeddings"

_OF_TIMM = {
    "cls_token": ("embeddings.cls_token",),
    "pos_embed": (_POSITIONS,),
    "patch_embed.proj": ("embeddings.patch_embeddings.projection",),
    "norm": ("layernorm",),
    "norm1": ("layernorm_before",),
    "attn.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attn.proj": ("attention.o_proj",),
    "norm2": ("layernorm_after",),
    "mlp.fc1": ("mlp.fc1",),
    "mlp.fc2": ("mlp.fc2",),
}
"""By timm's name of a module, those of ``transformers``. timm has queries, keys and values of a layer in one matrix."""


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
    normalization: Normalization = CENTRED,
) -> VisionTransformer:
    """A vision transformer for image classification.

    Args:
        size: ``"tiny"``, ``"small"``, ``"base"``, ``"large"``, or any :class:`TransformerSize`.
        num_classes: size of the output. A pretrained classifier is kept if it has this many classes, and the head is not
            normalized; otherwise the head is new.
        pretrained: a folder written by ``save_pretrained``, a ``.safetensors`` file in timm's format, or a name on the Hugging
            Face hub. None: random weights. Pretrained weights must be public: trained without the private data.
        resolution: side of the images inside the model, a multiple of ``patch_size``. Images of another size are resized
            (bilinear); position embeddings for another resolution are interpolated (bicubic, over the grid of patches).
        trainable: ``"all"``; ``"biases"`` to freeze everything but these and the head; ``"head"`` to freeze everything else.
        normalize_features: bring what the head gets to a fixed norm (:class:`~dp_microadam.layers.fixed_norm.FixedNorm`).
        lora_rank: above 0 the encoder's weights are frozen, and low-rank adapters and the head are trained; ``lora_alpha`` and
            ``lora_targets`` are those of :func:`~dp_microadam.workbench.models.with_lora`, by default for queries and values.
        normalization: the constants that pretrained weights expect, unless their folder has a ``preprocessor_config.json``.

    A new head is initialised as N(0, 0.02²) with bias 0, and not with zeros: all gradients before the head would then be zero
    at the first step, and the clipping engine's independence check, which runs then, would not see the encoder.

    >>> model = vit("tiny", num_classes=10, resolution=32)
    >>> model(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    shape = size if isinstance(size, TransformerSize) else SIZES[require_one_of("size", size, tuple(SIZES))]
    require_integer("num_classes", num_classes, 1)
    require_integer("patch_size", patch_size, 1)
    require_integer("resolution", resolution, patch_size)
    require_flag("normalize_features", normalize_features)
    if pretrained is not None and not isinstance(pretrained, str):
        raise InputError(f"pretrained is {pretrained!r}; it must be a hub name, a folder or a file, as a string")
    if resolution % patch_size:
        raise InputError(f"resolution is {resolution}; it must be a multiple of patch_size, which is {patch_size}")
    head = new_head(shape.width, num_classes)
    config = config_of(shape, patch_size, resolution)
    found: Normalization | None = None
    if pretrained:
        config, tensors, found = _read(pretrained, config, normalization)
        classifier = {kind: tensors.pop(f"head.{kind}", torch.empty(0)) for kind in ("weight", "bias")}
        if not normalize_features and len(classifier["bias"]) == num_classes:
            _fill(head, classifier, pretrained)
    backbone: Any = transformers().ViTModel(config, add_pooling_layer=False)
    if pretrained:
        if _POSITIONS in tensors:
            tensors[_POSITIONS] = resized_positions(tensors[_POSITIONS], resolution // patch_size)
        _fill(backbone, tensors, pretrained)
    backbone = partly_trained(backbone, trainable, lora_rank, lora_alpha, lora_targets or (_ADAPTED if lora_rank else ()))
    return VisionTransformer(backbone, head, resolution, found, normalize_features)


@explicit(*(name for name in inspect.signature(vit).parameters if name != "normalization"))
def deit(size: str | TransformerSize = "tiny", num_classes: int = 1000, **options: Any) -> VisionTransformer:
    """DeiT without distillation: a :func:`vit` whose published weights expect other normalization constants.

    >>> sum(p.numel() for p in deit("tiny").parameters())
    5717416
    """
    return vit(size, num_classes, **{"normalization": IMAGENET, **options})


def config_of(size: TransformerSize, patch_size: int, resolution: int) -> Any:
    """Configuration of an encoder of this size."""
    return transformers().ViTConfig(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        patch_size=patch_size,
        image_size=resolution,
        layer_norm_eps=_LAYER_NORM_EPS,
    )


def _read(source: str, config: Any, normalization: Normalization) -> tuple[Any, dict[str, Tensor], Normalization]:
    """Configuration, tensors of encoder and head, and constants of the weights at ``source``."""
    path = Path(source)
    if path.suffix == ".safetensors":
        try:
            tensors = load_file(path)
        except Exception as error:  # of its own for each kind of damage
            raise InputError(f"pretrained is {source!r}, which cannot be read: {first_line(error)}") from None
        return config, {name: part.float() for each in tensors.items() for name, part in _renamed(*each)}, normalization
    if path.is_file():
        raise InputError(f"pretrained is {source!r}; it must be a .safetensors file, a folder, or a name on the hub")
    stated = loaded("AutoConfig", source)
    if stated.model_type != "vit":
        raise InputError(f"pretrained is {source!r}, a model of type {stated.model_type!r}; it must be 'vit'")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size"):
        if getattr(stated, key) != getattr(config, key):
            raise InputError(
                f"pretrained is {source!r}, whose {key} is {getattr(stated, key)}; this model has {getattr(config, key)}, "
                "choose the one that matches the weights"
            )
    options = {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
    network, report = loaded("ViTForImageClassification", source, **options)
    missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    tensors = {name: value for name, value in network.vit.state_dict().items() if f"vit.{name}" not in missing}
    if "classifier.weight" not in missing:
        tensors |= {f"head.{kind}": value for kind, value in network.classifier.state_dict().items()}
    stated.image_size = config.image_size
    return stated, tensors, _normalization_at(source, normalization)


def _renamed(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor of timm's by the name, or in the parts, that ``transformers`` gives it; others as they are."""
    layer, module, kind = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.*?)(\.weight|\.bias)?", name).groups()  # type: ignore[union-attr]
    places = _OF_TIMM.get(module)
    if places is None:
        yield name, tensor
        return
    for place, part in zip(places, tensor.chunk(len(places)) if len(places) > 1 else [tensor], strict=True):
        yield f"{f'layers.{layer}.' if layer else ''}{place}{kind or ''}", part


def _fill(module: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load the tensors, which must be those of the module, in their shapes, and finite."""
    wanted = module.state_dict()
    for name in (*wanted, *tensors):
        if name not in tensors:
            raise InputError(f"pretrained is {source!r}, which lacks the tensor {name}; choose the model the weights are of")
        if name not in wanted:
            raise InputError(f"pretrained is {source!r}, which holds {name}; this model has no such tensor, give its weights")
        if tensors[name].shape != wanted[name].shape:
            raise InputError(
                f"pretrained is {source!r}, whose tensor {name} has shape {tuple(tensors[name].shape)}; this model needs "
                f"{tuple(wanted[name].shape)}"
            )
        if not bool(torch.isfinite(tensors[name]).all()):
            raise InputError(
                f"pretrained is {source!r}, whose tensor {name} is not finite; the weights are damaged, fetch them again"
            )
    module.load_state_dict(tensors)


def _normalization_at(source: str, default: Normalization) -> Normalization:
    """The constants in ``preprocessor_config.json``, or ``default`` if it has none."""
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        found, _ = ImageProcessingMixin.get_image_processor_dict(source, local_files_only=Path(source).is_dir())
        constants = [
            tuple(map(float, found.get(key, ours))) for key, ours in zip(("image_mean", "image_std"), default, strict=True)
        ]
    except OSError:
        return default
    except (TypeError, ValueError):
        constants = [(), ()]
    if any(len(values) != 3 or not all(map(math.isfinite, values)) for values in constants) or min(constants[1]) <= 0:
        raise InputError(
            f"pretrained is {source!r}, whose preprocessor_config.json gives image_mean and image_std that cannot be used; "
            "each must be three finite numbers, above 0 for image_std"
        )
    return Normalization(*constants)


def resized_positions(positions: Tensor, side: int) -> Tensor:
    """Interpolate position embeddings (1, 1 + n², width) to a grid of ``side``² patches; the class token's is kept.

    Bicubic without anti-aliasing, as in DeiT's own code and in ``transformers``. Others than of a square grid stay as they are.
    """
    before = math.isqrt(max(0, positions.shape[1] - 1))
    if positions.dim() != 3 or before in (0, side) or positions.shape[1] != before**2 + 1:
        return positions
    grid = positions[:, 1:].unflatten(1, (before, before)).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)
    return torch.cat([positions[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)
