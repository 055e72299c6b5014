"""``dp-microadam audit``: empirical privacy audit of the training pipeline."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dp_microadam.durable_files import write_text_durably
from dp_microadam.workbench.command_line.arguments import add_json, add_run
from dp_microadam.workbench.command_line.running import INTERRUPTED, print_table

if TYPE_CHECKING:
    from dp_microadam.workbench.audit.statistics import Audit

VIOLATED = 1
_PAGE = "audit.html"
_DEFAULT_EPSILON = 1.0
_DEFAULT_STEPS = 4


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "audit",
        help="empirical privacy audit: attack sampling, clipping, noise and optimizer",
        description="Audit the real training pipeline: membership-inference attacks yield lower bounds on ε. Exit code 0 if no "
        "claim is refuted, else 1. With a RUN that was trained with audit_canaries, attack its model instead.",
        epilog="examples:\n  dp-microadam audit --profile quick --epsilon 1 --out runs/audit\n"
        "  dp-microadam audit runs/mine    # trained with --set audit_canaries=1000",
    )
    add_run(parser, nargs="?", help="audit this run, by the canaries in its data")
    parser.add_argument("--profile", choices=("quick", "full"), default="quick", help="size of the audit (default: quick)")
    for name, kind, letter, what in (
        ("--epsilon", float, "E", f"claimed ε of the one-run audit (default: {_DEFAULT_EPSILON:g})"),
        ("--steps", int, "T", f"steps of the one-run audit (default: {_DEFAULT_STEPS})"),
        ("--canaries", int, "M", "canaries of the one-run audit (default: by profile)"),
        ("--repetitions", int, "R", "repetitions with and without the target example (default: by profile)"),
    ):
        parser.add_argument(name, type=kind, metavar=letter, help=what)
    parser.add_argument("--delta", type=float, default=1e-5, metavar="D", help="δ of the one-run audit (default: 1e-5)")
    parser.add_argument(
        "--confidence", type=float, default=0.95, metavar="P", help="confidence of all attacks together (default: 0.95)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default: a new one under runs/)")
    parser.add_argument("--quiet", action="store_true", help="do not show progress")
    add_json(parser)
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
    from dp_microadam.plan.plan import PrivacyPlan
    from dp_microadam.training.run_folder import default_folder
    from dp_microadam.workbench.audit.suite import PROFILES, audit_pipeline

    def tell(part: str) -> None:
        if not options.quiet:
            print(part, file=sys.stderr, flush=True)

    profile = PROFILES[options.profile]
    canaries = options.canaries or profile.canaries
    # Sample rate ½, and PLD, the tighter accountant, whose claim is easier to refute.
    plan = PrivacyPlan.solve(
        dataset_size=canaries,
        batch_size=(canaries + 1) // 2,
        delta=options.delta,
        epsilon=_DEFAULT_EPSILON if options.epsilon is None else options.epsilon,
        steps=_DEFAULT_STEPS if options.steps is None else options.steps,
        accountant="pld",
    )
    folder = default_folder("audit") if options.out is None else options.out
    folder.mkdir(parents=True, exist_ok=True)  # where it cannot be, the attacks would be in vain
    try:
        audit = audit_pipeline(plan, options.repetitions or profile.repetitions, confidence=options.confidence, tell=tell)
    except KeyboardInterrupt:
        print("stopped; no result was written", file=sys.stderr)
        return INTERRUPTED
    return _conclude(audit, folder, options, page=True)


def _audit_own_run(options: argparse.Namespace) -> int:
    """Attack the model of a run by the canaries in its training data; writes ``audit.json`` into the run's folder."""
    from dp_microadam.accounting.costs import steps_alone
    from dp_microadam.errors import InputError
    from dp_microadam.ledger.ledger import read_ledger
    from dp_microadam.workbench.audit.own_run import audit_own_run, canary_scores
    from dp_microadam.workbench.command_line.running import open_run
    from dp_microadam.workbench.data import Preparation

    for name in ("epsilon", "steps", "canaries", "repetitions"):
        if getattr(options, name) is not None:
            raise InputError(
                f"--{name.replace('_', '-')} is for audits of the pipeline; leave it out with a RUN, whose own plan and "
                "canaries count"
            )
    experiment = open_run(options.run_dir)
    if experiment.canaries is None:
        raise InputError(
            f"run {str(options.run_dir)!r} was trained without canaries; train with --set audit_canaries=1000 to audit it"
        )
    folder = options.run_dir if options.out is None else options.out
    folder.mkdir(parents=True, exist_ok=True)
    experiment.trainer.peek()  # loads the weights
    with experiment.best_weights():
        scores = canary_scores(experiment.model, experiment.canaries, Preparation(experiment.data))
    record = read_ledger(options.run_dir)
    found = audit_own_run(
        experiment.canaries.present, scores, steps_alone(record.spent), record.plan.delta, confidence=options.confidence
    )
    return _conclude(found, folder, options, page=False)


def _conclude(audit: Audit, folder: Path, options: argparse.Namespace, *, page: bool) -> int:
    """Write ``audit.json``, and a ``page`` of its own, and print what was found; returns the exit code."""
    from dp_microadam.workbench.reporting.report import write_report
    from dp_microadam.workbench.reporting.tables import confidence_in_words

    report = audit.to_dict()
    write_text_durably(folder / "audit.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    besides = {"page": str(write_report([folder], folder / _PAGE, files=False)[0])} if page else {}
    if options.json:
        print(json.dumps({**report, **besides}, ensure_ascii=False))
        return VIOLATED if audit.violated else 0
    header = ("attack", "shown ε ≥", "claimed ε", "at δ", "largest possible", "confidence")
    rows = [
        (
            one.name,
            f"{one.bound:.2f}" + (" VIOLATION" if one.violated else ""),
            f"{one.claim:.2f}",
            f"{one.delta:g}",
            f"{one.largest:.2f}",
            confidence_in_words(one.confidence),
        )
        for one in audit.findings
    ]
    if faults := report.get("faults"):
        verdicts = {True: "caught", False: "cannot be seen"}
        print_table(
            "Planted faults",
            ("fault", "found"),
            [(one["fault"], "VIOLATION" if one["violated"] else verdicts[one["caught"]]) for one in faults],
            "",
        )
    print_table("Attacks", header, rows, audit.summary, f"This cannot show {audit.cannot_show[0]}.")
    for page_of_its_own in besides.values():
        print(f"page {page_of_its_own}")
    return VIOLATED if audit.violated else 0
