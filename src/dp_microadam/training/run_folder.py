"""The folder of a run: names of its files, functions that read them, results and statistics.

Formal guarantees: sizes of parameters and optimizer state do not depend on the data. Time and peak memory are side effects of
the computation, which the guarantee does not cover: they depend slightly on the realised batch sizes. They are therefore
stored with two digits only, and time only as a mean over the steps between two evaluations, at least four. The duration of a
single step is in no file.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.durable_files import write_text_durably
from dp_microadam.errors import DPMicroAdamError, InputError
from dp_microadam.ledger.ledger import LEDGER_NAME, discard_unspent, read_ledger
from dp_microadam.ledger.statement import privacy_report
from dp_microadam.plan.plan import PrivacyPlan

CONFIG = "config.toml"
SELECTION = "selection.json"
"""In the folder of a run that a search published: what the search declared, and which hyperparameters it chose."""
DECLARATION = "declaration.json"
METRICS = "metrics.jsonl"
LOG = "log.txt"
CURVES = "curves.png"
CHECKPOINTS = "checkpoints"
EVENTS = "tensorboard"
PRIVATE_METRICS_SHOWN = "private_metrics_shown.txt"
STATISTICS = "run.json"
TEST = "test.json"
OPTIMIZER_STATE, ADAM_STATE = "optimizer_state_bytes", "adam_state_bytes"
NOISE_MEMORY = "noise_memory_bytes"


def default_folder(name: str) -> Path:
    """A new folder under ``runs/``, named after the recipe and the time."""
    return Path("runs") / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def refuse_existing(path: Path) -> None:
    """Check that a new run can begin in ``path``.

    Raises:
        InputError: if ``path`` exists, unless it is an empty folder or the folder of a run that never trained; or if a search
            will publish there.
    """
    if (search_folder(path) / DECLARATION).exists():
        raise InputError(
            f"run_dir is {str(path)!r}, where a search will publish its best run; use a new folder, or go on with the search: "
            f"dp-microadam resume {path}"
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())) and not never_trained(path):
        raise InputError(
            f"run_dir is {str(path)!r}, which exists already; use a new folder, or go on with: {how_to_go_on(path)}"
        )


def search_folder(path: Path) -> Path:
    """The folder in which a search keeps its runs until it publishes the best one as ``path``."""
    return path.with_name(f"{path.name}.unpublished")


def declared_search(path: Path) -> str | None:
    """The recipe of a search that will publish its best run as ``path``; None if there is no such search.

    Raises:
        InputError: if the search was started from Python.
    """
    declaration = search_folder(path) / DECLARATION
    if not declaration.is_file():
        return None
    config: str | None = json.loads(declaration.read_text(encoding="utf-8"))["config"]
    if config is None:
        raise InputError(
            f"run is {str(path)!r}, where a search from Python will publish; go on with it there: call fit of the same search"
        )
    return config


def never_trained(path: Path) -> bool:
    """Whether a run began in this folder and was killed before its first checkpoint, with no step recorded.

    The first checkpoint is written before the first step, so such a run has nothing to resume and has spent nothing.
    """
    if not path.is_dir() or any(path.glob(f"{CHECKPOINTS}/*.ckpt")) or (path / METRICS).exists():
        return False
    if not (path / LEDGER_NAME).exists():
        left = [entry.name for entry in path.iterdir()]
        return bool(left) and all(name.startswith(LEDGER_NAME) and name.endswith(".unfinished") for name in left)
    try:
        return read_ledger(path).steps == 0
    except DPMicroAdamError:
        return False


def how_to_go_on(path: Path) -> str:
    """The command that resumes a run: on the command line for recipes; in Python for runs that need model and data again."""
    return f"dp-microadam resume {path}" if (path / CONFIG).is_file() else f"trainer.resume({str(path)!r}).fit(data)"


def privacy_of(path: Path, group_size: int = 1) -> dict[str, Any]:
    """The current privacy report of the run in this folder, computed from its ledger; with ε for a group, if it has a size."""
    report = privacy_report(read_ledger(path), group_size=group_size)
    if (path / PRIVATE_METRICS_SHOWN).exists():
        report["outside_the_guarantee"].append(
            "loss and accuracy on training batches, which this run showed; they also reveal how large the batches were"
        )
    return report


def note_private_metrics(path: Path) -> None:
    """Record that the run showed metrics of its training batches, so that its privacy statement says so."""
    write_text_durably(path / PRIVATE_METRICS_SHOWN, "This run showed loss and accuracy on training batches.\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All metrics of the run in this folder so far, without lines that a crash left incomplete."""
    file = path / METRICS
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def create_folder(path: Path) -> None:
    """Create a run's folder; an existing folder that is not empty is refused, unless its run never trained."""
    refuse_existing(path)
    path.mkdir(parents=True, exist_ok=True)
    if (path / LEDGER_NAME).exists():
        discard_unspent(path)


