"""Starts groups of cases from outside, where torch is already imported, and collects what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretend_cuda import run

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src"


class NoDevice(Exception):
    """Why nothing could run, in a sentence."""


@dataclass(frozen=True)
class Outcome:
    """How a case went: its traceback or None, and what it returned."""

    case: str
    seconds: float
    error: str | None
    said: Any


def start(group: str, *names: str, sources: Path = SOURCES, timeout: float = 600) -> list[Outcome]:
    """Run the cases of a group, or those named, in one process, on the package found in ``sources``.

    A process that dies counts as a failure of a case of that name.

    Raises:
        NoDevice: if the pretend device cannot be compiled here.
    """
    paths = [str(sources), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", "-m", "pretend_cuda.run", group, *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=TESTS, timeout=timeout)
    except subprocess.TimeoutExpired:
        return [Outcome("the process", timeout, f"took longer than {timeout} s", None)]
    if done.returncode == run.CANNOT_BUILD:
        raise NoDevice(done.stderr.strip())
    outcomes = [Outcome(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    if done.returncode and not any(outcome.error for outcome in outcomes):
        outcomes.append(Outcome("the process", 0.0, f"exit code {done.returncode}\n{done.stderr[-3000:]}", None))
    return outcomes


def failures(outcomes: list[Outcome]) -> str:
    """The cases that failed with their tracebacks, or an empty string."""
    return "\n".join(f"{outcome.case}: {outcome.error}" for outcome in outcomes if outcome.error)
