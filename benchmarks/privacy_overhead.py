"""What the privacy parts cost beside clipping: noise, sampling, the ledger's sync. Prints medians.

python benchmarks/privacy_overhead.py [--device cuda] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable

import torch

from dp_microadam import GaussianMechanism, PoissonSampler, PrivacyLedger, PrivacyPlan, Randomness
from dp_microadam.ledger.ledger import RunSettings
from dp_microadam.workbench.command_line.measuring import add_options, deliver, seconds, tell, wall_clock


def median_seconds(work: Callable[[], object], repeats: int, device: str = "cpu") -> float:
    return statistics.median(seconds(work, device, wall_clock) for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    found: dict[str, float] = {}
    tell("noise, samples and the ledger; a line each")
    plan = PrivacyPlan.solve(dataset_size=45_000, batch_size=4096, delta=1e-5, epsilon=8.0, noise_multiplier=3.0)
    for secure in (False, True):
        kind = "secure" if secure else "statistical"
        for count, repeats in ((2_750_000, 9), (100_000_000, 3)):
            source = Randomness.from_entropy(secure=secure)
            drawing = median_seconds(lambda source=source, count=count: source.normals("noise", 0, count), repeats)
            rate = 4 * count / drawing / 1e6
            found[f"{kind}, {count:,} normal numbers"] = drawing
            print(f"{kind:<12} {count:>11,} normal numbers  {1e3 * drawing:8.1f} ms  {rate:6.0f} MB/s of float32", flush=True)
        mechanism = GaussianMechanism.from_plan(plan, 1.0, randomness=Randomness.from_entropy(secure=secure))
        sums = {f"layer {i}": torch.zeros(50_000, device=options.device) for i in range(55)}
        steps = iter(range(100))
        whole = median_seconds(lambda m=mechanism, s=sums, n=steps: m.privatize(s, step=next(n)), 9, options.device)
        found[f"{kind}, 2,750,000 parameters privatized in 55 tensors"] = whole
        print(f"{kind:<12}   2,750,000 parameters privatized in 55 tensors {1e3 * whole:8.1f} ms")
        for size in (45_000, 1_271_167):
            sampler = PoissonSampler(size, 4096, steps=1, randomness=Randomness.from_entropy(secure=secure))
            drawing = median_seconds(lambda s=sampler: s.draw(0), 9)
            found[f"{kind}, {size:,} examples sampled"] = drawing
            print(f"{kind:<12} {size:>11,} examples sampled {1e3 * drawing:8.1f} ms")
    settings = RunSettings(private=True, randomness="operating system's entropy", sensitivity=1.0)
    with tempfile.TemporaryDirectory(dir=".") as folder, PrivacyLedger.create(folder, plan, settings) as ledger:
        found["one step recorded and synced"] = median_seconds(ledger.record_step, 300)
        print(f"one step recorded and synced {1e3 * found['one step recorded and synced']:8.2f} ms")
    deliver(options, "privacy overhead, median seconds", found)


if __name__ == "__main__":
    main()
