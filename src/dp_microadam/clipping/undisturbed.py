"""Trial passes through a model that leave no trace: random streams, modes and gradients are put back."""

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
    """Yields a function that starts all random streams at a seed; restores everything at the end.

    The streams are those a model may draw from: torch's on the CPU and on the model's GPUs, Python's and NumPy's.
    Parameters and buffers are watched, and put back, by ``kept_state.py``.
    """
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    gpus = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})

    def rewind(seed: int) -> None:
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
            for module, training in modes:
                module.training = training
            for parameter, gradient in gradients:
                parameter.grad = gradient
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
