"""Passes through a model without side effects: random streams, modes and gradients are restored afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from dp_microadam.errors import InputError

SeedAll = Callable[[int], None]


@contextmanager
def no_side_effects(model: nn.Module) -> Iterator[SeedAll]:
    """Restore random streams, training modes and gradients on exit; yields a function that seeds all random streams.

    The streams are those a model may draw from: torch's on the CPU and on the model's GPUs, Python's and NumPy's.
    Parameters and buffers are checked and restored by ``model_state.py``.
    """
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    gpus = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})

    def seed_all(seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        for index in gpus:
            torch.cuda.default_generators[index].manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the global stream is the one a model may use

    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=gpus):
        try:
            yield seed_all
        finally:
            for module, training in modes:
                module.training = training
            for parameter, gradient in gradients:
                parameter.grad = gradient
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


class ReseedingError(InputError):
    """Code under a check sets the seed of a global random stream."""


class SeedWatch:
    """Notices code that seeds the global random streams, which are unpredictable in a private step.

    torch's generators remember their seed. Those of Python and NumPy do not: there, passes that start from different seeds
    and end in the same state show it.
    """

    def __init__(self, model: nn.Module, what: str) -> None:
        self._gpus = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
        self._what = what
        self._ends: dict[tuple[str, int], int] = {}

    def refuse_seeding(self, seed: int) -> None:
        """Raise :class:`ReseedingError` if a pass that started from this seed set another."""
        generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in self._gpus)]
        if any(generator.initial_seed() != seed for generator in generators):
            raise self._error("torch's random seed (torch.manual_seed)")
        python, *numpy = python_random_state()
        for call, state in (("random.seed", python), ("numpy.random.seed", tuple(numpy))):
            if self._ends.setdefault((call, hash(state)), seed) != seed:
                raise self._error(f"the seed of a global random stream ({call})")

    def _error(self, seed: str) -> ReseedingError:
        return ReseedingError(
            f"{self._what} sets {seed}, so that examples would share predictable draws; remove it, and draw from the global "
            "generators as they are"
        )


def torch_random_state(model: nn.Module) -> list[Any]:
    """The state of torch's generators; a pass that changes it has drawn random numbers."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return [state.tolist() for state in states]


def python_random_state() -> tuple[Any, ...]:
    """The state of the global generators of Python and NumPy."""
    state: dict[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002 - the global stream
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"]
