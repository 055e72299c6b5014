"""What a run costs: steps per second, optimizer state, memory. For its report, and for whoever plans the next run.

Formal guarantees: sizes of parameters and optimizer state do not depend on the data. Time and peak memory are traces of the
computation, which the guarantee leaves out: they follow, a little, how large the batches were. They are therefore kept with two
digits only, and time only as a mean over the steps between two evaluations, at least four; what one step took is in no file.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.training.run_folder import ADAM_STATE, OPTIMIZER_STATE

ADAM_BYTES = 8
"""Of Adam's state per parameter: two moments in float32."""

_FEWEST_STEPS = 4
"""That a pace is told of: a run that evaluates after every step would tell how long each took."""


class Pace:
    """How fast steps go, evaluations and checkpoints apart."""

    def __init__(self) -> None:
        self._steps = 0
        self._seconds = 0.0
        self._since: float | None = None

    def step(self) -> None:
        """A step begins."""
        self._steps += 1
        if self._since is None:
            self._since = time.perf_counter()

    def rest(self) -> None:
        """Something else than training begins, and lasts until the next step."""
        if self._since is None:
            return
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # steps are only queued there
        self._seconds += time.perf_counter() - self._since
        self._since = None

    def take(self) -> float | None:
        """Steps per second since this was last told, with two digits; None while there were too few."""
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


def sizes(model: nn.Module, optimizer: torch.optim.Optimizer, procedure_state: Any) -> dict[str, Any]:
    """Parameters, the bytes that the method keeps between steps, and those that Adam would; optimizers begin with none."""
    trained = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    kept = [*_tensors(list(optimizer.state.values())), *_tensors(procedure_state)]
    return {
        "optimizer": type(optimizer).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_parameters": trained,
        OPTIMIZER_STATE: sum(tensor.numel() * tensor.element_size() for tensor in kept),
        ADAM_STATE: ADAM_BYTES * trained,
    }


def peak_memory() -> dict[str, Any]:
    """The most memory so far: of the GPU that trains, or of this process, data and libraries included."""
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
