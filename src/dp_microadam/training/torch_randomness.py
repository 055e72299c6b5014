"""What dropout, stochastic depth and augmentation draw from during a step: torch's generators, made unpredictable.

One example more or less shifts the random stream of all that come after it in a batch. As long as nobody can predict the
stream, their masks have the same distribution as before and one example's influence stays bounded. With a stream that follows
from a seed someone set before, it does not. So every step gets a stream of its own, and the caller's comes back afterwards.
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
    """Gives torch's streams back after the block: that of the CPU, and those of the GPUs the model is on, which it yields.

    Other GPUs are left alone: another process may use them, and each has its state copied to the CPU and back.
    """
    gpus = sorted({parameter.get_device() for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices=gpus):
        yield gpus


@contextmanager
def unpredictable_torch(model: nn.Module) -> Iterator[None]:
    """Within the block torch's generators, where the model is, draw from the operating system's entropy."""
    with forked_torch(model) as gpus:
        torch.set_rng_state(random_state())
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(random_seed())
        yield


@contextmanager
def seeded_torch(model: nn.Module, seed: int, step: int, rank: int = 0) -> Iterator[None]:
    """Within the block torch's generators, where the model is, are a function of seed, step and process, for tests."""
    sequence = np.random.SeedSequence([seed, step, rank] if rank else [seed, step])
    number = int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
    with forked_torch(model) as gpus:
        torch.default_generator.manual_seed(number)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(number)
        yield


def unpredictable_worker(worker: int) -> None:
    """Give a process that loads data a stream of its own: torch would derive it from 32 bits, once for the whole run."""
    torch.set_rng_state(random_state())


def random_seed() -> int:
    """63 bits of the operating system's entropy, as a seed. A GPU's generator uses all of them, that of the CPU 32."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def random_state() -> torch.Tensor:
    """A state of torch's CPU generator, a Mersenne twister, all of whose words are random: a seed would fill 32 bits.

    Seeding first gives a valid state to start from; its words lie one to eight bytes behind the header.
    """
    generator = torch.Generator()
    generator.manual_seed(random_seed())
    torch.empty(1).uniform_(generator=generator)
    state = generator.get_state()
    words = state.numpy()[_FIRST_WORD_BYTE : _FIRST_WORD_BYTE + 8 * _WORDS].view(np.uint64)
    words[:] = np.frombuffer(os.urandom(4 * _WORDS), dtype=np.uint32)
    return state
