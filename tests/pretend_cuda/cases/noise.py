"""Noise for a device: drawn on the host, and nothing that the host waits for."""

from __future__ import annotations

from functools import partial

import torch
from pretend_cuda.cases.comparison import all_agree, moved, placed
from pretend_cuda.watch import Watch

from dp_microadam import GaussianMechanism, PrivacyError, Randomness

CPU = torch.device("cpu")
SUMS = {"a": torch.randn(33, 7), "b": torch.randn(10, 20).t(), "none": torch.zeros(0), "c": torch.randn(1), "d": torch.randn(5)}


def third(rank: int, count: int) -> range:
    return range(count * rank // 3, count * (rank + 1) // 3)


def mechanism_of(source: Randomness | None = None, **options: object) -> GaussianMechanism:
    return GaussianMechanism(2.0, 0.5, 10, randomness=source, **options)


def seeded(device: torch.device) -> None:
    """With a seed a step has the CPU's noise, whatever the dtypes, the slice and the source; one synchronisation a step."""
    for dtypes in ((torch.float32,), (torch.bfloat16, torch.float64)):
        sums = {name: total.to(dtypes[number % len(dtypes)]) for number, (name, total) in enumerate(SUMS.items())}
        for secure in (False, True):
            for noise_slice in (range, partial(third, 1)):
                found = []
                for where in (CPU, device):
                    mechanism = mechanism_of(Randomness.seeded(3, secure=secure), noise_slice=noise_slice)
                    here = moved(sums, where)
                    with Watch() as watch:
                        found.append(mechanism.mean(mechanism.add_noise(here, step=4), like=here))
                    assert sum(watch.synchronisations.values()) == (where.type == "cuda"), watch.synchronisations
                all_agree(*found, device, f"noise of {dtypes}, secure {secure}", tolerance=0.0)


def one_copy(device: torch.device) -> None:
    """The host draws the noise of a private run for all tensors into one pinned buffer, which crosses over in one copy."""
    here = moved(SUMS, device)
    with Watch() as watch:
        means = mechanism_of().privatize(here, step=0)
    assert sum(watch.synchronisations.values()) == 1, watch.synchronisations
    assert sum(count for (name, _), count in watch.launches.items() if name in ("_to_copy", "copy_")) == 1, watch.launches
    for name, total in here.items():
        placed(means[name], device, name)
        assert means[name].ne(total / 10).all(), name


def not_finite(device: torch.device) -> None:
    """One number that is not finite is noticed in any tensor and dtype; the largest finite ones are not refused."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        largest = {"a": torch.zeros(3, dtype=dtype), "b": torch.full((70, 50), torch.finfo(dtype).max, dtype=dtype)}
        mechanism_of(Randomness.seeded(1)).privatize(moved(largest, device), step=0)
        for name in largest:
            for value in (float("nan"), float("inf"), -float("inf")):
                bad = moved({key: total.clone() for key, total in largest.items()}, device)
                bad[name].view(-1)[-1] = value
                try:
                    mechanism_of(Randomness.seeded(1)).privatize(bad, step=0)
                except PrivacyError:
                    continue
                raise AssertionError(f"{value} in {name} was not refused")


def launches(device: torch.device) -> None:
    """The number of kernels does not grow with the number of tensors, but for what every dtype and memory layout shares."""
    counts = []
    for tensors in (2, 20):
        here = {str(number): torch.zeros(5, device=device) for number in range(tensors)}
        with Watch() as watch:
            mechanism_of(Randomness.seeded(1)).privatize(here, step=0)
        counts.append(sum(watch.launches.values()))
    assert counts[0] == counts[1] <= 12, counts


CASES = {
    "not finite": not_finite,
    "launches": launches,
    "seeded": seeded,
    "one copy": one_copy,
}
