"""Pretrained models and the data that a part of them is trained on, for finetune_parts.py.

cifar10 is a ViT-Tiny in timm's format, imdb a BERT-like sentence encoder, mean-pooled, and made-up a small network on random
numbers. Of training and test part, images are the first so many of the files, reviews so many at random (seed 0).
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam.workbench import models
from dp_microadam.workbench.data import load
from dp_microadam.workbench.models.hugging_face import text_classifier
from dp_microadam.workbench.models.pretrained import freeze_but

TOKENS = 128


@dataclass
class Task:
    """A model whose head trains, its data, and how both come together."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    train: Any
    test: Any
    prepare: Callable[[Any], Any] | None = None

    @property
    def head(self) -> str:
        """The name of the module that trains."""
        trained = [name.replace(".", "/") for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        return os.path.commonpath(os.path.dirname(name) for name in trained).replace("/", ".")

    @property
    def size(self) -> int:
        return len(self.train["labels"])


PARTS: dict[str, dict[str, Any]] = {
    "head": {"trainable": "head"},
    "biases": {"trainable": "biases"},
    "lora": {"lora_rank": 8},
    "all": {"trainable": "all"},
}
"""Options of a pretrained model of which the head and this part train."""


def image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"], reduction="none")


def text_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]), batch["labels"], reduction="none")


def hits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = [value for name, value in batch.items() if name != "labels"]
    return (model(*inputs).argmax(1) == batch["labels"]).float()


def cifar10(pretrained: str, folder: Path, examples: tuple[int, int], part: str = "head", resolution: int = 224) -> Task:
    options = {**PARTS[part], "resolution": resolution, "normalize_features": True}
    model = models.vit("tiny", 10, pretrained=pretrained, **options)
    constants = model.normalization
    assert constants is not None, "pretrained weights come with constants"
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (constants.mean, constants.std))
    data = load("cifar10", str(folder), validation_fraction=0, train_size=examples[0], test_size=examples[1])
    parts: Any = (data.train, data.test)  # tensors in memory
    train, test = ({"images": images, "labels": labels} for images, labels in parts)

    def prepare(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "images": (batch["images"].float() / 255 - mean) / std}

    return Task(model, image_loss, train, test, prepare)


def imdb(pretrained: str, folder: Path, examples: tuple[int, int], part: str = "head", tokens: int = TOKENS) -> Task:
    model = text_classifier(2, pretrained=pretrained, pooling="mean", **PARTS[part])
    encoder = models.text_encoder(pretrained, tokens)
    random = np.random.default_rng(0)

    def rows_of(name: str, count: int) -> dict[str, Tensor]:
        with open(folder / f"{name}.csv", newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        classes = sorted({row["label"] for row in rows})
        chosen = [rows[row] for row in random.permutation(len(rows))[:count]]
        labels = torch.tensor([classes.index(row["label"]) for row in chosen])
        return {"tokens": encoder([row["text"] for row in chosen]), "labels": labels}

    return Task(model, text_loss, rows_of("train", examples[0]), rows_of("test", examples[1]))


def made_up(pretrained: str, folder: Path, examples: tuple[int, int], part: str = "head") -> Task:
    first = nn.Linear(8, 16)
    model: nn.Module = nn.Sequential(first, nn.Tanh(), nn.Linear(16, 2))
    freeze_but(first, PARTS[part].get("trainable", "all"))
    if part == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["0"], modules_to_save=["2"]))
    train, test = ({"images": torch.randn(count, 8), "labels": torch.arange(count) % 2} for count in examples)
    return Task(model, image_loss, train, test)


TASKS = {"cifar10": cifar10, "imdb": imdb, "made-up": made_up}
