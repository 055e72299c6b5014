"""``python -m research reproduce``: run an experiment of the paper, or one of your own, and report the results."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dp_microadam.errors import DPMicroAdamError
from dp_microadam.workbench.command_line.commands.running import INTERRUPTED
from dp_microadam.workbench.command_line.completers import complete_with, recipe_settings, study_names

if TYPE_CHECKING:
    from research.experiments.study import Study
    from research.experiments.sweep import SweepFolder

_EXAMPLE = """examples:
  python -m research reproduce  # list the studies
  python -m research reproduce sigma-sweep --scale cpu --estimate  # estimated hours on this machine
  python -m research reproduce sigma-sweep --scale cpu --seeds 1  # one run per cell, then tables and figures
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "reproduce",
        help="rerun an experiment of the paper: all its runs, tables and figures",
        description="Run a study: an experiment of the paper by name, or your own as a TOML file. Finished runs are skipped, "
        "interrupted runs are resumed, and failed runs are listed at the end and retried the next time.",
        epilog=_EXAMPLE,
    )
    name = parser.add_argument("name", nargs="?", metavar="NAME", help="name or TOML file of a study; without one, list them")
    complete_with(study_names, name)
    parser.add_argument(
        "--scale", choices=("paper", "cpu"), help="full size as in the paper (default), or scaled down for two CPU cores"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="independent runs per cell (default: as in the study)")
    parser.add_argument("--max-steps", type=int, metavar="N", help="stop every run after N steps, for a trial")
    parser.add_argument("--estimate", action="store_true", help="time a few steps, print the estimated hours, and run nothing")
    parser.add_argument(
        "--only", action="append", default=[], metavar="AXIS=LABEL", help="run only cells with this label; may be repeated"
    )
    override = parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="change one key of every recipe"
    )
    complete_with(recipe_settings, override)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for runs and results (default: reproductions/NAME-SCALE)"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="number of runs at a time (default: one per GPU, or one)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from dp_microadam.validation import require_integer
    from research.experiments.study import COST, load_study

    if options.name is None:
        return _list(options)
    overrides = list(options.overrides)
    if options.max_steps is not None:
        overrides.append(f"max_steps={require_integer('max_steps', options.max_steps, 1)}")
    whole = load_study(options.name, options.scale, overrides)
    study = whole.only(options.only)
    repeats = require_integer("seeds", study.repeats if options.seeds is None else options.seeds, 1)
    if options.jobs is not None:
        require_integer("jobs", options.jobs, 1)
    from research.experiments.sweep import SweepFolder

    try:
        if options.estimate:
            return _estimate(options, study, repeats)
        missing = study.missing_files()
        study = study.without(missing)
        for sentence, cells in missing.items():
            print(f"{len(cells)} of the {len(whole.cells)} cells are left out: {sentence}", file=sys.stderr)
        folder = SweepFolder(options.out or _default_folder(study, options))
        with folder.locked():
            folder.begin(whole, _command(options))
            done = _time(options, study, folder) if study.measure == COST else _train(options, study, folder, repeats)
            return done or (2 if missing else 0)
    except KeyboardInterrupt:
        print("stopped; run the same command again to continue", file=sys.stderr)
        return INTERRUPTED


def _list(options: argparse.Namespace) -> int:
    from research.experiments.study import known_studies, load_study

    studies = [load_study(name, scale) for name, scales in known_studies().items() for scale in scales]
    if options.json:
        keys = ("name", "scale", "title", "question")
        print(json.dumps([{key: getattr(one, key) for key in keys} | {"cells": len(one.cells)} for one in studies]))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Studies", title_justify="left")
    for column in ("name", "scale", "what", "cells", "seeds"):
        table.add_column(column, overflow="fold")
    for one in studies:
        table.add_row(one.name, one.scale, one.title, str(len(one.cells)), str(one.repeats))
    Console(highlight=False).print(table)
    return 0