@dataclass(frozen=True)
class StepReport:
    """The argument of callbacks, after each step. In a private run all of it is public.

    ``metrics`` are those of validation data after this step, if there was an evaluation; ``expected_batch`` is the mean size of
    a batch, whose real one is private.
    """

    step: int
    steps: int
    expected_batch: int
    plan: PrivacyPlan | None
    learning_rate: float
    metrics: dict[str, float] | None
    resumed_at: tuple[int, ...] = ()

    @cached_property
    def epsilon(self) -> float | None:
        """ε spent so far, computed when it is first read; None without privacy."""
        return None if self.plan is None else self.plan.epsilon_after(self.step, self.resumed_at)


@dataclass(frozen=True)
class RunResult:
    """The result of ``PrivateTrainer.fit``.

    ``steps_done`` steps were spent, and ``updates`` of them are in the weights: fewer, if steps were lost in a crash.
    """

    run_dir: Path
    private: bool
    finished: bool
    steps_done: int
    epsilon: float | None
    delta: float | None
    metrics: dict[str, float]
    updates: int


ADAM_BYTES = 8
"""Bytes of Adam's state per parameter: two moments in float32."""

_FEWEST_STEPS = 4
"""The fewest steps over which time is averaged; a run that evaluates after every step would otherwise reveal each duration."""


class Pace:
    """Measures steps per second, without evaluations and checkpoints."""

    def __init__(self) -> None:
        self._steps = 0
        self._seconds = 0.0
        self._since: float | None = None

    def step(self) -> None:
        """Called when a step begins."""
        self._steps += 1
        if self._since is None:
            self._since = time.perf_counter()

    def rest(self) -> None:
        """Called when something other than training begins; the clock stops until the next step."""
        if self._since is None:
            return
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # kernels run asynchronously
        self._seconds += time.perf_counter() - self._since
        self._since = None

    def take(self) -> float | None:
        """Steps per second since the last call, rounded to two digits; None if there were too few steps."""
        self.rest()
        if self._steps < _FEWEST_STEPS or not self._seconds:
            return None
        rate = self._steps / self._seconds
        self._steps, self._seconds = 0, 0.0
        return two_digits(rate)


def two_digits(value: float) -> float:
    """
    >>> two_digits(3.1415), two_digits(48_213_000)
    (3.1, 48000000.0)
    """
    return float(f"{value:.1e}")


def sizes(model: nn.Module, optimizer: torch.optim.Optimizer, method_state: Any) -> dict[str, Any]:
    """The number of parameters, the bytes of state that the method keeps between steps, and the bytes that Adam would keep."""
    trained = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    kept = [*_tensors(list(optimizer.state.values())), *_tensors(method_state)]
    return {
        "optimizer": type(optimizer).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_parameters": trained,
        OPTIMIZER_STATE: sum(tensor.numel() * tensor.element_size() for tensor in kept),
        ADAM_STATE: ADAM_BYTES * trained,
    }


def peak_memory() -> dict[str, Any]:
    """Peak memory so far: of the GPU used for training, or of this process including data and libraries."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return {
            "peak_memory_bytes": two_digits(torch.cuda.max_memory_allocated()),
            "peak_memory_of": torch.cuda.get_device_name(),
        }
    unit = 1 if sys.platform == "darwin" else 1024
    most = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_memory_bytes": two_digits(most), "peak_memory_of": "the process"}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


class Events:
    """Writes scalars by step; does nothing if TensorBoard is not installed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        if find_spec("tensorboard") is None:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder)
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
