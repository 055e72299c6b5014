"""How surely the two-world auditor notices each fault, at the sizes of the tests.

Draws what the pipeline publishes from its distribution, honest and with each fault, audits it many times at the confidence
of the tests, 1 − 1e-7, and prints how many standard deviations the average bound lies above the claim. Takes about a minute.

    python benchmarks/audit_power.py [--audits 1000]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dp_microadam.apps.audit.probes import COMPOSITION, NOISE, SAMPLING, Experiment
from dp_microadam.apps.audit.two_world import DIRECTIONS, TARGET, audit_two_worlds

Worlds = tuple[NDArray[np.float64], NDArray[np.float64]]
RNG = np.random.default_rng(0)
SIGMA = NOISE.plan.noise_multiplier


def noisy(repetitions: int, steps: int, deviation: float) -> NDArray[np.float64]:
    return deviation * RNG.standard_normal((repetitions, steps, DIRECTIONS))


def one_step(repetitions: int, without: float, present: float, signal: float) -> Worlds:
    """One step with these deviations of the noise, and this much of the target."""
    worlds = noisy(repetitions, 1, without), noisy(repetitions, 1, present)
    worlds[1][:, :, TARGET] += signal
    return worlds


def repeated_noise(repetitions: int) -> Worlds:
    deviation = COMPOSITION.plan.noise_multiplier
    worlds = tuple(np.repeat(noisy(repetitions, 1, deviation), 2, axis=1) for _ in range(2))
    worlds[1][:, :, TARGET] += RNG.random((repetitions, 2)) < 0.5
    return worlds[0], worlds[1]


def shuffled(repetitions: int) -> Worlds:
    without, present = (noisy(repetitions, 2, SAMPLING.plan.noise_multiplier) for _ in range(2))
    present[np.arange(repetitions), RNG.integers(0, 2, repetitions), TARGET] += 1
    return without, present


def shared_by_ranks(repetitions: int) -> Worlds:
    without, present = one_step(repetitions, SIGMA, SIGMA, 0.0)
    for world in (without, present):
        world[:, :, DIRECTIONS // 2 :] = world[:, :, : DIRECTIONS // 2]
    present[:, :, TARGET] += 1
    return without, present


CASES: list[tuple[str, Experiment, str, int, Callable[[int], Worlds]]] = [
    ("honest", NOISE, "noise scale", 1500, lambda count: one_step(count, SIGMA, SIGMA, 1.0)),
    ("noise of half the scale", NOISE, "noise scale", 1500, lambda count: one_step(count, SIGMA / 2, SIGMA / 2, 1.0)),
    ("an example counted twice", NOISE, "noise scale", 1500, lambda count: one_step(count, SIGMA, SIGMA, 2.0)),
    ("noise per chunk", NOISE, "batch size", 1000, lambda count: one_step(count, SIGMA / 2, SIGMA / 2**0.5, 1.0)),
    ("division by the realised batch", NOISE, "batch size", 400, lambda count: one_step(count, 2 * SIGMA, SIGMA, 1.0)),
    ("ranks that share their noise", NOISE, "coordinates", 1000, shared_by_ranks),
    ("noise reused between steps", COMPOSITION, "repeated noise", 600, repeated_noise),
    ("sampler not independent", SAMPLING, "sampling", 400, shuffled),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--audits", type=int, default=1000, help="audits per case")
    audits = parser.parse_args().audits
    print(
        f"{'case':<32}{'probe':<16}{'repetitions':>11}{'claim':>7}{'mean':>7}{'least':>7}{'most':>7}{'sd':>7}{'(mean-claim)/sd':>17}"
    )
    for name, experiment, probe_name, repetitions, worlds in CASES:
        (probe,) = (probe for probe in experiment.probes if probe.name == probe_name)
        claim = experiment.claim(probe)
        bounds = np.array(
            [audit_two_worlds(*worlds(repetitions), probe, claim, confidence=1 - 1e-7).bound for _ in range(audits)]
        )
        figures = f"{claim:>7.2f}{bounds.mean():>7.2f}{bounds.min():>7.2f}{bounds.max():>7.2f}{bounds.std():>7.3f}"
        distance = (bounds.mean() - claim) / max(bounds.std(), 1e-9)
        print(f"{name:<32}{probe_name:<16}{repetitions:>11}{figures}{distance:>17.1f}")


if __name__ == "__main__":
    main()
