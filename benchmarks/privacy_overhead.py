"""What the privacy parts cost beside clipping: noise, sampling, the ledger's sync. Prints medians.

python benchmarks/privacy_overhead.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import torch

from dp_microadam import GaussianMechanism, PoissonSampler, PrivacyLedger, PrivacyPlan, Randomness
from dp_microadam.privacy.device_noise import unsupported_reason
from dp_microadam.privacy.ledger import RunSettings


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    durations = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)


def _on_device(mechanism: GaussianMechanism, sums: dict[str, torch.Tensor], steps: Iterator[int], kind: str) -> None:
    """The same on a GPU: drawn there if Triton is installed, otherwise drawn on the host and copied."""
    device = torch.device("cuda")
    on_device = {name: total.to(device) for name, total in sums.items()}
    place = unsupported_reason(torch.device("cuda", torch.cuda.current_device())) or "drawn on the GPU"

    def privatize() -> None:
        mechanism.privatize(on_device, step=next(steps))
        torch.cuda.synchronize()

    privatize()
    print(f"{kind:<12}   2,750,000 parameters privatized on the GPU {1e3 * median_seconds(privatize, 9):8.1f} ms ({place})")


def main() -> None:
    plan = PrivacyPlan.solve(dataset_size=45_000, batch_size=4096, delta=1e-5, epsilon=8.0, noise_multiplier=3.0)
    for secure in (False, True):
        kind = "secure" if secure else "statistical"
        for count, repeats in ((2_750_000, 9), (100_000_000, 3)):
            source = Randomness.from_entropy(secure=secure)
            drawing = median_seconds(lambda source=source, count=count: source.normals("noise", 0, count), repeats)
            rate = 4 * count / drawing / 1e6
            print(f"{kind:<12} {count:>11,} normal numbers  {1e3 * drawing:8.1f} ms  {rate:6.0f} MB/s of float32")
        mechanism = GaussianMechanism.from_plan(plan, 1.0, randomness=Randomness.from_entropy(secure=secure))
        sums = {f"layer {i}": torch.zeros(50_000) for i in range(55)}
        steps = iter(range(100))
        whole = median_seconds(lambda m=mechanism, s=sums, n=steps: m.privatize(s, step=next(n)), 9)
        print(f"{kind:<12}   2,750,000 parameters privatized in 55 tensors {1e3 * whole:8.1f} ms")
        if torch.cuda.is_available():
            _on_device(mechanism, sums, steps, kind)
        for size in (45_000, 1_271_167):
            sampler = PoissonSampler(size, 4096, steps=1, randomness=Randomness.from_entropy(secure=secure))
            drawing = median_seconds(lambda s=sampler: s.draw(0), 9)
            print(f"{kind:<12} {size:>11,} examples sampled {1e3 * drawing:8.1f} ms")
    settings = RunSettings(private=True, randomness="operating system's entropy", sensitivity=1.0)
    with tempfile.TemporaryDirectory(dir=".") as folder, PrivacyLedger.create(folder, plan, settings) as ledger:
        print(f"one step recorded and synced {1e3 * median_seconds(ledger.record_step, 300):8.2f} ms")


if __name__ == "__main__":
    main()
