"""Everything a run writes to its folder: configuration, log, metrics, checkpoints, statistics and the privacy statement.

Formal guarantees: sizes of parameters and optimizer state do not depend on the data. Time and peak memory are side effects of
the computation, which the guarantee does not cover: they depend slightly on the realised batch sizes. They are therefore
stored with two digits only, and time only as a mean over the steps between two evaluations, at least four. The duration of a
single step is in no file.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dp_microadam.durable_files import write_text_durably
from dp_microadam.training.checkpoint import CheckpointFolder
from dp_microadam.training.private_step import PrivateStep
from dp_microadam.training.progress import tell
from dp_microadam.training.run_folder import (
    ADAM_STATE,
    CHECKPOINTS,
    CONFIG,
    EVENTS,
    LOG,
    METRICS,
    NOISE_MEMORY,
    OPTIMIZER_STATE,
    STATISTICS,
    read_metrics,
)

_ADAM_BYTES = 8
"""Bytes of Adam's state per parameter: two moments in float32."""

_FEWEST_STEPS = 4
"""The fewest steps over which time is averaged; a run that evaluates after every step would otherwise reveal each duration."""


class RunRecord:
    """Writes the files of one run. Metrics are those of validation data unless stated otherwise.

    The privacy statement is always written first, so that it covers at least the steps of every other file. With several ranks
    only the one with ``writes`` writes to disk; all of them may call these methods.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep_checkpoints: int = 2, writes: bool = True) -> None:
        self.path = Path(path)
        self.checkpoints = CheckpointFolder(self.path / CHECKPOINTS, keep_checkpoints)
        self.pace = Pace()
        self._events = Events(self.path / EVENTS)
        self._writes = writes

    def begin(self, config: str | None, stamp: str) -> None:
        """Write the configuration and the first line of the log."""
        if self._writes and config is not None:
            write_text_durably(self.path / CONFIG, config)
        self.log(f"began; this run is {stamp}")

    def write_checkpoint(self, step: PrivateStep, content: dict[str, Any], statistics: Mapping[str, Any]) -> None:
        """Write the privacy statement, then a checkpoint."""
        self.pace.rest()
        if self._writes:
            self._write_what_precedes(step, statistics)
            self.checkpoints.write(step.position, content)

    def write_evaluation(
        self,
        step: PrivateStep,
        metrics: Mapping[str, float],
        learning_rate: float,
        statistics: Mapping[str, Any],
        private_metrics: Mapping[str, float],
    ) -> None:
        """Write the privacy statement, then the metrics of the weights after this step."""
        pace = self.pace.take()
        if not self._writes:
            return
        line: dict[str, Any] = {"step": step.position, "epsilon": step.epsilon(), **metrics, "learning_rate": learning_rate}
        if pace is not None:
            line["steps_per_second"] = pace
        if private_metrics:
            line["outside_the_guarantee"] = dict(private_metrics)
        self._write_what_precedes(step, statistics)
        self.append_metrics(line)
        self._events.write(step.position, {**metrics, "epsilon": line["epsilon"]})

    def log(self, text: str) -> None:
        """Append one line to the log, with the time."""
        if self._writes:
            with open(self.path / LOG, "a", encoding="utf-8") as file:
                file.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {text}\n")

    def log_and_tell(self, text: str, *, shown: bool) -> None:
        """Append one line to the log and show it to the user."""
        self.log(text)
        if shown:
            tell(text)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Replace a JSON file atomically."""
        write_text_durably(self.path / name, json.dumps(values, indent=2, ensure_ascii=False) + "\n")

    def append_metrics(self, values: Mapping[str, Any]) -> None:
        """Append one line to ``metrics.jsonl``."""
        with open(self.path / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All metrics so far, without lines that a crash left incomplete."""
        return read_metrics(self.path)

    def forget_metrics_after(self, step: int) -> None:
        """Remove metrics of steps whose results were lost."""
        if self._writes:
            kept = [line for line in self.metrics() if line["step"] <= step]
            write_text_durably(self.path / METRICS, "".join(json.dumps(line) + "\n" for line in kept))

    def close(self) -> None:
        """Close open files. Closing twice is allowed."""
        self._events.close()

    def _write_what_precedes(self, step: PrivateStep, statistics: Mapping[str, Any]) -> None:
        step.write_privacy(self.path)
        self.write_json(
            STATISTICS,
            {
                **statistics,
                **peak_memory(),
                **({NOISE_MEMORY: step.mechanism.noise_memory} if step.plan.bands > 1 else {}),
                "dataset_size": step.plan.dataset_size,
                "expected_batch_size": step.plan.batch_size,
                "steps_done": step.position,
                "updates": step.account.updates,
                "last_step": step.account.last_step,
            },
        )


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
    >>> two_digits(48_213_000)
    48000000.0
    """
    return float(f"{value:.1e}")


def sizes(model: nn.Module, optimizer: torch.optim.Optimizer, method_state: Any) -> dict[str, Any]:
    """The number of parameters, the bytes of state that the method keeps between steps, and the bytes that Adam would keep."""
    trained = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    kept = [leaf for leaf in tree_leaves([list(optimizer.state.values()), method_state]) if isinstance(leaf, Tensor)]
    return {
        "optimizer": type(optimizer).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_parameters": trained,
        OPTIMIZER_STATE: sum(tensor.numel() * tensor.element_size() for tensor in kept),
        ADAM_STATE: _ADAM_BYTES * trained,
    }


def peak_memory() -> dict[str, Any]:
    """Peak memory so far: of the GPU used for training, or of this process including data and libraries."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        most, whose = torch.cuda.max_memory_allocated(), torch.cuda.get_device_name()
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        most, whose = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "the process"
    return {"peak_memory_bytes": two_digits(most), "peak_memory_of": whose}


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
