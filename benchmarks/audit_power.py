"""How surely the audit notices each fault: attacks at the sizes of the tests, checks at those of both profiles.

For attacks it draws what the pipeline publishes from its distribution, honest and with each fault, audits it many times at the
confidence of the tests, 1 − 1e-7, and prints how many standard deviations the average bound lies above the claim. For checks it
prints from which size on a fault is noticed with a probability of one half and of 99.99 %, exactly, by the distribution of
their statistics, and the processor time that each part takes. Takes about two minutes.

    python benchmarks/audit_power.py [--audits 1000]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import binom, chi2

from dp_microadam.workbench.audit.check import FALSE_ALARM, count_range, mean_square_range
from dp_microadam.workbench.audit.mechanism_checks import check_mechanisms
from dp_microadam.workbench.audit.noise_checks import NoisyModel
from dp_microadam.workbench.audit.probes import COMPOSITION, NOISE, SAMPLING, Experiment
from dp_microadam.workbench.audit.sampling_checks import sampler_plan
from dp_microadam.workbench.audit.suite import PROFILES
from dp_microadam.workbench.audit.two_world import DIRECTIONS, TARGET, audit_two_worlds
from dp_microadam.workbench.command_line.measuring import tell

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


SURE = (0.5, 0.9999)


def smallest(power: Callable[[float], float], least: float, most: float) -> list[float]:
    """From which size of a fault on it is noticed with each probability."""
    return [brentq(lambda size, aim=aim: power(size) - aim, least, most) for aim in SURE]


def noise_power(numbers: int, alarm: float = FALSE_ALARM) -> list[float]:
    """Deviation of the noise, as a part too small, that the mean square of so many numbers shows."""
    low = mean_square_range(numbers)[0] if alarm == FALSE_ALARM else chi2.ppf(alarm / 2, numbers) / numbers
    return smallest(lambda part: float(chi2.cdf(low * numbers / (1 - part) ** 2, numbers)), 1e-9, 0.99)


def rate_power(trials: int, rate: float) -> list[float]:
    """Sample rate, as a part too high, that the number of draws shows."""
    high = count_range(trials, rate)[1]
    return smallest(lambda part: float(binom.sf(high, trials, rate * (1 + part))), 1e-9, 0.9)


def seed_power(draws: int) -> list[float]:
    """Bits of the longest seeds that coincide among so many draws."""
    return [math.log2(draws**2 / 2 / -math.log(1 - aim)) for aim in SURE]


def tail_power(numbers: int) -> list[float]:
    """Bits of the finest uniforms whose tails, which end at √(2·bits·ln 2), are missed beyond 4.8 deviations."""
    low = count_range(numbers, 2 * float(ndtr(-4.8)))[0]

    def power(bits: float) -> float:
        end = math.sqrt(2 * bits * math.log(2))
        return float(binom.cdf(low - 1, numbers, max(0.0, 2 * float(ndtr(-4.8)) - 2 * float(ndtr(-end)))))

    return [max((bits for bits in np.arange(10, 40, 0.5) if power(bits) >= aim), default=0.0) for aim in SURE]


def print_power_of_checks() -> None:
    sizes = [p.numel() for p in NoisyModel().parameters()]
    print(f"\n{'fault, and the check that sees it':<62}{'profile':<9}{'half the time':>14}{'99.99 %':>10}")
    for name, profile in PROFILES.items():
        checks = profile.checks
        steps = checks.noise_steps + max(2, checks.noise_steps // 20)
        numbers, pairs = steps * sum(sizes), steps * len(sizes)
        plan = sampler_plan(checks.sampler_steps)
        draws = 2 * checks.sampler_steps * plan.dataset_size
        rows = (
            ("noise too small everywhere: variance", noise_power(numbers), "{:.3%}"),
            ("noise too small, one weight, one step: each", noise_power(max(sizes), FALSE_ALARM / pairs), "{:.2%}"),
            ("noise too small, one bias of 450, one step: each", noise_power(450, FALSE_ALARM / pairs), "{:.1%}"),
            ("rate too high: sampler, sample rate", rate_power(draws, plan.sample_rate), "{:.2%}"),
            ("rate too high: trainer, sample rate", rate_power(checks.sampled_steps * 1600, 0.2), "{:.2%}"),
            ("seeds of so many bits or fewer: seeds", seed_power(checks.draws), "{:.1f}"),
            ("uniforms of so many bits or fewer: tails", tail_power(numbers), "{:.1f}"),
        )
        for fault, found, form in rows:
            print(f"{fault:<62}{name:<9}{form.format(found[0]):>14}{form.format(found[1]):>10}")


def print_cost_of_checks() -> None:
    """Processor time of each part of the quick profile, after all of it has run once and everything is loaded and compiled."""
    tell("all checks of the quick profile, twice")
    check_mechanisms(PROFILES["quick"].checks)
    marks: list[tuple[str, float]] = []

    def watch(part: str, steps: int) -> Callable[[int], None]:
        marks.append((part, time.process_time()))
        return lambda done: None

    check_mechanisms(PROFILES["quick"].checks, watch)
    marks.append(("", time.process_time()))
    print(f"\n{'part of the quick profile':<32}{'processor seconds':>18}")
    for (part, start), (_, end) in pairwise(marks):
        print(f"{part:<32}{end - start:>18.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--audits", type=int, default=1000, help="audits per case")
    audits = parser.parse_args().audits
    print(
        f"{'case':<32}{'probe':<16}{'repetitions':>11}{'claim':>7}{'mean':>7}{'least':>7}{'most':>7}{'sd':>7}{'(mean-claim)/sd':>17}",
        flush=True,
    )
    for name, experiment, probe_name, repetitions, worlds in CASES:
        tell(f"{audits} audits of {name}, {probe_name}")
        (probe,) = (probe for probe in experiment.probes if probe.name == probe_name)
        claim = experiment.claim(probe)
        bounds = np.array(
            [audit_two_worlds(*worlds(repetitions), probe, claim, confidence=1 - 1e-7).bound for _ in range(audits)]
        )
        figures = f"{claim:>7.2f}{bounds.mean():>7.2f}{bounds.min():>7.2f}{bounds.max():>7.2f}{bounds.std():>7.3f}"
        distance = (bounds.mean() - claim) / max(bounds.std(), 1e-9)
        print(f"{name:<32}{probe_name:<16}{repetitions:>11}{figures}{distance:>17.1f}", flush=True)
    print_power_of_checks()
    print_cost_of_checks()


if __name__ == "__main__":
    main()