def _estimate(options: argparse.Namespace, study: Study, repeats: int) -> int:
    from dp_microadam.workbench.command_line.estimate import CostEstimator

    estimator = CostEstimator(lambda text: print(text, file=sys.stderr))
    costs = [estimator.cost(cell) for cell in study.cells]
    hours = repeats * sum(cost.hours for cost in costs)
    if options.json:
        cells = [
            {"cell": cost.cell.labels, "steps": cost.steps, "seconds_per_step": cost.seconds_per_step, "hours": cost.hours}
            for cost in costs
        ]
        print(json.dumps({"hours": hours, "seeds": repeats, "cells": cells}))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title=study.title, title_justify="left")
    for column in ("cell", "steps", "s per step", "hours per run"):
        table.add_column(column, justify="left" if column == "cell" else "right")
    for cost in costs:
        table.add_row(cost.cell.description, f"{cost.steps:,}", f"{cost.seconds_per_step:.3g}", f"{cost.hours:.2f}")
    Console(highlight=False).print(table)
    seeds = "one run" if repeats == 1 else f"{repeats} runs"
    print(f"{hours:.1f} hours with {seeds} of each cell, one after the other; evaluation comes on top")
    return 0


def _train(options: argparse.Namespace, study: Study, folder: SweepFolder, repeats: int) -> int:
    from research.experiments.sweep import run_sweep

    display: _Display = _Lines() if options.json or not sys.stderr.isatty() else _Bar(study.title)
    with display.shown():
        failures = run_sweep(
            study, folder, repeats=repeats, devices=_devices(options.jobs), tell=display.tell, advance=display.advance
        )
    for failure in failures:
        print(f"failed: {failure.job.description}: {failure.reason} (full log in {failure.folder}.log)", file=sys.stderr)
    return _conclude(options, folder, len(failures))


def _time(options: argparse.Namespace, study: Study, folder: SweepFolder) -> int:
    """Measure the cost of a study's runs from a few steps each, instead of running them."""
    from dp_microadam.workbench.command_line.estimate import CostEstimator
    from research.experiments.sweep import jobs_of, provenance

    estimator = CostEstimator(lambda text: print(text, file=sys.stderr))
    failed = set()
    for job in jobs_of(study, repeats=1):
        if job.key in folder.done():
            continue
        cell = job.cell
        try:
            cost = estimator.cost(cell)
        except DPMicroAdamError as error:
            print(f"failed: {cell.description}: {error}", file=sys.stderr)
            failed.add(cell.key)
            continue
        value = cost.steps if cell.labels["quantity"] == "updates" else cost.hours
        folder.append({"cell": cell.labels, "repeat": 1, "run": cell.key, "value": value, **provenance()})
    return _conclude(options, folder, len(failed))


def _conclude(options: argparse.Namespace, folder: SweepFolder, failed: int) -> int:
    from research.experiments.page import write_sweep

    written = write_sweep(folder.path) if folder.results() else []
    if options.json:
        summary = {"out": str(folder.path), "results": len(folder.results()), "failed": failed}
        print(json.dumps({**summary, "written": [str(path) for path in written]}))
    else:
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
    words = ["dp-microadam", "reproduce", options.name]
    words += [f"--scale {options.scale}"] if options.scale else []
    words += [f"--seeds {options.seeds}"] if options.seeds else []
    words += [f"--max-steps {options.max_steps}"] if options.max_steps else []
    words += [f"--only {shlex.quote(one)}" for one in options.only]
    return " ".join(words)


class _Display(Protocol):
    def shown(self) -> Any: ...
    def tell(self, text: str) -> None: ...
    def advance(self, done: int, total: int) -> None: ...


class _Lines:
    """Progress without a terminal: a line per event, with the estimated time left."""

    def __init__(self) -> None:
        self._left = _TimeLeft()

    @contextmanager
    def shown(self) -> Iterator[None]:
        yield

    def tell(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def advance(self, done: int, total: int) -> None:
        self.tell(f"{done} of {total} runs{self._left.after(done, total)}")


class _Bar:
    """Progress on a terminal."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._left = _TimeLeft()
        self._bar = Progress(
            TextColumn("runs"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}"),
            console=Console(file=sys.stderr),
        )  # fmt: skip
        self._task = self._bar.add_task(title, total=None, left="")

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self._bar:
            yield

    def tell(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    def advance(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total, left=self._left.after(done, total).removeprefix(", "))


class _TimeLeft:
    """Estimated time left, from the runs that finished while this process was watching."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._first: int | None = None

    def after(self, done: int, total: int) -> str:
        if self._first is None:
            self._first = done
        if done == self._first or done == total:
            return ""
        minutes = (total - done) * (time.monotonic() - self._begin) / (done - self._first) / 60
        return f", about {minutes:.0f} min left"
