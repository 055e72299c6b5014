"""Trial passes through a model that leave no trace: random streams and buffers are put back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

Rewind = Callable[[int], None]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[Rewind]:
    """Yields a function that puts buffers back and starts all random streams at a seed; restores everything at the end.

    The streams are those a model may draw from: torch's on the CPU and on the model's GPUs, Python's and NumPy's.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gpus = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})

    def restore_buffers() -> None:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)

    def rewind(seed: int) -> None:
        restore_buffers()
        torch.default_generator.manual_seed(seed)
        for index in gpus:
            torch.cuda.default_generators[index].manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the global stream is the one a model may use

    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=gpus):
        try:
            yield rewind
        finally:
            restore_buffers()
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
