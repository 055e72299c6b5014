"""Timing on any device, and a file of measurements that can be sent to others.

Work on a GPU is only queued when a call returns: whoever reads a clock must wait for the device first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dp_microadam.durable_files import write_text_durably
from dp_microadam.errors import InputError


def finish(device: str | torch.device) -> None:
    """Wait until everything that was queued on the device has been computed."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def wall_clock(device: str | torch.device) -> float:
    """Seconds on the wall clock, read once the device has finished."""
    finish(device)
    return time.perf_counter()


def work_clock(device: str | torch.device) -> float:
    """Seconds of work: processor time on a CPU, which other processes disturb least, and the wall clock on a GPU."""
    return time.process_time() if torch.device(device).type == "cpu" else wall_clock(device)


def seconds(work: Callable[[], object], device: str | torch.device, clock: Callable[[Any], float] = work_clock) -> float:
    """How long ``work`` takes on the device."""
    begin = clock(device)
    work()
    return clock(device) - begin


def circumstances(device: str | torch.device) -> dict[str, Any]:
    """What a measurement depends on besides the program: machine, versions, commit; no names of hosts, users or folders."""
    found: dict[str, Any] = {
        **provenance(),
        "device": torch.device(device).type,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "gibibytes": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver(),
        }
    return found


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.splitlines()[0].strip() if shown.strip() else None


def require_new_file(path: Path) -> None:
    """Raise :class:`InputError` if the file exists already, or its folder does not."""
    if path.exists():
        raise InputError(f"{path} exists; name a new file, so that earlier measurements are kept")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is not a folder; name a file in one that exists")


def write_measurements(path: Path, name: str, device: str | torch.device, results: Any) -> None:
    """Write what was measured, and where, as JSON to a new file."""
    require_new_file(path)
    content = {"measured": name, **circumstances(device), "results": results}
    write_text_durably(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def tell(words: str) -> None:
    """Say on stderr what is being measured, so that nobody waits for minutes before a silent screen."""
    print(words, file=sys.stderr, flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that all benchmarks share."""
    there = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=there, help="cpu or cuda (default: cuda if there is a GPU)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write all measurements as JSON to this file, which can be sent"
    )


def deliver(options: argparse.Namespace, name: str, results: Any) -> None:
    """Write the file of ``--out``, if it was asked for."""
    if options.out:
        write_measurements(options.out, name, options.device, results)


def provenance() -> dict[str, str]:
    """Date, machine and code version of a result."""
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine(), "commit": commit()}


def machine() -> str:
    """Name of the GPU or CPU."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()}× {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} cores {_processor()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The git commit of a source checkout, marked dirty if there are local changes; otherwise the package version."""
    from dp_microadam import __version__

    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"],
            cwd=here, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
        tracked = subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return f"version {__version__}"
    return found.stdout.strip() if tracked.returncode == 0 else f"version {__version__}"
