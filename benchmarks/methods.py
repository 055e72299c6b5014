"""What each method keeps between steps, and how far it gets in few steps on Fashion-MNIST.

    python benchmarks/methods.py --state [--device cuda] [--out FILE]
    python benchmarks/methods.py --train [--methods NAME …] [--steps 200] [--batch-size 512] [--data-folder DIR]

State is measured on the parameters of a Wide-ResNet-16-4, as the largest total over all phases of the tensors that optimizer
and method keep for the next step, divided by all parameters of the model. Training runs the recipe fashion-mnist with the
options below. Few steps favour large learning rates: these figures show that a method trains, not which is best.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch import nn

from dp_microadam.methods import Method, PublicExamples
from dp_microadam.methods.registry import build
from dp_microadam.training.method import Phase
from dp_microadam.training.trainer import UnprotectedPlan
from dp_microadam.workbench.command_line.measuring import add_options, deliver, tell
from dp_microadam.workbench.models import wide_resnet
from dp_microadam.workbench.recipes.assemble import assemble
from dp_microadam.workbench.recipes.recipe_files import load_recipe
from dp_microadam.workbench.recipes.vocabulary import DEFAULT_LEARNING_RATES

STP = "scale-then-privatize"
SHORT = {"scoring_epochs": 0.2}
PAPER: dict[str, object] = {"density": 0.01, "window": 10, "second_moment": "coordinate", "bias_correction": "paper"}
VARIANTS: dict[str, tuple[str, dict[str, object], float]] = {
    # name: method, options, learning rate for few steps
    "dp-microadam, default": ("dp-microadam", {}, 3e-3),
    "dp-microadam": ("dp-microadam", PAPER, 3e-3),
    "dp-microadam, dense error": ("dp-microadam", {**PAPER, "quantize": False}, 3e-3),
    "dp-microadam, no error feedback": ("dp-microadam", {**PAPER, "error_feedback": False}, 3e-3),
    "dp-microadam, tensor scope": ("dp-microadam", {**PAPER, "scope": "tensor"}, 3e-3),
    "dp-microadam, window's bias": ("dp-microadam", {**PAPER, "bias_correction": "window"}, 3e-3),
    "dp-microadam, stochastic": ("dp-microadam", {**PAPER, "rounding": "stochastic"}, 3e-3),
    "dp-microadam, density 0.1 %": ("dp-microadam", {**PAPER, "density": 0.001}, 1e-2),
    "dp-microadam, density 10 %": ("dp-microadam", {**PAPER, "density": 0.1}, 1e-3),
    "dp-microadam, density 100 %": ("dp-microadam", {**PAPER, "density": 1.0}, 1e-3),
    "dp-sgd": ("dp-sgd", {}, 4.0),
    "dp-sgd, momentum": ("dp-sgd", {"momentum": 0.9}, 0.4),
    "dp-adam": ("dp-adam", {}, 1e-3),
    "dp-adamw": ("dp-adamw", {}, 1e-3),
    "dp-adambc": ("dp-adambc", {}, 1e-3),
    f"{STP}, Adam": (STP, {}, 3e-3),
    f"{STP}, MicroAdam": (STP, {"base_optimizer": "microadam", **PAPER}, 1e-2),
    f"{STP}, delayed": (STP, {"source": "delayed", "interval": 20, "rate_ratio": 0.025}, 4.0),
    f"{STP}, public": (STP, {"source": "public", "public": 540}, 2.0),
    "dp-bitfit": ("dp-bitfit", {}, 0.5),
    "sparta, sum": ("sparta", SHORT, 0.5),
    "sparta, norms": ("sparta", {**SHORT, "scores": "norms"}, 0.5),
}


def state_bytes(name: str, device: str) -> float:
    """Bytes per parameter that a method keeps between steps."""
    method, options, _ = VARIANTS[name]
    model = wide_resnet().to(device)
    if "public" in options:
        examples = torch.zeros(2, 3, 32, 32, device=device)
        options = {**options, "public": PublicExamples(examples, lambda model, batch: model(batch).sum(1))}
    wired = build(method, model, DEFAULT_LEARNING_RATES[method], options)
    largest = 0
    for phase in wired.phases(UnprotectedPlan(40, 20, 200)):
        wired.enter(phase)
        for _ in range(min(phase.steps, 20)):
            take_step(model, wired, phase)
            kept = [*wired.optimizer.state.values(), wired.state_dict()]
            largest = max(largest, sum(bytes_of(item) for item in kept))
    return largest / sum(parameter.numel() for parameter in model.parameters())


def take_step(model: nn.Module, wired: Method, phase: Phase) -> None:
    wired.scale()
    masks = wired.row_masks()
    means = {}
    for name, parameter in model.named_parameters():
        if phase.trainable is None or name in phase.trainable:
            shape = parameter.shape[:1] if phase.query == "row norms" else parameter.shape
            means[name] = torch.randn(shape, device=parameter.device)
            if name in masks:
                means[name][~masks[name]] = 0.0
    gradients = wired.receive(means)
    if phase.rate:
        for name, parameter in model.named_parameters():
            parameter.grad = gradients.get(name)
        wired.optimizer.step()


def bytes_of(item: object) -> int:
    if isinstance(item, torch.Tensor):
        return item.numel() * item.element_size()
    return sum(map(bytes_of, item.values())) if isinstance(item, dict) else 0


def train(name: str, steps: int, batch_size: int, folder: str, private: bool) -> dict[str, object]:
    """Test accuracy after a short run of the recipe fashion-mnist."""
    method, options, rate = VARIANTS[name]
    recipe = load_recipe(
        "fashion-mnist", [f"steps={steps}", f"batch_size={batch_size}", f"data_folder={folder}", "ema_decay=0"]
    )
    values = {key: value for key, value in vars(recipe).items() if value is not None}
    values.update(
        method=method,
        optimizer=options,
        learning_rate=rate,
        lr_unit="absolute",
        schedule="constant",
        warmup=0.0,
        evaluate_every=10**6,
    )
    if not private:
        values.update(method="non-private", base=method, learning_rate=min(rate, 0.1))
    with tempfile.TemporaryDirectory() as run:
        experiment = assemble(type(recipe).from_dict(values), Path(run) / "run", show_progress=False)
        result = experiment.fit()
        return {"method": name, "private": private, "accuracy": experiment.test_accuracy()[0], "epsilon": result.epsilon}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", action="store_true")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--non-private", action="store_true", help="with --train: without clipping and noise")
    parser.add_argument("--methods", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--data-folder", default="")
    add_options(parser)
    options = parser.parse_args()
    if not options.state and not options.train:
        parser.error("nothing to measure; give --state, --train or both")
    results: list[dict[str, object]] = []
    for name in options.methods:
        tell(name)
        if options.state:
            results.append({"method": name, "bytes_per_parameter": round(state_bytes(name, options.device), 3)})
            print(json.dumps(results[-1]), flush=True)
        if options.train:
            results.append(train(name, options.steps, options.batch_size, options.data_folder, not options.non_private))
            print(json.dumps(results[-1]), flush=True)
    deliver(options, "methods", results)


if __name__ == "__main__":
    main()
