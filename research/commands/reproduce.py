"""``python -m research reproduce``: run an experiment of the paper, or one of your own, and report the results."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from dp_microadam.errors import DPMicroAdamError
from dp_microadam.workbench.command_line.running import INTERRUPTED

if TYPE_CHECKING:
    from research.experiments.study import Study
    from research.experiments.sweep import SweepFolder

_EXAMPLE = """examples:
  python -m research reproduce  # list the studies
  python -m research reproduce sigma-sweep --scale cpu --estimate  # estimated hours on this machine
  python -m research reproduce sigma-sweep --scale cpu --seeds 1  # one run per cell, then table and figures
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "reproduce",
        help="rerun an experiment of the paper: all its runs, tables and figures",
        description="Run a study: an experiment of the paper by name, or your own as a TOML file. Finished runs are skipped, "
        "interrupted runs are resumed, and failed runs are listed at the end and retried the next time.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="name or TOML file of a study; without one, list them")
    parser.add_argument(
        "--scale", choices=("paper", "cpu"), help="full size as in the paper (default), or scaled down for two CPU cores"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="independent runs per cell (default: as in the study)")
    parser.add_argument("--max-steps", type=int, metavar="N", help="stop every run after N steps, for a trial")
    parser.add_argument("--estimate", action="store_true", help="time a few steps, print the estimated hours, and run nothing")
    parser.add_argument(
        "--only", action="append", default=[], metavar="AXIS=LABEL", help="run only cells with this label; may be repeated"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="change one key of every recipe"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for runs and results (default: reproductions/NAME-SCALE)"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="number of runs at a time (default: one per GPU, or one)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dp_microadam.validation import require_integer
    from research.experiments.study import COST, load_study
    from research.experiments.sweep import SweepFolder, run_sweep
    from research.measuring import tell

    if options.name is None:
        return _list()
    overrides = list(options.overrides)
    if options.max_steps is not None:
        overrides.append(f"max_steps={require_integer('max_steps', options.max_steps, 1)}")
    whole = load_study(options.name, options.scale, overrides)
    study = whole.only(options.only)
    repeats = require_integer("seeds", study.repeats if options.seeds is None else options.seeds, 1)
    if options.jobs is not None:
        require_integer("jobs", options.jobs, 1)
    try:
        if options.estimate:
            return _estimate(study, repeats)
        folder = SweepFolder(options.out or _default_folder(study, options))
        with folder.locked():
            folder.begin(whole, _command(options))
            if study.measure == COST:
                failed = _time(study, folder)
            else:
                failures = run_sweep(study, folder, repeats=repeats, devices=_devices(options.jobs), tell=tell)
                for failure in failures:
                    tell(f"failed: {failure.job.description}: {failure.reason} (full log in {failure.folder}.log)")
                failed = len(failures)
            return _conclude(folder, failed)
    except KeyboardInterrupt:
        tell("stopped; run the same command again to continue")
        return INTERRUPTED


def _list() -> int:
    from research.experiments.study import known_studies, load_study

    studies = [load_study(name, scale) for name, scales in known_studies().items() for scale in scales]
    for one in studies:
        print(f"{one.name:18} {one.scale:6} {one.title}: {len(one.cells)} cells, {one.repeats} seeds")
    return 0


def _estimate(study: Study, repeats: int) -> int:
    from research.experiments.cost import CostEstimator
    from research.measuring import tell

    estimator = CostEstimator(tell)
    costs = [estimator.cost(cell) for cell in study.cells]
    hours = repeats * sum(cost.hours for cost in costs)
    for cost in costs:
        name = cost.cell.description
        print(f"{name}: {cost.steps:,} steps of {cost.seconds_per_step:.3g} s, {cost.hours:.2f} hours per run")
    print(f"{hours:.1f} hours with {repeats} of each cell, one after the other; evaluation comes on top")
    return 0


def _time(study: Study, folder: SweepFolder) -> int:
    """Measure the cost of a study's runs from a few steps each, instead of running them; returns how many failed."""
    from research.experiments.cost import CostEstimator
    from research.experiments.sweep import jobs_of
    from research.measuring import provenance, tell

    estimator = CostEstimator(tell)
    failed = 0
    for job in jobs_of(study, repeats=1):
        if job.key in folder.done():
            continue
        try:
            cost = estimator.cost(job.cell)
        except DPMicroAdamError as error:
            tell(f"failed: {job.cell.description}: {error}")
            failed += 1
            continue
        value = cost.steps if job.cell.labels["quantity"] == "updates" else cost.hours
        folder.append({"cell": job.cell.labels, "repeat": 1, "run": job.cell.key, "value": value, **provenance()})
    return failed


def _conclude(folder: SweepFolder, failed: int) -> int:
    from research.experiments.report import write_report

    written = write_report(folder.path) if folder.results() else []
    for path in written:
        print(path)
    if failed:
        print(f"{failed} runs failed; run the same command again to retry them")
    return 1 if failed else 0


def _default_folder(study: Study, options: argparse.Namespace) -> Path:
    """The folder of a study; runs shortened by --max-steps get their own."""
    cut = "" if options.max_steps is None else f"-{options.max_steps}-steps"
    return Path("reproductions") / f"{study.name}-{study.scale}{cut}"


def _devices(jobs: int | None) -> list[int | None]:
    import torch

    cards = torch.cuda.device_count()
    if not cards:
        return [None] * (jobs or 1)
    return [slot % cards for slot in range(jobs or cards)]


def _command(options: argparse.Namespace) -> str:
    words = ["python -m research reproduce", options.name]
    words += [f"--scale {options.scale}"] if options.scale else []
    words += [f"--seeds {options.seeds}"] if options.seeds else []
    words += [f"--max-steps {options.max_steps}"] if options.max_steps else []
    words += [f"--only {shlex.quote(one)}" for one in options.only]
    return " ".join(words)
