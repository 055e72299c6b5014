"""Vision transformers in timm's format, and what they compute, written with nothing but tensors."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

TimmCheckpoint = dict[str, Tensor]


def checkpoint(width: int = 16, layers: int = 2, patch: int = 8, grid: int = 4, classes: int = 5) -> TimmCheckpoint:
    """Random tensors with the names and shapes timm gives a vision transformer."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=generator)

    tensors = {
        "cls_token": draw(1, 1, width),
        "pos_embed": draw(1, grid**2 + 1, width),
        "patch_embed.proj.weight": draw(width, 3, patch, patch),
        "patch_embed.proj.bias": draw(width),
        "norm.weight": 1 + draw(width),
        "norm.bias": draw(width),
        "head.weight": draw(classes, width),
        "head.bias": draw(classes),
    }
    for layer in range(layers):
        for name, shape in {
            "norm1": (width,),
            "attn.qkv": (3 * width, width),
            "attn.proj": (width, width),
            "norm2": (width,),
            "mlp.fc1": (4 * width, width),
            "mlp.fc2": (width, 4 * width),
        }.items():
            tensors[f"blocks.{layer}.{name}.weight"] = draw(*shape) + (len(shape) == 1)
            tensors[f"blocks.{layer}.{name}.bias"] = draw(shape[0])
    return tensors


def scores(tensors: TimmCheckpoint, images: Tensor, heads: int, positions: Tensor | None = None) -> Tensor:
    """Dosovitskiy et al. (2021), equations 1 to 4, and the classifier."""

    def normalized(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return centred / deviation * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def affine(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    kernel = tensors["patch_embed.proj.weight"]
    patch, width = kernel.shape[-1], kernel.shape[0]
    patches = images.unfold(2, patch, patch).unfold(3, patch, patch)  # (B, 3, rows, columns, patch, patch)
    x = torch.einsum("bcijuv,wcuv->bijw", patches, kernel) + tensors["patch_embed.proj.bias"]
    x = torch.cat([tensors["cls_token"].expand(len(images), 1, width), x.flatten(1, 2)], dim=1)
    x = x + (tensors["pos_embed"] if positions is None else positions)
    layers = len([name for name in tensors if name.endswith("attn.qkv.weight")])
    for layer in range(layers):
        block = f"blocks.{layer}"
        q, k, v = affine(normalized(x, f"{block}.norm1"), f"{block}.attn.qkv").split(width, dim=-1)
        q, k, v = (part.unflatten(-1, (heads, width // heads)) for part in (q, k, v))
        attention = (torch.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5).softmax(-1)
        x = x + affine(torch.einsum("bhqk,bkhd->bqhd", attention, v).flatten(2), f"{block}.attn.proj")
        x = x + affine(F.gelu(affine(normalized(x, f"{block}.norm2"), f"{block}.mlp.fc1")), f"{block}.mlp.fc2")
    return affine(normalized(x, "norm")[:, 0], "head")


@pytest.fixture(scope="session")
def timm_checkpoint() -> Callable[..., TimmCheckpoint]:
    return checkpoint


@pytest.fixture(scope="session")
def timm_scores() -> Callable[..., Tensor]:
    return scores
