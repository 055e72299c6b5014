"""Starts groups of cases from outside, where torch is already imported, and collects what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretend_cuda import run
from pretend_cuda.device import real_device

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src"


COMMAND = [sys.executable, "-W", "ignore", "-m"]


class NoDevice(Exception):
    """Why nothing could run, in a sentence."""


@dataclass(frozen=True)
class Outcome:
    """How a case went: its traceback or None, and what it returned."""

    case: str
    seconds: float
    error: str | None
    said: Any = None
    group: str = ""


def start(group: str, *names: str, sources: Path = SOURCES, timeout: float = 600) -> list[Outcome]:
    """Run the cases of a group, or those named, in one process, on the package found in ``sources``.

    A process that dies counts as a failure of a case of that name.

    Raises:
        NoDevice: if the pretend device cannot be compiled here.
    """
    command, environment = [*COMMAND, "pretend_cuda.run", group, *names], environment_of(sources)
    if group in run.INTERPRETED and real_device() is None:
        environment["TRITON_INTERPRET"] = "1"
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=TESTS, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return [Outcome("the process", timeout, f"took longer than {timeout} s")]
    if done.returncode == run.CANNOT_BUILD:
        raise NoDevice(done.stderr.strip())
    outcomes = [Outcome(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    if done.returncode and not any(outcome.error for outcome in outcomes):
        outcomes.append(Outcome("the process", 0.0, f"exit code {done.returncode}\n{done.stderr[-3000:]}"))
    return outcomes


def environment_of(*paths: Path) -> dict[str, str]:
    """This process's environment for one that uses the pretend device and finds its packages in ``paths``."""
    given = filter(None, [os.environ.get("PYTHONPATH")])
    # The tests switch Triton's interpreter on for themselves; here each group says whether it wants it.
    mine = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**mine, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*map(str, paths), str(TESTS), *given])}


class Nursery:
    """A process that runs cases on one copy of the project after the other, without importing torch each time.

    Raises:
        NoDevice: if the pretend device cannot be compiled here.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, "pretend_cuda.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment_of(),
            cwd=TESTS,
        )
        if not self._process.stdout.readline():
            raise NoDevice(self._process.communicate()[1].strip())

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()

    def run(self, sources: Path, groups: Sequence[Sequence[str]]) -> list[Outcome]:
        """Run groups of cases, each in a process of its own, up to the first that fails."""
        self._process.stdin.write(json.dumps({"sources": str(sources), "groups": groups}) + "\n")
        self._process.stdin.flush()
        outcomes = []
        while not (line := self._process.stdout.readline()).startswith('{"codes"'):
            assert line, "the process is gone"
            if line.startswith('{"case"'):
                outcomes.append(Outcome(**json.loads(line)))
        if any(json.loads(line)["codes"]) and not any(outcome.error for outcome in outcomes):
            outcomes.append(Outcome("the process", 0.0, f"ended with {json.loads(line)['codes']}"))
        return outcomes


def failures(outcomes: list[Outcome]) -> str:
    """The cases that failed with their tracebacks, or an empty string."""
    return "\n".join(f"{outcome.case}: {outcome.error}" for outcome in outcomes if outcome.error)
