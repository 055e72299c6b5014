"""Converts weights of vision transformers from timm's format to that of ``transformers``.

The formats differ in the names of tensors, and timm stores queries, keys and values of a layer in one matrix.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.workbench.models.transformer_size import TransformerSize

# ε of timm's LayerNorm; transformers has another default.
LAYER_NORM_EPS = 1e-6

_EMBEDDINGS = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj.weight": "embeddings.patch_embeddings.projection.weight",
    "patch_embed.proj.bias": "embeddings.patch_embeddings.projection.bias",
    "norm.weight": "layernorm.weight",
    "norm.bias": "layernorm.bias",
}
_LAYER = {
    "norm1": ("layernorm_before",),
    "attn.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attn.proj": ("attention.o_proj",),
    "norm2": ("layernorm_after",),
    "mlp.fc1": ("mlp.fc1",),
    "mlp.fc2": ("mlp.fc2",),
}
_HEAD = {"head.weight": "weight", "head.bias": "bias"}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a ``.safetensors`` or ``.pth`` file as float32, without executing code from the file.

    Raises:
        InputError: if it cannot be read, or holds anything but tensors by name.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each reader has exceptions of its own for what is cut short or damaged
        raise InputError(f"pretrained is {str(path)!r}, which cannot be read: {first_line(error)}") from None
    for key in ("model", "state_dict"):  # how training scripts wrap the weights
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError(f"pretrained is {str(path)!r}, which does not hold tensors by name; it must be a state dict")
    return {str(name): value.float() for name, value in found.items()}


def first_line(error: Exception) -> str:
    """The beginning of another library's message, which may run over many lines."""
    if isinstance(error, pickle.UnpicklingError) or any(
        option in str(error) for option in ("weights_only", "trust_remote_code")
    ):
        return "it holds more than tensors, perhaps code, which is never run"  # theirs says how to run it
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def encoder_and_head(
    tensors: Mapping[str, Tensor], path: Path, size: TransformerSize, patch_size: int
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Tensors of the encoder and of the classifier, the latter None if the file has none.

    Raises:
        InputError: if a tensor is missing, unknown, or of another shape than an encoder of this size needs.
    """
    _refuse_other_formats(tensors, path)
    shapes = _shapes(size, patch_size)
    for name in tensors.keys() - shapes.keys() - _HEAD.keys() - {"pos_embed"}:
        raise InputError(
            f"pretrained is {str(path)!r}, which holds {name}; a plain vision transformer has no such tensor, give "
            "the weights of one"
        )
    for name, wanted in shapes.items():
        if name not in tensors:
            raise InputError(
                f"pretrained is {str(path)!r}, which lacks the tensor {name} of shape {wanted}; choose the model they are of"
            )
        _require_shape(path, name, tensors[name], wanted)
    _require_positions(path, tensors, size.width)
    encoder = {_EMBEDDINGS[name]: tensors[name] for name in _EMBEDDINGS}
    for layer in range(size.layers):
        for before, after in _LAYER.items():
            for kind in ("weight", "bias"):
                parts = tensors[f"blocks.{layer}.{before}.{kind}"].chunk(len(after))
                encoder |= {f"layers.{layer}.{name}.{kind}": part for name, part in zip(after, parts, strict=True)}
    if _HEAD.keys().isdisjoint(tensors):
        return encoder, None
    classes = len(tensors.get("head.bias", ()))
    for name, wanted in {"head.bias": (classes,), "head.weight": (classes, size.width)}.items():
        if name not in tensors:
            raise InputError(
                f"pretrained is {str(path)!r}, whose classifier lacks {name}; remove the rest of it from the file, or add it"
            )
        _require_shape(path, name, tensors[name], wanted)
    return encoder, {_HEAD[name]: tensors[name] for name in _HEAD}


def _refuse_other_formats(tensors: Mapping[str, Tensor], path: Path) -> None:
    if "dist_token" in tensors:
        raise InputError(
            f"pretrained is {str(path)!r}, a distilled DeiT with two classifiers; give the weights trained without "
            "distillation, whose file name does not say 'distilled'"
        )
    if any(name.startswith(("vit.", "deit.")) for name in tensors):
        raise InputError(
            f"pretrained is {str(path)!r}, a file of transformers; give the folder that holds it and its config.json"
        )


def _shapes(size: TransformerSize, patch_size: int) -> dict[str, tuple[int, ...]]:
    """Of every tensor whose shape follows from the encoder alone."""
    width = size.width
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "patch_embed.proj.weight": (width, 3, patch_size, patch_size),
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    matrices = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
    matrices |= {"mlp.fc1": (4 * width, width), "mlp.fc2": (width, 4 * width)}
    for layer in range(size.layers):
        for name in ("norm1", "norm2"):
            shapes |= {f"blocks.{layer}.{name}.{kind}": (width,) for kind in ("weight", "bias")}
        for name, matrix in matrices.items():
            shapes[f"blocks.{layer}.{name}.weight"] = matrix
            shapes[f"blocks.{layer}.{name}.bias"] = matrix[:1]
    return shapes


def _require_shape(path: Path, name: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    if tensor.shape != wanted:
        raise InputError(
            f"pretrained is {str(path)!r}, whose tensor {name} has shape {tuple(tensor.shape)}; this model needs {wanted}"
        )


def _require_positions(path: Path, tensors: Mapping[str, Tensor], width: int) -> None:
    if "pos_embed" not in tensors:
        raise InputError(
            f"pretrained is {str(path)!r}, which lacks the tensor pos_embed; give the weights of a plain vision transformer"
        )
    positions = tensors["pos_embed"]
    patches = positions.shape[1] - 1 if positions.dim() == 3 else 0
    if positions.shape != (1, patches + 1, width) or patches < 1 or math.isqrt(patches) ** 2 != patches:
        raise InputError(
            f"pretrained is {str(path)!r}, whose tensor pos_embed has shape {tuple(positions.shape)}; this model needs "
            f"(1, 1 + n², {width}): a class token and a square grid of patches"
        )
