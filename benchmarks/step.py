"""A whole private step beside its clipped gradients alone, and beside ordinary gradients without privacy.

    OMP_NUM_THREADS=1 python benchmarks/step.py [--model "tanh cnn"] [--batches 64 128 256] [--rounds 100] [--device cuda]
        [--out FILE]

Random images of the model's size. Each round takes one step of `PrivateStep` with MicroAdam (ledger, sampling, clipped
gradients, noise, optimizer), the clipped gradients of as many examples as the step expects, and their ordinary gradients.
Medians of the rounds, by processor time and by the wall clock, which also has the wait for the disk that the ledger is on.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring import add_options, deliver, tell, wall_clock, work_clock

from dp_microadam import ClippedGradients, Method, MicroAdam, PrivacyPlan, PrivateStep
from dp_microadam.training.evaluation import class_loss
from dp_microadam.workbench import models

PARTS = ("whole step", "clipped gradients", "without privacy")
CLOCKS = {"processor": work_clock, "wall": wall_clock}
MODELS = {
    "tanh cnn": (models.tanh_cnn, (1, 28, 28), 48_000),
    "wrn-16-4": (lambda: models.wide_resnet(depth=16, width=4), (3, 32, 32), 4_800),
}


def measure(name: str, batch: int, rounds: int, device: str, folder: Path) -> dict[str, list[float]]:
    """Seconds of every part in every round, by both clocks."""
    torch.manual_seed(0)
    make, shape, count = MODELS[name]
    images, labels = torch.rand(count, *shape, device=device), torch.randint(0, 10, (count,), device=device)
    model = make().to(device)
    plan = PrivacyPlan(count, batch, 1.0, 10_000, 1e-5)
    method = Method(MicroAdam(model.parameters()))
    step = PrivateStep(model, method, plan, class_loss, (images, labels), run_dir=folder / f"{batch}")
    engine = ClippedGradients(model, class_loss, max_grad_norm=1.0)
    some = images[:batch], labels[:batch]

    def private() -> None:
        method.update(model, step.take())

    def clipped() -> None:
        engine.accumulate(some)
        engine.reset()

    def ordinary() -> None:
        F.cross_entropy(model(some[0]), some[1]).backward()
        model.zero_grad()

    found: dict[str, list[float]] = {}

    def timed(part: str, work: Callable[[], None]) -> None:
        before = {clock: read(device) for clock, read in CLOCKS.items()}
        work()
        for clock, read in CLOCKS.items():
            found.setdefault(f"{part}, {clock}", []).append(read(device) - before[clock])

    step.account.begin()
    for _ in range(min(20, rounds)):
        private()
        clipped()
    for _ in range(rounds):
        for part, work in zip(PARTS, (private, clipped, ordinary), strict=True):
            timed(part, work)
    step.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tanh cnn")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rounds", type=int, default=100)
    add_options(parser)
    options = parser.parse_args()
    results = {}
    print(f"{'batch':>5} {'clock':>10} {PARTS[2]:>18} {PARTS[1]:>18} {PARTS[0]:>18}", flush=True)
    for batch in options.batches:
        tell(f"batches of {batch}: {options.rounds} rounds of a private step, clipped gradients and ordinary ones")
        with tempfile.TemporaryDirectory(dir=".") as folder:
            found = results[batch] = measure(options.model, batch, options.rounds, options.device, Path(folder))
        for clock in CLOCKS:
            whole, clipped, ordinary = (found[f"{part}, {clock}"] for part in PARTS)
            medians = "".join(f"{1e3 * statistics.median(part):16.2f} ms" for part in (ordinary, clipped, whole))
            ratio = statistics.median(one / other for one, other in zip(whole, clipped, strict=True))
            print(f"{batch:5} {clock:>10}{medians}   whole step to clipped gradients {ratio:.2f}×", flush=True)
    deliver(options, "private step, seconds", results)


if __name__ == "__main__":
    main()
