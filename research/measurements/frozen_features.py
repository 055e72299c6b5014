"""A head on a frozen backbone whose features are computed once: the time that it saves.

    python -m research.measurements.frozen_features cifar10 --pretrained FILE --data DIR [--examples 12000 3000] [--out FILE]

Times private steps with and without kept features. cifar10 is a ViT-Tiny in timm's format at 224×224, imdb a BERT-like sentence
encoder over the first 128 tokens, mean-pooled, and made-up a small network on random numbers. `--examples` takes the first so
many images of the files, or so many reviews at random (seed 0), of training and test part. Features are kept in the user's
cache: `dp-microadam data clean` removes them. What methods reach on such heads is the study `heads`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam import PerformanceSettings, PrivacyPlan, PrivateStep, methods
from dp_microadam.training.frozen_features import FrozenFeatures
from dp_microadam.workbench import models
from dp_microadam.workbench.data import load
from dp_microadam.workbench.models.hugging_face import text_classifier
from dp_microadam.workbench.models.pretrained import freeze_but
from research.measuring import add_options, deliver, tell, work_clock

DELTA = 1e-5
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


def speed(task: Task, features: FrozenFeatures, steps: int, computed: int) -> dict[str, float]:
    """Processor seconds of a private step of 64 examples: on features, and on examples; and of one example's features."""
    small = {name: value[:computed] for name, value in task.train.items()}
    with tempfile.TemporaryDirectory() as folder:
        own = FrozenFeatures(task.model, task.head, task.loss, prepare=task.prepare, folder=folder, physical_batch_size=32)
        own.of({name: value[:1] for name, value in small.items()})  # the check
        begin = work_clock("cpu")
        own.of(small)
        computing = (work_clock("cpu") - begin) / computed
    tell(f"features of one example: {1e3 * computing:.0f} ms")

    def median_step(loss: Callable[..., Tensor], data: Any, count: int, **options: Any) -> float:
        plan = PrivacyPlan.solve(dataset_size=task.size, batch_size=64, delta=DELTA, noise_multiplier=1.0, steps=count + 1)
        times = []
        with tempfile.TemporaryDirectory() as folder:
            step = PrivateStep(
                task.model,
                methods.dp_sgd(task.model),
                plan,
                loss,
                data,
                run_dir=folder,
                performance=PerformanceSettings(physical_batch_size=32),
                **options,
            )
            for _ in step:
                begin = work_clock("cpu")
                step.take()
                times.append(work_clock("cpu") - begin)
            step.close()
        return statistics.median(times[1:])

    on_examples = median_step(task.loss, task.train, steps, prepare=task.prepare)
    tell(f"a private step on examples: {1e3 * on_examples:.0f} ms; now the features of all {task.size:,}")
    (train,) = features.of(task.train)
    on_features = median_step(features.on(task.loss), train, 10 * steps)
    return {"features_of_one_example": computing, "step_on_features": on_features, "step_on_examples": on_examples}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--pretrained", help="ViT-Tiny in timm's format, or the folder of a sentence encoder")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10's files, or of train.csv and test.csv")
    parser.add_argument("--examples", nargs=2, type=int, default=(12_000, 3_000), metavar=("TRAIN", "TEST"))
    parser.add_argument("--threads", type=int, default=1)
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.task != "made-up" and not (options.pretrained and options.data):
        parser.error("a task needs --pretrained and --data")
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    task = TASKS[options.task](options.pretrained, options.data, tuple(options.examples))
    features = FrozenFeatures(task.model, task.head, task.loss, prepare=task.prepare, physical_batch_size=32)
    tell("features of a few examples, and private steps without kept features")
    measured = speed(task, features, steps=2, computed=64)
    results = {"task": options.task, "examples": list(options.examples), "processor_seconds": measured}
    print(json.dumps(results, indent=1), file=sys.stderr)
    deliver(options, "frozen features", results)


if __name__ == "__main__":
    main()
