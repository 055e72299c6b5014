"""Commands of a journey: each is printed, run and timed."""

from __future__ import annotations

import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TOOK: list[tuple[str, float, float]] = []


def command(*words: object, show: bool = True) -> str:
    """Run ``dp-microadam``, or a Python script, by this interpreter; returns what it printed. A failure ends the journey."""
    told = [str(word) for word in words]
    script = told[0].endswith(".py")
    line = shlex.join(["python", *told] if script else ["dp-microadam", *told])
    print(f"\n$ {line if len(line) < 200 else line[:197] + '…'}", flush=True)
    with timed(Path(told[0]).name if script else " ".join(["dp-microadam", *told[: 2 if told[0] == "data" else 1]])):
        started = [sys.executable, *(() if script else ("-m", "dp_microadam")), *told]
        done = subprocess.run(started, stdout=subprocess.PIPE, text=True, check=False)
        if show:
            print(done.stdout, end="")
    if done.returncode:
        raise SystemExit(f"{line} ended with exit code {done.returncode}")
    return done.stdout


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Print how long something took, and remember it for :func:`print_times`."""
    start, processor = time.perf_counter(), _processor_seconds()
    yield
    seconds, used = time.perf_counter() - start, _processor_seconds() - processor
    _TOOK.append((name, seconds, used))
    print(f"  {name} took {seconds:.1f} s, {used:.1f} s of processor time", flush=True)


def _processor_seconds() -> float:
    """What this process and those that it waited for have used: on a shared machine the better measure."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def print_times() -> None:
    """How long each part of the journey took, and all of it."""
    print("\n seconds  processor")
    total = ("all together", sum(one[1] for one in _TOOK), sum(one[2] for one in _TOOK))
    for name, seconds, processor in (*_TOOK, total):
        print(f"{seconds:8.1f}  {processor:9.1f}  {name}")
