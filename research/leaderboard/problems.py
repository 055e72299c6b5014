"""The problems of the leaderboard: data in memory, a network, and how long it is trained at which ε."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.layers.fixed_norm import FixedNorm
from dp_microadam.workbench import data, models
from dp_microadam.workbench.data import Preparation
from dp_microadam.workbench.data.catalogue import usual_folders

Part = tuple[Tensor, Tensor]
Parts = tuple[Part, Part]

TRAIN, TEST = 5_000, 1_500
"""Images whose features a ViT computes; a fixed draw of CIFAR-10's."""


@dataclass(frozen=True)
class Problem:
    """Data, network and plan. ``published`` are accuracies in percent by ε, and ``source`` says whose."""

    title: str
    load: Callable[[], Parts]
    network: Callable[[bool], nn.Module]
    """Builds the network anew from torch's generator; of pretrained features, with or without a fixed norm."""
    steps: int
    batch_size: int
    epsilons: tuple[float, ...] = (1.0, 3.0, 8.0)
    distance: float = 1.5
    """The distance that the default takes for such a model."""
    published: tuple[tuple[float, float], ...] = ()
    source: str = ""


def _images(name: str, **options: Any) -> Callable[[], Parts]:
    @cache
    def load() -> Parts:
        found = data.load(name, validation_fraction=0.0, **options)
        prepare = Preparation(found)
        train, test = (part for part in (found.train, found.test) if isinstance(part, tuple))
        return prepare(train), prepare(test)

    return load


@cache
def _adult() -> Parts:
    recipe = files("dp_microadam.workbench.recipes").joinpath("adult.toml").read_text("utf-8")
    return _images("adult", columns=tomllib.loads(recipe)["columns"])()


def _vit(resolution: int, rank: int) -> nn.Module:
    weights = next(path for folder in usual_folders("vit-tiny") for path in sorted(folder.glob("*.safetensors")))
    return models.build("vit-tiny", 10, (3, 32, 32), pretrained=str(weights), resolution=resolution, lora_rank=rank)


class LastBlock(nn.Module):
    """The last block of a ViT with adapters, and a head: what trains of it, from the tokens [B, N, width] before the block."""

    def __init__(self, vit: Any, normalize_features: bool) -> None:
        super().__init__()
        encoder = vit.backbone.base_model.model
        self.block, self.norm = encoder.layers[-1], encoder.layernorm
        self.features = FixedNorm() if normalize_features else nn.Identity()
        self.head = vit.head

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(self.norm(self.block(tokens))[:, 0]))


def _features(resolution: int, layer: Callable[[Any], nn.Module]) -> Callable[[], Parts]:
    """What ``layer`` of a pretrained ViT gets from CIFAR-10, computed once and kept beside the data."""

    @cache
    def load() -> Parts:
        kept = usual_folders("vit-tiny")[0] / f"leaderboard-{resolution}.pt"
        if not kept.exists():
            found = data.load("cifar10", train_size=TRAIN, test_size=TEST)
            vit = _vit(resolution, rank=0).eval()
            constants = models.normalization_of(vit)
            torch.save([_inputs_of(layer(vit), vit, part, constants) for part in (found.train, found.test)], kept)
        train, test = torch.load(kept)
        return train, test

    return load


@torch.no_grad()
def _inputs_of(layer: nn.Module, vit: nn.Module, part: Any, constants: Any) -> Part:
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].clone()))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (constants.mean, constants.std))
    for images in part[0].split(100):
        vit((images / 255 - mean) / std)
    handle.remove()
    return torch.cat(seen), part[1]


def _head(normalize_features: bool) -> nn.Module:
    head = nn.Linear(192, 10)
    nn.init.normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return nn.Sequential(FixedNorm() if normalize_features else nn.Identity(), head)


_CNN = "Tramèr and Boneh, 2021: a CNN, by DP-SGD with rates and steps searched for"
_FASHION: dict[str, Any] = {"load": _images("fashion-mnist"), "published": ((3.0, 86.0),), "source": _CNN}

PROBLEMS = {
    "adult": Problem("Adult census, 195 steps", _adult, lambda _: models.mlp(91, hidden=64, num_classes=2), 195, 256),
    "head": Problem("CIFAR-10, head on ViT-Tiny, 195 steps", _features(224, lambda vit: vit.head), _head, 195, 256),
    "digits": Problem("digits, 195 steps", _images("digits"), lambda _: models.tanh_cnn(10), 195, 128),
    "fashion-195": Problem(
        "Fashion-MNIST, 195 steps",
        network=lambda _: models.tanh_cnn(10),
        steps=195,
        batch_size=256,
        epsilons=(1.0, 3.0),
        **_FASHION,
    ),
    "cifar10": Problem(
        "CIFAR-10 16×16, 195 steps",
        _images("cifar10", image_size=16),
        lambda _: models.small_cnn(10, width=8),
        195,
        512,
        (3.0,),
    ),
    "lora": Problem(
        "CIFAR-10, LoRA in ViT-Tiny's last block, 100 steps",
        _features(96, lambda vit: vit.backbone.layers[-1]),
        lambda normalize: LastBlock(_vit(96, rank=8), normalize),
        100,
        64,
        (3.0,),
        distance=0.75,
    ),
    "fashion-1000": Problem(
        "Fashion-MNIST, 1,000 steps",
        network=lambda _: models.tanh_cnn(10),
        steps=1000,
        batch_size=128,
        epsilons=(3.0,),
        **_FASHION,
    ),
}
