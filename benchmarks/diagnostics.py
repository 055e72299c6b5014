"""What diagnostics every 50 steps cost, as a part of an optimizer step and of a private training step.

    python benchmarks/diagnostics.py [--model wide-resnet] [--every 50] [--rounds 4] [--batch-size 64] [--device cuda]
        [--json] [--out FILE]

A Wide-ResNet-16-4 on 3×32×32 images, or the demo's perceptron on 1×28×28; processor time of this process, one thread, or the
wall clock with a GPU. An optimizer step is measured over rounds of ``--every`` steps, watched and unwatched in turns; a
training step is clipped gradients of one batch of random images, noise and the optimizer.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch

from dp_microadam import ClippedGradients, GaussianMechanism, MicroAdam, Randomness
from dp_microadam.training.diagnostics import MicroAdamDiagnostics
from dp_microadam.training.evaluation import class_loss
from dp_microadam.workbench import models
from dp_microadam.workbench.command_line.measuring import add_options, deliver, seconds, tell


def optimizer_round(params: list[torch.nn.Parameter], watched: bool, every: int, device: str) -> Callable[[], float]:
    """Measures ``every`` steps, the last of them watched if at all; warmed up until the window is full."""
    optimizer = MicroAdam(params)
    if watched:
        MicroAdamDiagnostics(optimizer, every)

    def steps() -> None:
        for _ in range(every):
            optimizer.step()

    steps()
    return lambda: seconds(steps, device)


SHAPES = {"wide-resnet": (3, 32, 32), "mlp": (1, 28, 28)}


def training_step(model: torch.nn.Module, shape: tuple[int, ...], batch_size: int, device: str) -> Callable[[], None]:
    engine = ClippedGradients(model, class_loss, max_grad_norm=1.0)
    mechanism = GaussianMechanism(1.0, engine.sensitivity, batch_size, randomness=Randomness.seeded(0))
    optimizer = MicroAdam(model.parameters())
    batch = torch.randn(batch_size, *shape).to(device), torch.randint(10, (batch_size,)).to(device)
    step = 0

    def take() -> None:
        nonlocal step
        engine.accumulate(batch)
        means = mechanism.privatize(engine.sums, step=step)
        engine.reset()
        for name, parameter in model.named_parameters():
            parameter.grad = means[name]
        optimizer.step()
        step += 1

    return take


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(SHAPES), default="wide-resnet")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tell(f"{options.model}: {options.rounds} rounds of {options.every} optimizer steps, with and without diagnostics")
    model = models.build(options.model, 10, SHAPES[options.model]).to(options.device)
    sets = []
    for watched in (False, True):
        params = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
        for param in params:
            param.grad = torch.randn_like(param)
        sets.append(optimizer_round(params, watched, options.every, options.device))
    plain, watched_times = zip(*([measure() for measure in sets] for _ in range(options.rounds)), strict=True)
    optimizer_seconds = statistics.median(plain) / options.every
    extra = (statistics.median(watched_times) - statistics.median(plain)) / options.every
    tell(f"{1e3 * extra:.3f} ms more for a step; now {options.rounds} private training steps")
    take = training_step(model, SHAPES[options.model], options.batch_size, options.device)
    take()
    training_seconds = statistics.median(seconds(take, options.device) for _ in range(options.rounds))
    found = {
        "model": options.model,
        "every": options.every,
        "batch_size": options.batch_size,
        "extra_ms_per_step": 1e3 * extra,
        "optimizer_step_ms": 1e3 * optimizer_seconds,
        "training_step_ms": 1e3 * training_seconds,
        "of_optimizer_step": extra / optimizer_seconds,
        "of_training_step": extra / training_seconds,
    }
    deliver(options, "diagnostics", found)
    if options.json:
        print(json.dumps(found))
        return
    print(f"diagnostics every {options.every} steps: {found['extra_ms_per_step']:.3f} ms of processor time a step,")
    print(f"  {100 * found['of_optimizer_step']:.1f} % of an optimizer step of {found['optimizer_step_ms']:.2f} ms,")
    print(f"  {100 * found['of_training_step']:.3f} % of a private training step of {found['training_step_ms']:.0f} ms")


if __name__ == "__main__":
    main()
