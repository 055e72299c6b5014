"""Groups of processes on the loopback, for whoever tests what several of them do together."""

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from thoroughness import THOROUGH

# Before anything imports Triton: its kernels then run in its interpreter, on CPU tensors.
os.environ.setdefault("TRITON_INTERPRET", "1")

# ``make test`` runs the same examples every time; ``make test-all`` searches for others.
settings.register_profile("this run", derandomize=not THOROUGH)
settings.load_profile("this run")


@pytest.fixture(scope="session")
def start_group():
    """Starts processes that find each other on the loopback, as torchrun would: ``start_group(size, arguments of python)``."""

    def start(size, arguments):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        # What workers share with tests lies beside this file.
        shared["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent)]).lstrip(
            os.pathsep
        )
        return [
            subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(size)
        ]

    return start


@pytest.fixture(scope="session")
def run_group(start_group, tmp_path_factory):
    """Runs such a group to its end, once for all workers of pytest: ``run_group(name, size, script, …)`` gives its folder."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def run(name, size, script, *arguments):
        folder = root / f"{name}-{size}"
        with open(root / f"{name}-{size}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "errors").exists():
                folder.mkdir()
                processes = start_group(size, [script, folder, *arguments])
                errors = [process.communicate(timeout=500)[1] for process in processes]
                (folder / "errors").write_text("\n".join(errors) if any(process.returncode for process in processes) else "")
        assert not (folder / "errors").read_text()
        return folder

    return run
