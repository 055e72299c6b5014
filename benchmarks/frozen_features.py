"""A head on a frozen backbone whose features are computed once: accuracy of methods at small ε, and the time that it saves.

    python benchmarks/frozen_features.py cifar10 --pretrained FILE --data DIR [--examples 12000 3000] [--out FILE]
    python benchmarks/frozen_features.py imdb --pretrained DIR --data DIR [--examples 12000 3000] [--out FILE]
    python benchmarks/frozen_features.py cifar10 --pretrained FILE --data DIR --speed
    python benchmarks/frozen_features.py --results results/frozen/*.json --figure docs/images/frozen_features.png

cifar10 is a ViT-Tiny in timm's format at 224×224, imdb a BERT-like sentence encoder over the first 128 tokens, mean-pooled,
and made-up a small network on random numbers. `--examples` takes the first so many images of the files, or so many reviews at
random (seed 0), of training and test part. Features are kept in the user's cache: `dp-microadam data clean` removes them.
`--speed` times private steps with and without them.
"""

from __future__ import annotations

import argparse
import copy
import csv
import itertools
import json
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

from dp_microadam import FrozenFeatures, PrivacyPlan, PrivateStep, PrivateTrainer, methods, models
from dp_microadam.apps.experiments.measuring import add_options, deliver, tell, work_clock
from dp_microadam.data import cifar
from dp_microadam.data.contents import Reading
from dp_microadam.training.evaluation import evaluate

EPSILONS = (1.0, 8.0)
DELTA = 1e-5
TOKENS = 128
METHODS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "DP-Walk": (methods.dp_walk, {}),
    "DP-SGD": (methods.dp_sgd, {"momentum": 0.9}),
    "DP-Adam": (methods.dp_adam, {}),
    "DP-MicroAdam": (methods.dp_microadam, {"quantize": False}),
}
# DP-Walk's follows from the plan. Others are the best of three or four, a factor of three apart, at ε = 8 with one band and
# one seed, on 2,000 of the training examples, which those runs were trained without.
RATES = {
    "cifar10": {"DP-Walk": 2.0, "DP-SGD": 0.1, "DP-Adam": 1e-3, "DP-MicroAdam": 1e-3},
    "imdb": {"DP-Walk": 2.0, "DP-SGD": 3.0, "DP-Adam": 3e-2, "DP-MicroAdam": 3e-2},
}
RATES["made-up"] = RATES["cifar10"]


@dataclass
class Task:
    """A model whose head trains, its data, and how both come together."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    train: Any
    test: Any
    prepare: Callable[[Any], Any] | None = None

    @property
    def size(self) -> int:
        return len(self.train["labels"])


class MeanPooled(nn.Module):
    """A sentence encoder and a linear classifier of the mean over a text's tokens."""

    def __init__(self, encoder: nn.Module, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, classes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        return self.head((states * weights).sum(1) / weights.sum(1))


def image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"], reduction="none")


def text_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"], batch["mask"]), batch["labels"], reduction="none")


def hits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = [value for name, value in batch.items() if name != "labels"]
    return (model(*inputs).argmax(1) == batch["labels"]).float()


def cifar10(pretrained: str, folder: Path, examples: tuple[int, int]) -> Task:
    model = models.vit("tiny", 10, pretrained=pretrained, trainable="head")
    constants = model.normalization
    assert constants is not None, "pretrained weights come with constants"
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (constants.mean, constants.std))
    parts = cifar.read("cifar10", folder, Reading("cifar10"))
    train, test = (
        {"images": torch.tensor(np.concatenate(part.inputs)[:count]), "labels": torch.tensor(part.labels[:count])}
        for part, count in zip(parts, examples, strict=True)
    )

    def prepare(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "images": (batch["images"].float() / 255 - mean) / std}

    return Task(model, image_loss, train, test, prepare)


