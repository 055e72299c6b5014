"""What correlated noise adds to a private step of WRN-16-4: whole steps with 1, 8 and 32 bands, and the chain of noise alone.

    python benchmarks/bands.py [--batch 256] [--physical-batch 64] [--bands 8 32] [--rounds 5] [--threads 1] [--device cuda]
        [--json] [--out FILE]

A whole step is batch/physical-batch passes over random images, noise and optimizer. The passes are the same for every number
of bands, so that each round takes them once, and then noise and optimizer once for each number, in changing order. Differences
to one band are taken within a round, and their median is related to the median of a whole step with one band. The chain is as
long as it gets before it is timed: from then on a step always reads the noise of bands − 1 steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dp_microadam import ClippedGradients, GaussianMechanism, MicroAdam, PrivacyPlan, Randomness
from dp_microadam.training.evaluation import class_loss
from dp_microadam.training.gradients import set_gradients
from dp_microadam.workbench.command_line.measuring import add_options, deliver, tell, wall_clock, work_clock
from dp_microadam.workbench.models import wide_resnet

CLOCKS = {"processor": work_clock, "wall": wall_clock}


def measure(batch: int, physical_batch: int, bands: Sequence[int], rounds: int, device: str) -> dict[str, Any]:
    """Median seconds, by clock, of the passes and of what follows them for each number of bands."""
    tell("independence check, and first steps with each number of bands")
    torch.manual_seed(0)
    model = wide_resnet(depth=16, width=4).to(device)
    engine = ClippedGradients(model, class_loss, max_grad_norm=1.0)
    chunk = torch.randn(physical_batch, 3, 32, 32, device=device), torch.randint(0, 10, (physical_batch,), device=device)
    engine.accumulate(chunk)  # independence checks happen once, and are not part of a step
    finish = {count: _finish(model, engine, batch, count) for count in bands}
    for work in finish.values():
        for _ in range(max(bands) + 1):
            work()

    def passes() -> None:
        engine.reset()
        for _ in range(batch // physical_batch):
            engine.accumulate(chunk)

    found: dict[str, dict[str, list[float]]] = {clock: defaultdict(list) for clock in CLOCKS}
    for number in range(rounds):
        tell(f"round {number + 1} of {rounds}")
        turn = number % len(bands)
        for name, work in [("passes", passes), *((str(count), finish[count]) for count in (*bands[turn:], *bands[:turn]))]:
            begin = {clock: read(device) for clock, read in CLOCKS.items()}
            work()
            for clock, read in CLOCKS.items():
                found[clock][name].append(read(device) - begin[clock])
        tell(", ".join(f"{name} {values[-1]:.3f} s" for name, values in next(iter(found.values())).items()))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": {clock: {name: statistics.median(values) for name, values in by.items()} for clock, by in found.items()},
        "more than one band": {clock: _differences(by, bands) for clock, by in found.items()},
    }


def _finish(model: torch.nn.Module, engine: ClippedGradients, batch: int, bands: int) -> Callable[[], None]:
    """What a step does after its passes: noise and optimizer."""
    plan = PrivacyPlan(50_000, batch, 1.0, 1000, 1e-5, bands=bands)
    mechanism = GaussianMechanism.from_plan(plan, engine.sensitivity, randomness=Randomness.from_entropy())
    optimizer = MicroAdam(model.parameters())
    steps = iter(range(10**9))

    def work() -> None:
        set_gradients(model, mechanism.privatize(engine.sums, step=next(steps)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return work


def _differences(by: dict[str, list[float]], bands: Sequence[int]) -> dict[str, float]:
    """Median over rounds of what a number of bands takes more than the first, as a share of a step with the first."""
    first = by[str(bands[0])]
    step = statistics.median(by["passes"]) + statistics.median(first)
    return {
        str(count): statistics.median(more - one for more, one in zip(by[str(count)], first, strict=True)) / step
        for count in bands[1:]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--physical-batch", type=int, default=64)
    parser.add_argument("--bands", type=int, nargs="+", default=[8, 32], help="compared with 1 (default: 8 32)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = measure(options.batch, options.physical_batch, [1, *options.bands], options.rounds, options.device)
    deliver(options, "bands, median seconds", {"batch": options.batch, "physical_batch": options.physical_batch, **found})
    if options.json:
        print(json.dumps({"batch": options.batch, "threads": options.threads, **found}))
        return
    print(f"{found['parameters']:,} parameters, batch {options.batch}, {options.threads} threads")
    for clock in CLOCKS:
        times = found["seconds"][clock]
        print(f"{clock} time: passes {times['passes']:.2f} s")
        for count in (1, *options.bands):
            more = found["more than one band"][clock].get(str(count))
            share = "" if more is None else f", {100 * more:+.2f} % of a step"
            print(f"  {count:3} bands: noise and optimizer {1e3 * times[str(count)]:7.1f} ms{share}")


if __name__ == "__main__":
    main()
