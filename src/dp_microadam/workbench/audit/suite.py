"""All audits of the library's own training pipeline, at a joint confidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.validation import require_in_open, require_integer
from dp_microadam.workbench.audit.finding import Finding
from dp_microadam.workbench.audit.one_run import audit_one_run, trainer_scores
from dp_microadam.workbench.audit.planted import PLANTED, Reaction, plant_all
from dp_microadam.workbench.audit.two_world import EXPERIMENTS, Experiment, audit_two_worlds, trainer_steps


@dataclass(frozen=True)
class Profile:
    """Size of an audit. Experiments of two steps get half the repetitions, which takes as long."""

    canaries: int
    repetitions: int


PROFILES = {"quick": Profile(10_000, 1_500), "full": Profile(20_000, 10_000)}

_PROBES = sum(len(experiment.probes) for experiment in EXPERIMENTS)


@dataclass(frozen=True)
class Audit:
    """The result: all attacks, the first of which is the one-run audit of ``plan``, and what became of planted faults."""

    plan: PrivacyPlan
    confidence: float
    findings: tuple[Finding, ...]
    reactions: tuple[Reaction, ...]

    @property
    def violated(self) -> bool:
        """Whether a claim is refuted, or a fault went through that should have been caught."""
        return any(one.violated for one in self.findings) or any(one.violated for one in self.reactions)

    def to_dict(self) -> dict[str, Any]:
        """All but the scores, for JSON."""
        return {
            "violated": self.violated,
            "summary": self.summary(),
            "confidence": self.confidence,
            "epsilon": self.plan.epsilon,
            "epsilon_bound": self.findings[0].bound,
            "delta": self.plan.delta,
            "plan": self.plan.to_dict(),
            "findings": [finding.to_dict() for finding in self.findings],
            "faults": [asdict(one) | {"violated": one.violated} for one in self.reactions],
        }

    def summary(self) -> str:
        """The result in one line."""
        sure = f"at {100 * self.confidence:.10g} % confidence for all attacks together"
        if self.violated:
            claims = [
                f"{one.name}: ε is at least {one.bound:.2f} at δ = {one.delta:g}, claimed {one.claim:.2f}"
                for one in self.findings
                if one.violated
            ]
            faults = [f"{one.fault}: {one.how}" for one in self.reactions if one.violated]
            return f"VIOLATION of the privacy claim{f', {sure}' if claims else ''}: {'; '.join(claims + faults)}"
        one_run, *probes = self.findings
        reach = "" if one_run.in_reach else f" (it can show {one_run.largest:.2f} at most, so this claim is out of its reach)"
        return (
            f"no violation found, {sure}: one run with {one_run.size:,} canaries shows ε ≥ {one_run.bound:.2f} of the claimed "
            f"{one_run.claim:.2f} at δ = {one_run.delta:g}{reach}; {len(probes)} two-world probes with up to "
            f"{probes[0].size:,} repetitions stay within their claims; {sum(one.caught for one in self.reactions)} of "
            f"{len(self.reactions)} planted faults are caught, the others cannot be seen"
        )


def audit_pipeline(
    plan: PrivacyPlan,
    repetitions: int,
    *,
    confidence: float = 0.95,
    seed: int | None = None,
    tell: Callable[[str], None] = lambda part: None,
) -> Audit:
    """Plant all faults, run the one-run audit of ``plan``, whose dataset are the canaries, and every two-world experiment.

    ``seed`` is for tests and makes the one-run audit repeatable. ``tell`` is called with the name of each part that begins.

    Formal guarantees: if the pipeline keeps its claims, the probability that any bound exceeds its claim is at most
    1 − ``confidence``. Half of it is spent on the one-run audit; the probes share the other half.
    """
    require_in_open("confidence", confidence, 0, 1)
    require_integer("repetitions", repetitions, 8)
    error = 1 - confidence
    tell(f"planted faults: {len(PLANTED)} runs")
    reactions = plant_all(PLANTED)
    tell(f"one run: {plan.dataset_size:,} canaries, {plan.steps:,} steps")
    scores = trainer_scores(plan, seed=seed)
    findings = [audit_one_run(scores, plan.dataset_size, plan.epsilon, plan.delta, confidence=1 - error / 2, seed=seed)]
    for experiment in EXPERIMENTS:
        count = repetitions // experiment.plan.steps
        tell(f"two worlds: {experiment.name}: {2 * count * experiment.plan.steps:,} steps")
        findings += audit_experiment(experiment, count, confidence=1 - error / 2 / _PROBES)
    return Audit(plan, confidence, tuple(findings), tuple(reactions))


def audit_experiment(experiment: Experiment, repetitions: int, *, confidence: float = 0.95) -> list[Finding]:
    """Run one two-world experiment on the library's own pipeline; each finding holds at ``confidence``."""
    mechanism = trainer_steps(experiment.plan)
    without, present = mechanism(False, repetitions), mechanism(True, repetitions)
    return [
        audit_two_worlds(without, present, probe, experiment.claim(probe), confidence=confidence) for probe in experiment.probes
    ]
