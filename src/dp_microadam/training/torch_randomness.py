"""Unpredictable random generators (torch's, NumPy's and Python's) for dropout, augmentation and Datasets during a step.

Adding or removing one example shifts the random stream of all examples after it in a batch. As long as the stream is
unpredictable, their masks have the same distribution as before, and the influence of one example stays bounded. With a stream
from a known seed it does not. So every step uses its own random stream, and the caller's is restored afterwards.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from dp_microadam.errors import PrivacyError

_WORDS = 624
_FIRST_WORD_BYTE = 24


@contextmanager
def forked_torch(model: nn.Module) -> Iterator[list[int]]:
    """Restore torch's generators after the block: that of the CPU, and those of the model's GPUs, which are yielded."""
    gpus = sorted({parameter.get_device() for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices=gpus):
        yield gpus


@contextmanager
def unpredictable_torch(model: nn.Module) -> Iterator[None]:
    """Within the block, torch's generators on the model's devices, NumPy's and Python's draw from the system's entropy.

    Raises:
        PrivacyError: if torch's seed was set inside, which makes the draws of all examples predictable.
    """
    with forked_torch(model) as gpus, _restored_python():
        _seed_all_from_entropy()
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(random_seed())
        with _refuse_reseeding():
            yield


@contextmanager
def seeded_torch(model: nn.Module, seed: int, step: int, rank: int = 0) -> Iterator[None]:
    """Within the block, torch's generators on the model's devices are a function of seed, step and rank. For tests."""
    sequence = np.random.SeedSequence([seed, step, rank] if rank else [seed, step])
    number = int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
    with forked_torch(model) as gpus, _restored_python():
        torch.default_generator.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)  # noqa: NPY002 - the global generator is what Datasets and augmentations use
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(number)
        yield


class UnpredictableWorker:
    """Seeds a data-loading worker unpredictably, whatever ``worker_init_fn`` of the user does before.

    torch would derive a worker's seed from 32 bits, once for the whole run.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None = None) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker: int) -> None:
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)
        _seed_all_from_entropy()


@contextmanager
def _restored_python() -> Iterator[None]:
    """Restore the global generators of Python and NumPy after the block."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _seed_all_from_entropy() -> None:
    torch.set_rng_state(random_state())
    random.seed(os.urandom(64))
    np.random.seed(np.frombuffer(os.urandom(64), dtype=np.uint32))  # noqa: NPY002


@contextmanager
def _refuse_reseeding() -> Iterator[None]:
    seed = torch.default_generator.initial_seed()
    yield
    if torch.default_generator.initial_seed() != seed:
        raise PrivacyError(
            "torch's random seed was set during a training step, so that dropout and augmentation are predictable; remove "
            "torch.manual_seed from the loss, the model, the augmentation and the Dataset"
        )


def random_seed() -> int:
    """A seed of 63 bits from the operating system's entropy. A GPU's generator uses all of them, the CPU's uses 32."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def random_state() -> torch.Tensor:
    """A fully random state of torch's CPU generator, a Mersenne twister; a seed would provide only 32 bits.

    Seeding first gives a valid state to start from; its words follow the header, one per eight bytes.
    """
    generator = torch.Generator()
    generator.manual_seed(random_seed())
    torch.empty(1).uniform_(generator=generator)
    state = generator.get_state()
    words = state.numpy()[_FIRST_WORD_BYTE : _FIRST_WORD_BYTE + 8 * _WORDS].view(np.uint64)
    words[:] = np.frombuffer(os.urandom(4 * _WORDS), dtype=np.uint32)
    return state
