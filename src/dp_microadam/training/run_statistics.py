"""Run statistics: steps per second, size of the optimizer state, and memory; and their curves in TensorBoard.

Formal guarantees: sizes of parameters and optimizer state do not depend on the data. Time and peak memory are side effects of
the computation, which the guarantee does not cover: they depend slightly on the realised batch sizes. They are therefore
stored with two digits only, and time only as a mean over the steps between two evaluations, at least four. The duration of a
single step is in no file.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.training.run_folder import ADAM_STATE, OPTIMIZER_STATE

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
