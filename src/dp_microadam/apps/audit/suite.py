"""All audits of the library's own training pipeline, at a joint confidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dp_microadam.apps.audit.finding import Finding
from dp_microadam.apps.audit.one_run import audit_one_run, trainer_scores
from dp_microadam.apps.audit.probes import EXPERIMENTS, Experiment
from dp_microadam.apps.audit.two_world import audit_two_worlds, trainer_steps
from dp_microadam.privacy.plan import PrivacyPlan
from dp_microadam.validation import require_in_open, require_integer

# Called before each part with its name and number of steps; returns the callback for completed steps.
Watch = Callable[[str, int], Callable[[int], None]]


@dataclass(frozen=True)
class Profile:
    """Size of an audit. Experiments of two steps get half the repetitions, which takes as long."""

    canaries: int
    repetitions: int


PROFILES = {"quick": Profile(canaries=10_000, repetitions=1_500), "full": Profile(canaries=20_000, repetitions=10_000)}

_PROBES = sum(len(experiment.probes) for experiment in EXPERIMENTS)


def _unwatched(part: str, steps: int) -> Callable[[int], None]:
    return lambda done: None


def audit_pipeline(
    plan: PrivacyPlan, repetitions: int, *, confidence: float = 0.95, seed: int | None = None, watch: Watch = _unwatched
) -> list[Finding]:
    """Run the one-run audit of ``plan``, whose dataset are the canaries, and every two-world experiment.

    ``seed`` is for tests and makes the one-run audit repeatable.

    Formal guarantees: if the pipeline keeps its claims, the probability that any bound exceeds its claim is at most
    1 − ``confidence``. Half of it is spent on the one-run audit; the probes share the other half.
    """
    require_in_open("confidence", confidence, 0, 1)
    require_integer("repetitions", repetitions, 8)
    error = 1 - confidence
    scores = trainer_scores(plan, seed=seed, advance=watch("one run", plan.steps))
    one_run = audit_one_run(scores, plan.dataset_size, plan.epsilon, plan.delta, confidence=1 - error / 2, seed=seed)
    findings = [one_run]
    for experiment in EXPERIMENTS:
        count = repetitions // experiment.plan.steps
        advance = watch(f"two worlds: {experiment.name}", 2 * count * experiment.plan.steps)
        findings += audit_experiment(experiment, count, confidence=1 - error / 2 / _PROBES, advance=advance)
    return findings


def audit_experiment(
    experiment: Experiment,
    repetitions: int,
    *,
    confidence: float = 0.95,
    advance: Callable[[int], None] = lambda steps: None,
) -> list[Finding]:
    """Run one two-world experiment on the library's own pipeline; each finding holds at ``confidence``."""
    mechanism = trainer_steps(experiment.plan, advance=advance)
    without, present = mechanism(False, repetitions), mechanism(True, repetitions)
    return [
        audit_two_worlds(without, present, probe, experiment.claim(probe), confidence=confidence) for probe in experiment.probes
    ]


def summary(findings: list[Finding], confidence: float) -> str:
    """The result of all audits in one line."""
    broken = [finding for finding in findings if finding.violated]
    sure = f"at {100 * confidence:.10g} % confidence for all audits together"
    if broken:
        shown = "; ".join(
            f"{finding.name}: ε is at least {finding.bound:.2f} at δ = {finding.delta:g}, claimed {finding.claim:.2f}"
            for finding in broken
        )
        return f"VIOLATION of the privacy claim, {sure}: {shown}"
    one_run, probes = findings[0], findings[1:]
    reach = "" if one_run.in_reach else f" (it can show {one_run.largest:.2f} at most, so this claim is out of its reach)"
    return (
        f"no violation found, {sure}: one run with {one_run.size:,} canaries shows ε ≥ {one_run.bound:.2f} of the claimed "
        f"{one_run.claim:.2f} at δ = {one_run.delta:g}{reach}; {len(probes)} two-world probes with up to {probes[0].size:,} "
        "repetitions stay within their claims"
    )
