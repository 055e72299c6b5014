"""All audits of the library's own training pipeline, at a joint confidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.validation import require_in_open, require_integer
from dp_microadam.workbench.audit.check import Check, in_words, range_in_words, together
from dp_microadam.workbench.audit.finding import Finding
from dp_microadam.workbench.audit.mechanism_checks import CheckSizes, Watch, unwatched
from dp_microadam.workbench.audit.one_run import audit_one_run, trainer_scores
from dp_microadam.workbench.audit.probes import EXPERIMENTS, Experiment
from dp_microadam.workbench.audit.two_world import audit_two_worlds, trainer_steps


@dataclass(frozen=True)
class Profile:
    """Size of an audit. Experiments of two steps get half the repetitions, which takes as long."""

    canaries: int
    repetitions: int
    checks: CheckSizes


PROFILES = {
    "quick": Profile(10_000, 1_500, CheckSizes(sampler_steps=60, sampled_steps=200, noise_steps=40, draws=25_000)),
    "full": Profile(20_000, 10_000, CheckSizes(sampler_steps=400, sampled_steps=1_000, noise_steps=400, draws=300_000)),
}

_MOST_NAMED = 5
"""Failed checks that the one line names; all of them are in the table, the page and the JSON."""

_PROBES = sum(len(experiment.probes) for experiment in EXPERIMENTS)


def audit_pipeline(
    plan: PrivacyPlan, repetitions: int, *, confidence: float = 0.95, seed: int | None = None, watch: Watch = unwatched
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


def summary(findings: Sequence[Finding], confidence: float, checks: Sequence[Check] = ()) -> str:
    """The result of all attacks and checks in one line."""
    failed = [check for check in checks if check.violated]
    broken = [finding for finding in findings if finding.violated]
    sure = f"at {100 * confidence:.10g} % confidence for all attacks together"
    seldom = f"false alarms {false_alarms(checks)} for all checks together"
    if failed or broken:
        claims = [
            f"{finding.name}: ε is at least {finding.bound:.2f} at δ = {finding.delta:g}, claimed {finding.claim:.2f}"
            for finding in broken
        ]
        promises = [_failed(check) for check in failed[:_MOST_NAMED]]
        promises += [f"and {len(failed) - _MOST_NAMED} more"] * (len(failed) > _MOST_NAMED)
        shown = [f"{sure}: {'; '.join(claims)}"] * bool(claims) + [f"by checks ({seldom}): {'; '.join(promises)}"] * bool(
            failed
        )
        return f"VIOLATION of the privacy claim, {', and '.join(shown)}"
    held = f"{len(checks)} checks of sampling, clipping, noise and accounting hold ({seldom})"
    if not findings:
        return f"no violation found: {held}"
    one_run, probes = findings[0], findings[1:]
    reach = "" if one_run.in_reach else f" (it can show {one_run.largest:.2f} at most, so this claim is out of its reach)"
    return (
        f"no violation found, {sure}: one run with {one_run.size:,} canaries shows ε ≥ {one_run.bound:.2f} of the claimed "
        f"{one_run.claim:.2f} at δ = {one_run.delta:g}{reach}; {len(probes)} two-world probes with up to {probes[0].size:,} "
        "repetitions stay within their claims" + (f"; {held}" if checks else "")
    )


def false_alarms(checks: Sequence[Check]) -> str:
    """How probable it is at most that any check accuses an honest pipeline."""
    return f"below {together(checks):.1g}" if together(checks) else "impossible"


def _failed(check: Check) -> str:
    where = f" ({check.detail})" if check.detail else ""
    if not check.size:
        return f"{check.name}: {check.statistic}{where}"
    return f"{check.name}: {check.statistic} is {in_words(check.value)}, not {range_in_words(check.low, check.high)}{where}"
