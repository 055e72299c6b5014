"""Opacus with Adam as its tutorials have it: what a port begins from.

    python benchmarks/opacus_adam.py [--problems digits-195 …] [--epsilons 1 3 8] [--seeds 3] [--optimizer plan] [--out FILE]

Opacus' PrivacyEngine with Poisson sampling, Adam at its default rate of 1e-3, clipping norm 1, noise by its PRV accountant.
With `--optimizer plan` it is the same loop with SGD at the learning rate that follows from the plan. Test accuracy in percent.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from torch.utils.data import DataLoader, TensorDataset

from dp_microadam import PrivacyPlan
from dp_microadam.workbench import data, models
from dp_microadam.workbench.data import Preparation

DELTA = 1e-5
PROBLEMS = {
    "digits-195": ("digits", 195, 128),
    "digits-1000": ("digits", 1000, 128),
    "fashion-mnist-195": ("fashion-mnist", 195, 512),
    "fashion-mnist-1000": ("fashion-mnist", 1000, 128),
}


def optimizer_of(kind: str, model: torch.nn.Module, plan: dict[str, Any]) -> torch.optim.Optimizer:
    """Adam as tutorials have it, or SGD at the plan's own rate."""
    if kind == "adam":
        return torch.optim.Adam(model.parameters())
    rate = PrivacyPlan.solve(**plan, delta=DELTA, bands=1).learning_rate(sum(p.numel() for p in model.parameters()))
    return torch.optim.SGD(model.parameters(), lr=rate)


def trained_accuracy(name: str, steps: int, batch_size: int, epsilon: float, seed: int, kind: str = "adam") -> float:
    """Train with Opacus and return the test accuracy in percent."""
    torch.manual_seed(seed)
    found = data.load(name)
    prepare = Preparation(found)
    inputs, labels = prepare(found.train)
    model = models.tanh_cnn(found.num_classes)
    sigma = get_noise_multiplier(
        target_epsilon=epsilon, target_delta=DELTA, sample_rate=batch_size / len(labels), steps=steps, accountant="prv"
    )
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer_of(
            kind, model, {"dataset_size": len(labels), "batch_size": batch_size, "epsilon": epsilon, "steps": steps}
        ),
        data_loader=DataLoader(TensorDataset(inputs, labels), batch_size=batch_size),
        noise_multiplier=sigma,
        max_grad_norm=1.0,
    )
    taken = 0
    while taken < steps:
        for batch, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(private(batch), targets).backward()
            optimizer.step()
            taken += 1
            if taken == steps:
                break
    model.eval()
    inputs, labels = prepare(found.test)
    with torch.no_grad():
        return 100 * float((model(inputs).argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=["digits-195"], choices=PROBLEMS)
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 3.0, 8.0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--optimizer", default="adam", choices=["adam", "plan"], help="Adam, or SGD at the plan's rate")
    parser.add_argument("--steps", type=int, help="other steps than the problem has")
    parser.add_argument("--out", type=Path, help="append a JSON line per run to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(f"{'problem':20} {'ε':>4} {'seed':>4} {'accuracy':>9}", flush=True)
    for problem in options.problems:
        for epsilon in options.epsilons:
            for seed in range(1, options.seeds + 1):
                name, steps, batch_size = PROBLEMS[problem]
                accuracy = trained_accuracy(name, options.steps or steps, batch_size, epsilon, seed, options.optimizer)
                print(f"{problem:20} {epsilon:4g} {seed:4} {accuracy:7.2f} %", flush=True)
                if options.out is not None:
                    line = {"problem": problem, "optimizer": options.optimizer, "epsilon": epsilon, "seed": seed}
                    line |= {"accuracy": accuracy}
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
