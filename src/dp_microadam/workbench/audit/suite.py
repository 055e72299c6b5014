"""All audits of the library's own training pipeline: planted faults, and attacks at a joint confidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.validation import require_in_open, require_integer
from dp_microadam.workbench.audit.one_run import audit_one_run, trainer_scores
from dp_microadam.workbench.audit.planted import PLANTED, plant
from dp_microadam.workbench.audit.statistics import Audit, Finding
from dp_microadam.workbench.audit.two_world import EXPERIMENTS, Experiment, audit_two_worlds, trainer_steps

CANNOT_SHOW = (
    "that the pipeline is private: a number below the claim only says that these attacks, at this size, found no more; the "
    "proof is the mathematics of clipping, noise and accounting",
    "a claim of ε = 8 by one run: with every guess right 10,000 canaries show 7.8 at most (δ = 1e-5), so audit a claim around "
    "1, with the same code",
    "a generator whose seed somebody knows, or what happens once in a thousand steps",
    "a model of yours in which examples interact, data seen before training, metrics shown on purpose, and timing",
)


@dataclass(frozen=True)
class Profile:
    """Size of an audit. Experiments of two steps get half the repetitions, which takes as long."""

    canaries: int
    repetitions: int


PROFILES = {"quick": Profile(10_000, 1_500), "full": Profile(20_000, 10_000)}

_PROBES = sum(len(experiment.probes) for experiment in EXPERIMENTS)


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
    reactions = []
    for fault in PLANTED:
        tell(f"planted: {fault}")
        reactions.append(plant(fault))
    tell(f"one run: {plan.dataset_size:,} canaries, {plan.steps:,} steps")
    scores = trainer_scores(plan, seed=seed)
    one_run = audit_one_run(scores, plan.dataset_size, plan.epsilon, plan.delta, confidence=1 - error / 2, seed=seed)
    probes: list[Finding] = []
    for experiment in EXPERIMENTS:
        count = repetitions // experiment.plan.steps
        tell(f"two worlds: {experiment.name}: {2 * count * experiment.plan.steps:,} steps")
        probes += audit_experiment(experiment, count, confidence=1 - error / 2 / _PROBES)
    refuted = [one for one in (one_run, *probes) if one.violated]
    missed = [f"planted and not caught: {one.fault} ({one.how})" for one in reactions if one.violated]
    sure = f"at {100 * confidence:.10g} % confidence for all attacks together"
    if refuted or missed:
        claims = [f"{one.name}: ε is at least {one.bound:.2f} at δ = {one.delta:g}, claimed {one.claim:.2f}" for one in refuted]
        summary = f"VIOLATION of the privacy claim, {sure}: {'; '.join(claims + missed)}"
    else:
        beyond = f" (it can show {one_run.largest:.2f} at most, so this claim is out of its reach)"
        reach = "" if one_run.claim < one_run.largest else beyond
        summary = (
            f"no violation found, {sure}: one run with {one_run.size:,} canaries shows ε ≥ {one_run.bound:.2f} of the claimed "
            f"{one_run.claim:.2f} at δ = {one_run.delta:g}{reach}; {len(probes)} two-world probes with up to "
            f"{probes[0].size:,} repetitions stay within their claims; {sum(one.caught for one in reactions)} of "
            f"{len(reactions)} planted faults are caught, the others cannot be seen"
        )
    more = {"plan": plan.to_dict(), "faults": [one._asdict() | {"violated": one.violated} for one in reactions]}
    return Audit((one_run, *probes), confidence, bool(refuted or missed), summary, CANNOT_SHOW, more)


def audit_experiment(experiment: Experiment, repetitions: int, *, confidence: float = 0.95) -> list[Finding]:
    """Run one two-world experiment on the library's own pipeline; each finding holds at ``confidence``."""
    mechanism = trainer_steps(experiment.plan)
    without, present = mechanism(False, repetitions), mechanism(True, repetitions)
    return [
        audit_two_worlds(without, present, probe, experiment.claim(probe), confidence=confidence) for probe in experiment.probes
    ]
