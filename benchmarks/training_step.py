"""Where the time of a private training step goes: WRN-16-4 on 32×32 images, DP-MicroAdam, at the paper's batch of 4096.

    python benchmarks/training_step.py [--batch 4096] [--physical-batch 128] [--steps 2] [--device cuda] [--json]
        [--out FILE] [--picture step.png]

Everything besides the forward and backward pass with clipping — sampling and fetching, augmentation, noise, ledger, optimizer,
weight average — should take at most a tenth of the step. Every part is what a run uses; the images are random, because time
does not depend on them. Parts are timed over whole steps and the medians reported; on a GPU each part waits for the device, so
that parts which would overlap are counted one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dp_microadam import ClippedGradients, GaussianMechanism, MicroAdam, PoissonSampler, PrivacyLedger, PrivacyPlan, Randomness
from dp_microadam.ledger.ledger import RunSettings
from dp_microadam.training.ema import WeightAverage
from dp_microadam.training.evaluation import class_loss
from dp_microadam.training.gradients import set_gradients
from dp_microadam.workbench.command_line.measuring import add_options, deliver, tell, wall_clock
from dp_microadam.workbench.data import Augmentation
from dp_microadam.workbench.models import wide_resnet

CLIPPING = "forward, backward, clipping"
FIRST_LOOK = 256
"""The expected batch of a first table, which takes seconds."""


def measure(batch: int, physical_batch: int, steps: int, device: str) -> dict[str, float]:
    """Median seconds of each part of a step."""
    torch.manual_seed(0)
    images = torch.randint(0, 256, (45_000, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(0, 10, (45_000,))
    plan = PrivacyPlan.solve(dataset_size=45_000, batch_size=batch, delta=1e-5, noise_multiplier=5.0, steps=7227)
    model = wide_resnet(depth=16, width=4).to(device)
    engine = ClippedGradients(model, class_loss, max_grad_norm=1.0)
    augment = Augmentation(crop_padding=4, flip=True)
    randomness = Randomness.from_entropy()
    mechanism = GaussianMechanism.from_plan(plan, engine.sensitivity, randomness=randomness)
    sampler = PoissonSampler.from_plan(plan, physical_batch_size=physical_batch, randomness=randomness)
    optimizer = MicroAdam(model.parameters())
    average = WeightAverage(model, 0.9999)
    settings = RunSettings(private=True, randomness=randomness.description, sensitivity=engine.sensitivity)
    parts: dict[str, list[float]] = defaultdict(list)
    spent: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        begin = wall_clock(device)
        yield
        spent[name] += wall_clock(device) - begin

    tell("independence check and compilation")
    # What happens once — independence checks, compilation, the optimizer's state — is not part of a step.
    engine.accumulate((images[:2].float().to(device), labels[:2].to(device)))
    engine.reset()
    set_gradients(model, {name: torch.zeros_like(param) for name, param in model.named_parameters()})
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder, PrivacyLedger.create(folder, plan, settings) as ledger:
        source = sampler.load((images, labels))
        for number in range(steps):
            spent.clear()
            told = time.monotonic()
            with timed("sampling and fetching"):
                step = next(source)
                chunks = iter(step.chunks)
            while True:
                with timed("sampling and fetching"):
                    chunk = next(chunks, None)
                if time.monotonic() - told > 5:
                    told = time.monotonic()
                    tell(f"step {number + 1} of {steps}: {sum(spent.values()):.1f} s so far")
                if chunk is None:
                    break
                with timed("moving to the device"):
                    chunk = tuple(part.to(device) for part in chunk)
                with timed("augmentation, normalization"):
                    inputs = (augment(chunk)[0] - 122.0).mul_(1 / 63.0)
                with timed(CLIPPING):
                    engine.accumulate((inputs, chunk[1]))
            with timed("ledger"):
                ledger.record_step()
            with timed("noise"):
                means = mechanism.privatize(engine.sums, step=step.index)
                engine.reset()
            with timed("optimizer"):
                set_gradients(model, means)
                optimizer.step()
                optimizer.zero_grad()
            with timed("weight average"):
                average.update(model, number + 1)
            for name, seconds in spent.items():
                parts[name].append(seconds)
            tell(f"step {number + 1} of {steps}: {sum(spent.values()):.1f} s")
    return {name: statistics.median(values) for name, values in parts.items()}


def show(parts: dict[str, float]) -> None:
    total = sum(parts.values())
    print(f"{'part of a step':32}{'seconds':>10}{'share':>9}")
    for name, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        print(f"{name:32}{seconds:10.3f}{100 * seconds / total:8.2f} %")
    print(f"{'everything besides clipping':32}{total - parts[CLIPPING]:10.3f}{100 * (1 - parts[CLIPPING] / total):8.2f} %")


def draw(parts: dict[str, float], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    total = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda item: item[1])
    figure, axes = pyplot.subplots(figsize=(8, 3.4))
    shares = [100 * seconds / total for _, seconds in ordered]
    colours = ["#1f77b4" if name == CLIPPING else "#ff7f0e" for name, _ in ordered]
    bars = axes.barh([name for name, _ in ordered], shares, color=colours)
    axes.bar_label(bars, labels=[f" {share:.2f} %" for share in shares])
    axes.set_xlim(0, 115)
    axes.set_xlabel("share of a step (%)")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--physical-batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", type=Path)
    add_options(parser)
    options = parser.parse_args()
    if options.batch > FIRST_LOOK and not options.json:
        tell(f"a first look, with an expected batch of {FIRST_LOOK}")
        show(measure(FIRST_LOOK, options.physical_batch, 1, options.device))
        tell(f"now with an expected batch of {options.batch}")
    parts = measure(options.batch, options.physical_batch, options.steps, options.device)
    deliver(options, "training step", {"batch": options.batch, "physical_batch": options.physical_batch, "seconds": parts})
    if options.json:
        print(json.dumps({"batch": options.batch, "threads": torch.get_num_threads(), "seconds": parts}))
    else:
        show(parts)
    if options.picture:
        title = f"A private step of WRN-16-4, expected batch {options.batch}, {torch.get_num_threads()} threads"
        draw(parts, options.picture, title)


if __name__ == "__main__":
    main()
