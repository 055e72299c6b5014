"""``dp-microadam audit``: empirical privacy audit of the training pipeline."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dp_microadam.durable_files import write_text_durably
from dp_microadam.workbench.command_line.commands.running import INTERRUPTED
from dp_microadam.workbench.command_line.completers import complete_with, run_folders

if TYPE_CHECKING:
    from dp_microadam.plan.plan import PrivacyPlan
    from dp_microadam.workbench.audit.check import Check
    from dp_microadam.workbench.audit.finding import Finding

VIOLATED = 1
_PAGE = "audit.html"
_FINDINGS = "audit.json"
_DEFAULT_EPSILON = 1.0
_DEFAULT_STEPS = 4


Watch = Callable[[str, int], Callable[[int], None]]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "audit",
        help="empirical privacy audit: check and attack sampling, clipping, noise and optimizer",
        description="Audit the real training pipeline. Checks measure what the privacy proof assumes of each part; "
        "membership-inference attacks yield lower bounds on ε. Exit code 0 if no claim is refuted, 1 if one is. With a RUN "
        "that was trained with audit_canaries, attack its model instead.",
        epilog="examples:\n  dp-microadam audit --profile quick --epsilon 1 --out runs/audit\n"
        "  dp-microadam audit runs/mine    # trained with --set audit_canaries=1000",
    )
    complete_with(
        run_folders,
        parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN", help="audit this run, by the canaries in its data"),
    )
    parser.add_argument("--profile", choices=("quick", "full"), default="quick", help="size of the audit (default: quick)")
    parser.add_argument(
        "--only", choices=("checks", "attacks"), help="run only the checks of each part, or only the attacks on the whole"
    )
    parser.add_argument(
        "--epsilon", type=float, metavar="E", help=f"claimed ε of the one-run audit (default: {_DEFAULT_EPSILON:g})"
    )
    parser.add_argument("--noise-multiplier", type=float, metavar="S", help="instead of --epsilon or --steps")
    parser.add_argument("--steps", type=int, metavar="T", help=f"steps of the one-run audit (default: {_DEFAULT_STEPS})")
    parser.add_argument("--delta", type=float, default=1e-5, metavar="D", help="δ of the one-run audit (default: 1e-5)")
    parser.add_argument("--canaries", type=int, metavar="M", help="canaries of the one-run audit (default: by profile)")
    parser.add_argument(
        "--repetitions",
        type=int,
        metavar="R",
        help="repetitions with and without the target example, for one-step audits (default: by profile)",
    )
    parser.add_argument(
        "--confidence", type=float, default=0.95, metavar="P", help="confidence of all attacks together (default: 0.95)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default: a new one under runs/)")
    parser.add_argument("--quiet", action="store_true", help="do not show progress")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dp_microadam.errors import InputError
    from dp_microadam.validation import require_in_open, require_integer

    require_in_open("confidence", options.confidence, 0, 1)
    if options.run_dir is not None:
        return _audit_own_run(options)
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        raise InputError(f"out is {str(options.out)!r}, which is a file; it must be a folder")
    for name in ("canaries", "repetitions"):
        if getattr(options, name) is not None:
            require_integer(name, getattr(options, name), 100)

    # Imported once the input is known to be usable: torch takes seconds to load.
    from dp_microadam.training.run_folder import default_folder
    from dp_microadam.workbench.audit.mechanism_checks import check_mechanisms
    from dp_microadam.workbench.audit.page import audit_page
    from dp_microadam.workbench.audit.suite import PROFILES, summary

    profile = PROFILES[options.profile]
    plan = _plan(options, profile.canaries if options.canaries is None else options.canaries)
    repetitions = profile.repetitions if options.repetitions is None else options.repetitions
    try:
        with _progress(shown=not options.quiet) as watch:
            checks = [] if options.only == "attacks" else check_mechanisms(profile.checks, watch)
            findings = [] if options.only == "checks" else _attack(plan, repetitions, options.confidence, watch, checks)
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return INTERRUPTED
    line = summary(findings, options.confidence, checks)
    folder = default_folder("audit") if options.out is None else options.out
    folder.mkdir(parents=True, exist_ok=True)
    write_text_durably(folder / _PAGE, audit_page(findings, plan, options.confidence, line, checks))
    report = _report(findings, checks, plan, options.confidence, line)
    write_text_durably(folder / _FINDINGS, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    if options.json:
        print(json.dumps({**report, "page": str(folder / _PAGE)}, ensure_ascii=False))
    else:
        _print_checks(checks)
        _print_findings(findings)
        print(line)
        print(f"page {folder / _PAGE}")
    return VIOLATED if report["violated"] else 0


def _audit_own_run(options: argparse.Namespace) -> int:
    """Attack the model of a run by the canaries in its training data; writes ``audit.json`` into the run's folder."""
    from dp_microadam.accounting.costs import steps_alone
    from dp_microadam.errors import InputError
    from dp_microadam.ledger.ledger import read_ledger
    from dp_microadam.workbench.audit.own_run import CANNOT_SHOW, audit_own_run, canary_scores
    from dp_microadam.workbench.command_line.commands.running import open_run
    from dp_microadam.workbench.data.preparation import Preparation

    pipeline = ("epsilon", "noise_multiplier", "steps", "canaries", "repetitions", "only")
    given = [f"--{name.replace('_', '-')}" for name in pipeline if getattr(options, name) is not None]
    if given:
        raise InputError(
            f"{given[0]} is for audits of the pipeline; leave it out with a RUN, whose own plan and canaries count"
        )
    experiment = open_run(options.run_dir)
    if experiment.canaries is None:
        raise InputError(
            f"run {str(options.run_dir)!r} was trained without canaries; train with --set audit_canaries=1000 to audit it"
        )
    experiment.trainer.peek()  # loads the weights
    scores = canary_scores(experiment.model, experiment.canaries, Preparation(experiment.data))
    record = read_ledger(options.run_dir)
    found = audit_own_run(
        experiment.canaries.present, scores, steps_alone(record.spent), record.plan.delta, confidence=options.confidence
    )
    report = found.to_dict()
    folder = options.run_dir if options.out is None else options.out
    folder.mkdir(parents=True, exist_ok=True)
    write_text_durably(folder / _FINDINGS, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    if options.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print_findings([found.finding])
        print(found.summary())
        print("What this cannot show:")
        for item in CANNOT_SHOW:
            print(f"  - {item}")
    return VIOLATED if found.violated else 0


def _attack(plan: PrivacyPlan, repetitions: int, confidence: float, watch: Watch, checks: list[Check]) -> list[Finding]:
    """All attacks; none if the pipeline refuses to run and a check has said so."""
    from dp_microadam.errors import DPMicroAdamError
    from dp_microadam.workbench.audit.suite import audit_pipeline

    try:
        return audit_pipeline(plan, repetitions, confidence=confidence, watch=watch)
    except DPMicroAdamError:
        if not any(check.violated for check in checks):
            raise
        return []


def _plan(options: argparse.Namespace, canaries: int) -> PrivacyPlan:
    """The plan of the one-run audit: sample rate ½, and PLD, the tighter accountant, whose claim is easier to refute."""
    from dp_microadam.plan.plan import PrivacyPlan

    epsilon, steps, noise = options.epsilon, options.steps, options.noise_multiplier
    if steps is None and (epsilon is None or noise is None):
        steps = _DEFAULT_STEPS
    if epsilon is None and noise is None:
        epsilon = _DEFAULT_EPSILON
    return PrivacyPlan.solve(
        dataset_size=canaries,
        batch_size=(canaries + 1) // 2,
        delta=options.delta,
        epsilon=epsilon,
        noise_multiplier=noise,
        steps=steps,
        accountant="pld",
    )


def _report(findings: list[Finding], checks: list[Check], plan: PrivacyPlan, confidence: float, line: str) -> dict[str, Any]:
    from dp_microadam.workbench.audit.check import together

    return {
        "violated": any(finding.violated for finding in findings) or any(check.violated for check in checks),
        "summary": line,
        "confidence": confidence,
        "epsilon": plan.epsilon,
        "epsilon_bound": findings[0].bound if findings else None,
        "delta": plan.delta,
        "plan": plan.to_dict(),
        "findings": [finding.to_dict() for finding in findings],
        "checks": [check.to_dict() for check in checks],
        "false_alarm_of_checks": together(checks),
    }


def _print_checks(checks: list[Check]) -> None:
    """A line for each part, and one for each check that failed."""
    from rich.console import Console
    from rich.table import Table

    from dp_microadam.workbench.audit.check import in_words, range_in_words

    if not checks:
        return
    table = Table(title="Checks", title_justify="left")
    for name in ("part", "check", "result", "accepted"):
        table.add_column(name)
    for part in dict.fromkeys(check.part for check in checks):
        own = [check for check in checks if check.part == part]
        failed = [check for check in own if check.violated]
        table.add_row(part, f"{len(own)} checks", "VIOLATION" if failed else "all hold", "")
        for check in failed:
            told = f"{check.statistic}: {in_words(check.value)}" if check.size else f"{check.statistic}: {check.detail}"
            table.add_row("", check.name, told, range_in_words(check.low, check.high) if check.size else "")
    Console(highlight=False).print(table)


def _print_findings(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    from dp_microadam.workbench.reporting.formats import confidence_in_words

    if not findings:
        return
    table = Table(title="Attacks", title_justify="left")
    table.add_column("attack")
    for name in ("shown ε ≥", "claimed ε", "at δ", "largest possible", "confidence"):
        table.add_column(name, justify="right")
    for finding in findings:
        table.add_row(
            finding.name,
            f"{finding.bound:.2f}" + (" VIOLATION" if finding.violated else ""),
            f"{finding.claim:.2f}",
            f"{finding.delta:g}",
            f"{finding.largest:.2f}",
            confidence_in_words(finding.confidence),
        )
    Console(highlight=False).print(table)


@contextmanager
def _progress(*, shown: bool) -> Iterator[Watch]:
    """Progress on stderr: bars on a terminal, otherwise a line per part."""
    if not (shown and sys.stderr.isatty()):

        def watch(part: str, steps: int) -> Callable[[int], None]:
            if shown:
                print(f"{part}: {steps:,} steps", file=sys.stderr, flush=True)
            return lambda done: None

        yield watch
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bars:

        def add(part: str, steps: int) -> Callable[[int], None]:
            task = bars.add_task(part, total=steps)
            return lambda done: bars.advance(task, done)

        yield add
