"""Direct checks of the assumptions of the privacy proof: sampling, clipping, noise and number of steps.

Attacks (``one_run.py``, ``two_world.py``) show that something published reveals too much, and need a fault to cost much privacy
before they notice. Checks ask for the promises themselves, of the same running code, and notice smaller faults and such that
these attacks do not look for. They need to know what to look for: a check sees the faults it was made for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dp_microadam.errors import DPMicroAdamError
from dp_microadam.workbench.audit.accounting_checks import accounting_checks
from dp_microadam.workbench.audit.band_checks import BANDS, band_checks
from dp_microadam.workbench.audit.cap_checks import RUNS, cap_checks
from dp_microadam.workbench.audit.check import Check, refused
from dp_microadam.workbench.audit.clipping_checks import clipping_checks
from dp_microadam.workbench.audit.layer_families import FAMILIES
from dp_microadam.workbench.audit.noise_checks import DELTA, NOISE_MULTIPLIER, published_noise, seed_check
from dp_microadam.workbench.audit.sampling_checks import published_sample_checks, sampler_checks
from dp_microadam.workbench.audit.user_checks import user_checks

# Told before each part: what begins, and how many steps it takes; returns what is told of each step.
Watch = Callable[[str, int], Callable[[int], None]]
Advance = Callable[[int], None]


@dataclass(frozen=True)
class CheckSizes:
    """Size of the checks: steps of the sampler and of trainer runs, and draws of the generator."""

    sampler_steps: int
    sampled_steps: int
    noise_steps: int
    draws: int


def unwatched(part: str, steps: int) -> Advance:
    """Ignores progress."""
    return lambda done: None


def check_mechanisms(sizes: CheckSizes, watch: Watch = unwatched) -> list[Check]:
    """Run all checks of the library's own sampler, clipping engine, noise, ledger and trainer.

    Formal guarantees: if all of them do what they promise, and the operating system's entropy is uniform, the probability that
    any check fails is at most the sum of their ``false_alarm``, which is below 1e-6.
    """
    second_run = max(2, sizes.noise_steps // 20)
    parts: tuple[tuple[str, int, Callable[[Advance], list[Check]]], ...] = (
        ("clipping", len(FAMILIES), clipping_checks),
        ("sampler", 2 * sizes.sampler_steps, lambda advance: sampler_checks(sizes.sampler_steps, advance)),
        ("published samples", sizes.sampled_steps, lambda advance: published_sample_checks(sizes.sampled_steps, advance)),
        (
            "published noise",
            sizes.noise_steps + second_run,
            lambda advance: _published_noise_checks(sizes.noise_steps, advance),
        ),
        (
            "bands",
            BANDS * sizes.sampler_steps + sizes.noise_steps,
            lambda advance: band_checks(sizes.sampler_steps, sizes.noise_steps, advance),
        ),
        ("cap", RUNS * sizes.sampler_steps, lambda advance: cap_checks(RUNS * sizes.sampler_steps, advance)),
        (
            "users",
            2 * sizes.sampler_steps,
            lambda advance: user_checks(sizes.sampler_steps, sizes.sampler_steps, advance),
        ),
        ("seeds", sizes.draws, lambda advance: [seed_check(sizes.draws, advance)]),
    )
    checks: list[Check] = []
    for name, steps, run in parts:
        advance = watch(f"checks: {name}", steps)
        try:
            checks += run(advance)
        except DPMicroAdamError as error:  # what the library refuses to do here it supports
            checks.append(refused("pipeline", name, "does the pipeline run at all?", error))
    order = ("pipeline", "sampling", "clipping", "noise", "accounting")
    return sorted(checks, key=lambda check: order.index(check.part))


def _published_noise_checks(steps: int, advance: Advance) -> list[Check]:
    statistics, stated = published_noise(steps, advance)
    return [*statistics.checks(), *accounting_checks(stated, NOISE_MULTIPLIER, DELTA)]
