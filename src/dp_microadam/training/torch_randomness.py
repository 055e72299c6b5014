"""Unpredictable torch generators for dropout, stochastic depth and augmentation during a step.

Adding or removing one example shifts the random stream of all examples after it in a batch. As long as the stream is
unpredictable, their masks have the same distribution as before, and the influence of one example stays bounded. With a stream
from a known seed it does not. So every step uses its own random stream, and the caller's is restored afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

_WORDS = 624
_FIRST_WORD_BYTE = 24


@contextmanager
def forked_torch(model: nn.Module) -> Iterator[list[int]]:
    """Restore torch's generators after the block: that of the CPU, and those of the model's GPUs, which are yielded.

    Other GPUs are left alone, since other processes may use them and copying their generator state takes time.
    """
    gpus = sorted({parameter.get_device() for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices=gpus):
        yield gpus


@contextmanager
def unpredictable_torch(model: nn.Module) -> Iterator[None]:
    """Within the block, torch's generators on the model's devices are seeded from the operating system's entropy."""
    with forked_torch(model) as gpus:
        torch.set_rng_state(random_state())
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(random_seed())
        yield


@contextmanager
def seeded_torch(model: nn.Module, seed: int, step: int, rank: int = 0) -> Iterator[None]:
    """Within the block, torch's generators on the model's devices are a function of seed, step and rank. For tests."""
    sequence = np.random.SeedSequence([seed, step, rank] if rank else [seed, step])
    number = int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
    with forked_torch(model) as gpus:
        torch.default_generator.manual_seed(number)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(number)
        yield


def unpredictable_worker(worker: int) -> None:
    """Seed a data-loading worker unpredictably: torch would derive its seed from 32 bits, once for the whole run."""
    torch.set_rng_state(random_state())


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
