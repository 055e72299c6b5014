"""Who knows the seed of the noise can subtract it: what is the noise drawn from, and how many streams are there?"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from research.field.loops import LOOPS, rows
from research.field.report import FAST_DP, HOLDS, JAX_PRIVACY, OPACUS, OURS, USER, Finding, Row

SEED, WIDTH = 7, 100


def seeded(publish: Callable[[], Any], seed: int) -> Any:
    """What is published after a script seeded everything, as many do so that runs can be repeated."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)
    return publish()


def by_loop(library: str) -> Finding:
    def publish() -> torch.Tensor:
        return next(LOOPS[library](rows(20, WIDTH), 2, 1, 1.0))[1]

    if not torch.equal(seeded(publish, SEED), seeded(publish, SEED)):
        return Finding(
            HOLDS, "the noise is new although everything was seeded: each run has a key of 256 bits from the operating system"
        )
    few = torch.equal(seeded(publish, SEED), seeded(publish, SEED + 2**32))
    told = "noise comes from torch's generator and repeats after torch.manual_seed"
    told += ", of which the processor's uses 32 bits: seeds 7 and 7 + 2³² give the same noise" if few else ""
    if library == OPACUS:
        there = "is" if find_spec("torchcsprng") else "is not"
        told += f"; every start warns and names secure_mode, which needs torchcsprng (it {there} installed here)"
    return Finding(USER, told)


def by_jax_privacy() -> Finding:
    import jax
    from jax_privacy import noise_addition

    def publish() -> list[float]:
        privatizer = noise_addition.gaussian_privatizer(stddev=1.0)
        nothing = jax.numpy.zeros(WIDTH)
        return list(map(float, privatizer.update(nothing, privatizer.init(nothing))[0]))

    if seeded(publish, SEED) != seeded(publish, SEED):
        return Finding(HOLDS, "without a key the noise is new")
    told = "the key is an argument; without one it is one of 2³¹ of numpy's generator, and repeats after np.random.seed"
    return Finding(USER, told)


ROW = Row(
    "Noise that cannot be guessed",
    "Seeding Python, numpy and torch before training, as scripts do, does not determine the noise.",
    "pytorch/opacus pull request 223, jax_privacy issue 85",
    {JAX_PRIVACY: by_jax_privacy, **{name: partial(by_loop, name) for name in (OPACUS, FAST_DP, OURS)}},
)

if __name__ == "__main__":
    ROW.show()
