"""A whole private step of a small network beside its clipped gradients alone.

    OMP_NUM_THREADS=1 python benchmarks/small_step.py [--batches 64 128 256] [--rounds 100] [--device cuda] [--out FILE]

The 26,010-parameter tanh CNN on 48,000 random images. Each round takes one step of `PrivateStep` with MicroAdam (ledger,
sampling, clipped gradients, noise, optimizer), the clipped gradients of as many examples as the step expects, and their
ordinary gradients without privacy. Medians of the rounds, by processor time and by the wall clock, which also has the wait for
the disk. Repetitions of the independence check (steps 16, 32, …) are timed apart.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from dp_microadam import ClippedGradients, Method, MicroAdam, PrivacyPlan, PrivateStep
from dp_microadam.training.evaluation import class_loss
from dp_microadam.workbench import models
from dp_microadam.workbench.command_line.measuring import add_options, deliver, tell, wall_clock, work_clock

PARTS = ("whole step", "clipped gradients", "without privacy")
REPETITION = "step with a repetition"


def measure(batch: int, rounds: int, device: str, folder: Path) -> dict[str, list[float]]:
    """Seconds of every part in every round, by both clocks; and of the steps that repeat the check."""
    torch.manual_seed(0)
    images, labels = torch.rand(48_000, 1, 28, 28, device=device), torch.randint(0, 10, (48_000,), device=device)
    model = models.tanh_cnn().to(device)
    plan = PrivacyPlan(48_000, batch, 1.0, 10_000, 1e-5)
    method = Method(MicroAdam(model.parameters()))
    step = PrivateStep(model, class_loss, plan, (images, labels), run_dir=folder / f"{batch}", method=method)
    engine = ClippedGradients(model, class_loss, max_grad_norm=1.0, repeat_check=False)
    some = images[:batch], labels[:batch]

    def private() -> None:
        method.apply(model, step.take())

    def clipped() -> None:
        engine.accumulate(some)
        engine.reset()

    def ordinary() -> None:
        F.cross_entropy(model(some[0]), some[1]).backward()
        model.zero_grad()

    found: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], None]) -> None:
        before = work_clock(device), wall_clock(device)
        work()
        for kind, begun, clock in zip(("processor", "wall"), before, (work_clock, wall_clock), strict=True):
            found.setdefault(f"{name}, {kind}", []).append(clock(device) - begun)

    step.begin()
    for _ in range(20):
        private()
        clipped()
    for _ in range(rounds):
        timed(REPETITION if step.looks_again else PARTS[0], private)
        timed(PARTS[1], clipped)
        timed(PARTS[2], ordinary)
    step.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rounds", type=int, default=100)
    add_options(parser)
    options = parser.parse_args()
    results = {}
    print(f"{'batch':>5} {'clock':>10} {PARTS[2]:>16} {PARTS[1]:>18} {PARTS[0]:>11} {'with a repetition':>18}", flush=True)
    for batch in options.batches:
        tell(f"batches of {batch}: {options.rounds} rounds of a private step, clipped gradients and ordinary ones")
        with tempfile.TemporaryDirectory(dir=".") as folder:
            found = results[batch] = measure(batch, options.rounds, options.device, Path(folder))
        for clock in ("processor", "wall"):
            values = (found.get(f"{name}, {clock}", [math.nan]) for name in (*PARTS, REPETITION))
            whole, clipped, ordinary, repeated = (1e3 * statistics.median(seconds) for seconds in values)
            pairs = zip(found[f"{PARTS[0]}, {clock}"], found[f"{PARTS[1]}, {clock}"], strict=False)
            ratio = statistics.median(one / other for one, other in pairs)
            print(
                f"{batch:5} {clock:>10} {ordinary:13.2f} ms {clipped:15.2f} ms {whole:8.2f} ms {repeated:15.2f} ms   "
                f"whole step to clipped gradients {ratio:.2f}×",
                flush=True,
            )
    deliver(options, "small step, seconds", results)


if __name__ == "__main__":
    main()