def imdb(pretrained: str, folder: Path, examples: tuple[int, int]) -> Task:
    from transformers import AutoModel, AutoTokenizer

    encoder = AutoModel.from_pretrained(pretrained, dtype=torch.float32, add_pooling_layer=False)
    model = MeanPooled(encoder.requires_grad_(False).eval(), 2)
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    random = np.random.default_rng(0)

    def part(name: str, count: int) -> dict[str, Tensor]:
        with open(folder / f"{name}.csv", newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        classes = sorted({row["label"] for row in rows})
        chosen = [rows[row] for row in random.permutation(len(rows))[:count]]
        texts = [row["text"] for row in chosen]
        encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
        labels = torch.tensor([classes.index(row["label"]) for row in chosen])
        return {"tokens": encoded["input_ids"], "mask": encoded["attention_mask"], "labels": labels}

    return Task(model, text_loss, part("train", examples[0]), part("test", examples[1]))


def made_up(pretrained: str, folder: Path, examples: tuple[int, int]) -> Task:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    model[0].requires_grad_(False)
    train, test = ({"images": torch.randn(count, 8), "labels": torch.arange(count) % 2} for count in examples)
    return Task(model, image_loss, train, test)


TASKS = {"cifar10": cifar10, "imdb": imdb, "made-up": made_up}


def head_loss(head: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(head(next(iter(batch.values()))), batch["labels"], reduction="none")


def head_hits(head: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (head(next(iter(batch.values()))).argmax(1) == batch["labels"]).float()


def accuracies(
    task: Task, rates: dict[str, float], features: FrozenFeatures, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Test accuracy of the averaged weights of every method, ε and number of bands.

    The head is trained as a model of its own: many runs need not check the frozen part again each time.
    """
    tell(f"features of {task.size:,} training examples and of the test part")
    train, test = features.of(task.train, task.test)
    found = []
    for seed, epsilon, bands, (name, (build, own)) in itertools.product(
        range(options.seeds), EPSILONS, (1, "least"), METHODS.items()
    ):
        head = copy.deepcopy(task.model.get_submodule(features.head))
        begin = work_clock("cpu")
        plan = PrivacyPlan.solve(
            dataset_size=task.size,
            batch_size=options.batch,
            delta=DELTA,
            epsilon=epsilon,
            steps=options.steps,
            bands=bands,
            parameters=sum(parameter.numel() for parameter in head.parameters()),
        )
        with tempfile.TemporaryDirectory() as folder:
            trainer = PrivateTrainer(
                head,
                build(head, lr=rates[name], **own),
                plan,
                head_loss,
                physical_batch_size=1024,
                ema_decay=0.99,
                run_dir=Path(folder) / "run",
                show_progress=False,
            )
            trainer.fit(train)
        assert trainer.average is not None
        with trainer.average.in_place_of(head):
            accuracy = evaluate(head, test, {"accuracy": head_hits}, prepare=lambda batch: batch)["accuracy"]
        row = {"method": name, "epsilon": epsilon, "bands": plan.bands, "least": bands == "least", "seed": seed}
        found.append({**row, "accuracy": accuracy, "processor_seconds": work_clock("cpu") - begin})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def speed(task: Task, features: FrozenFeatures, steps: int, computed: int) -> dict[str, float]:
    """Processor seconds of a private step of 64 examples: on features, and on examples; and of one example's features."""
    tell("private steps on features, and on examples")
    small = {name: value[:computed] for name, value in task.train.items()}
    with tempfile.TemporaryDirectory() as folder:
        own = FrozenFeatures(task.model, task.loss, prepare=task.prepare, folder=folder, physical_batch_size=32)
        own.of({name: value[:1] for name, value in small.items()})  # the check
        begin = work_clock("cpu")
        own.of(small)
        computing = (work_clock("cpu") - begin) / computed
    (train,) = features.of(task.train)

    def median_step(loss: Callable[..., Tensor], data: Any, count: int, **options: Any) -> float:
        plan = PrivacyPlan.solve(dataset_size=task.size, batch_size=64, delta=DELTA, noise_multiplier=1.0, steps=count + 1)
        times = []
        with tempfile.TemporaryDirectory() as folder:
            step = PrivateStep(task.model, loss, plan, data, run_dir=folder, physical_batch_size=32, **options)
            for _ in step:
                begin = work_clock("cpu")
                step.take()
                times.append(work_clock("cpu") - begin)
            step.close()
        return statistics.median(times[1:])

    return {
        "features_of_one_example": computing,
        "step_on_features": median_step(features.on(task.loss), train, 10 * steps),
        "step_on_examples": median_step(task.loss, task.train, steps, prepare=task.prepare),
    }


def draw(files: list[Path], path: Path) -> None:
    """Accuracy over ε, one panel per task; dashed lines have several bands."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(files), figsize=(5 * len(files), 4), squeeze=False)
    for axis, file in zip(axes[0], files, strict=True):
        results = json.loads(file.read_text())["results"]
        for color, name in enumerate(METHODS):
            for least in (False, True):
                means = [mean_accuracy(results["runs"], name, epsilon, least)[0] for epsilon in EPSILONS]
                axis.plot(EPSILONS, means, f"C{color}o" + ("--" if least else "-"), label=name + (", bands" if least else ""))
        axis.set_xscale("log")
        axis.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axis.minorticks_off()
        axis.set_xlabel("ε")
        axis.set_ylabel("test accuracy, %")
        axis.set_title(f"{results['task']}, {results['examples'][0]:,} examples")
        axis.grid(alpha=0.25)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def mean_accuracy(runs: list[dict[str, Any]], method: str, epsilon: float, least: bool) -> tuple[float, str]:
    """The mean over seeds in percent; and in words, with the standard deviation."""
    found = [100 * r["accuracy"] for r in runs if (r["method"], r["epsilon"], r["least"]) == (method, epsilon, least)]
    spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
    return statistics.mean(found), f"{statistics.mean(found):.2f}{spread}"


def table(results: dict[str, Any]) -> str:
    """Markdown: a row for each method and kind of noise, a column for each ε."""
    lines = [
        "| method | bands | " + " | ".join(f"ε = {epsilon:g}" for epsilon in EPSILONS) + " |",
        "|---|---|" + "---|" * len(EPSILONS),
    ]
    for name, least in itertools.product(METHODS, (False, True)):
        cells = [mean_accuracy(results["runs"], name, epsilon, least)[1] for epsilon in EPSILONS]
        taken = sorted({r["bands"] for r in results["runs"] if r["method"] == name and r["least"] == least})
        lines.append(f"| {name} | {'least: ' if least else ''}{', '.join(map(str, taken))} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", nargs="?", choices=TASKS)
    parser.add_argument("--pretrained", help="ViT-Tiny in timm's format, or the folder of a sentence encoder")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10's files, or of train.csv and test.csv")
    parser.add_argument("--examples", nargs=2, type=int, default=(12_000, 3_000), metavar=("TRAIN", "TEST"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--speed", action="store_true", help="time private steps instead")
    parser.add_argument("--results", nargs="+", type=Path, help="print and draw what --out wrote before instead of measuring")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    add_options(parser)
    options = parser.parse_args(arguments)
    if not options.results and options.task != "made-up" and not (options.task and options.pretrained and options.data):
        parser.error("a task needs --pretrained and --data")
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    if options.results:
        for file in options.results:
            print(table(json.loads(file.read_text())["results"]))
        if options.figure:
            draw(options.results, options.figure)
        return
    torch.manual_seed(0)
    task = TASKS[options.task](options.pretrained, options.data, tuple(options.examples))
    features = FrozenFeatures(task.model, task.loss, prepare=task.prepare, physical_batch_size=32)
    common = {"task": options.task, "examples": list(options.examples)}
    if options.speed:
        results: dict[str, Any] = {**common, "processor_seconds": speed(task, features, steps=2, computed=64)}
        print(json.dumps(results, indent=1))
    else:
        rates = RATES[options.task]
        settings = {"batch_size": options.batch, "steps": options.steps, "delta": DELTA, "rates": rates}
        results = {**common, **settings, "runs": accuracies(task, rates, features, options)}
        print(table(results))
    deliver(options, "frozen features", results)


if __name__ == "__main__":
    main()
