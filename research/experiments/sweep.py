"""Runs a study: one process per run, several at a time. Failed and interrupted runs are picked up by the next call."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dp_microadam.durable_files import write_text_durably
from dp_microadam.errors import InputError
from dp_microadam.ledger.ledger import LEDGER_NAME
from dp_microadam.training.progress import Interruptible
from dp_microadam.training.run_folder import CHECKPOINTS, DECLARATION, METRICS, STATISTICS, search_folder
from research.experiments.report import EXPERIMENT, RESULTS, lines_of
from research.experiments.study import Cell, Study
from research.measuring import provenance

RUNS, LOCK = "runs", ".lock"
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """One run of a cell, with its number among the repeats."""

    cell: Cell
    repeat: int

    @property
    def description(self) -> str:
        return f"{self.cell.description}, run {self.repeat}"

    @property
    def key(self) -> tuple[str, int, str]:
        return self.cell.key, self.repeat, json.dumps(self.cell.labels)


@dataclass(frozen=True)
class Failure:
    """A run that ended without a result, and the last line of its log."""

    job: Job
    folder: Path
    reason: str


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[str]
    device: int
    began: float


class SweepFolder:
    """The folder of a study's runs and results.

    ``runs/KEY/REPEAT`` is a run folder, and ``results.jsonl`` has a line per finished run. The key depends only on what the
    recipe trains, so that studies in the same folder share runs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def run_folder(self, job: Job) -> Path:
        return self.path / RUNS / job.cell.key / str(job.repeat)

    def begin(self, study: Study, command: str) -> None:
        """Write ``experiment.json`` with all cells of the study; reports show those without results as not run."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text_durably(self.path / EXPERIMENT, json.dumps(study.describe(command), indent=2, ensure_ascii=False) + "\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder.

        Raises:
            InputError: if another process works on this folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / LOCK, "w", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"out is {str(self.path)!r}, where another sweep is at work; name another") from None
            yield

    def results(self) -> list[dict[str, Any]]:
        """Results of finished runs. A line cut off by a crash is skipped, and its run is collected again."""
        return list(lines_of(self.path / RESULTS))

    def done(self) -> set[tuple[str, int, str]]:
        """Keys of the jobs that have a result."""
        return {(line["run"], line["repeat"], json.dumps(line["cell"])) for line in self.results()}

    def append(self, line: dict[str, Any]) -> None:
        """Add the result of a run."""
        path = self.path / RESULTS
        torn = path.exists() and not path.read_text("utf-8").endswith("\n") and path.stat().st_size > 0
        with open(path, "a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def jobs_of(study: Study, repeats: int) -> list[Job]:
    """All runs of a study, the first repeat of every cell first, so that an interrupted sweep covers all cells."""
    return [Job(cell, repeat) for repeat in range(1, repeats + 1) for cell in study.cells]


def run_sweep(
    study: Study,
    folder: SweepFolder,
    *,
    repeats: int,
    devices: Sequence[int | None],
    tell: Callable[[str], None],
) -> list[Failure]:
    """Run the jobs without a result, one at a time per device, and return those that failed.

    Interrupted runs are resumed. ``devices`` are CUDA indices, or None for the CPU.
    """
    jobs = jobs_of(study, repeats)
    done = folder.done()
    waiting = [job for job in jobs if job.key not in done]
    if len(waiting) < len(jobs):
        tell(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are done already")
    free = list(range(len(devices)))
    running: list[_Running] = []
    failures: list[Failure] = []
    with Interruptible(shown=False) as interruption:
        while waiting or running:
            if interruption.requested:
                tell("stopping the runs at their next step")
                _stop(running)
                raise KeyboardInterrupt
            while waiting and free:
                running.append(_start(waiting.pop(0), folder, devices, free.pop(0)))
                tell(f"began {running[-1].job.description}")
            time.sleep(_POLL_SECONDS)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                free.append(one.device)
                failure = _collect(one, folder, tell)
                failures += [failure] if failure else []
                tell(f"{len(jobs) - len(waiting) - len(running)} of {len(jobs)} runs")
    return failures


def _stop(running: Sequence[_Running]) -> None:
    for one in running:
        one.process.send_signal(signal.SIGINT)
    for one in running:
        one.process.wait()


def collect_line(job: Job, folder: SweepFolder, result: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The line of ``results.jsonl`` for a finished run."""
    run = folder.run_folder(job)
    final = result.get("final_weights_test_accuracy")
    return {
        "cell": job.cell.labels,
        "repeat": job.repeat,
        "run": job.cell.key,
        "value": 100 * result["test_accuracy"],
        **({} if final is None else {"final_weights": 100 * final}),
        "epsilon": result["epsilon"],
        "delta": result["delta"],
        "private": result["private"],
        "steps": result["updates"],
        "parameters": json.loads((run / STATISTICS).read_text("utf-8"))["parameters"],
        "seconds": round(seconds, 1),
        "folder": str(run.relative_to(folder.path)),
        "curve": _curve(run / METRICS),
        **provenance(),
    }


def _start(job: Job, folder: SweepFolder, devices: Sequence[int | None], slot: int) -> _Running:
    run = folder.run_folder(job)
    run.parent.mkdir(parents=True, exist_ok=True)
    if (run / LEDGER_NAME).exists() or (run / CHECKPOINTS).is_dir() or (search_folder(run) / DECLARATION).exists():
        arguments = ["resume", str(run)]
    else:
        recipe = run.with_suffix(".toml")
        write_text_durably(recipe, job.cell.recipe.to_toml())
        arguments = ["tune" if job.cell.recipe.tune else "train", str(recipe), "--run-dir", str(run)]
    environment = dict(os.environ)
    if devices[slot] is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(devices[slot])
    elif len(devices) > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(devices))))
    with open(run.with_suffix(".log"), "a", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dp_microadam", *arguments, "--json", "--quiet"],
            stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True, env=environment,
            process_group=0,  # Ctrl-C reaches only the sweep, which forwards it once: a second one would kill the run
        )  # fmt: skip
    return _Running(job, process, slot, time.monotonic())


def _collect(one: _Running, folder: SweepFolder, tell: Callable[[str], None]) -> Failure | None:
    assert one.process.stdout is not None
    output = one.process.stdout.read()
    seconds = time.monotonic() - one.began
    run = folder.run_folder(one.job)
    try:
        result = json.loads(output)
    except ValueError:
        result = None
    if one.process.returncode != 0 or result is None or not result["finished"]:
        failure = Failure(one.job, run, _last_line(run.with_suffix(".log"), one.process.returncode))
        tell(f"failed {one.job.description}: {failure.reason}")
        return failure
    folder.append(collect_line(one.job, folder, result, seconds))
    tell(f"done {one.job.description}: {100 * result['test_accuracy']:.2f} % in {seconds:.0f} s")
    return None


def _last_line(log: Path, code: int) -> str:
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"it ended with exit code {code} and an empty log"


def _curve(metrics: Path) -> list[list[float]]:
    """Step, validation loss and validation accuracy of every evaluation."""
    if not metrics.exists():
        return []
    points = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    return [[one["step"], one["validation_loss"], one.get("validation_accuracy")] for one in points if "validation_loss" in one]
