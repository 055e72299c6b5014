"""Draws normal numbers on a CUDA device, with the Triton kernel of ``chacha_kernel.py``.

Triton is optional: without it, or where the kernel does not reproduce its twin on this very device,
:func:`unsupported_reason` says so and noise is drawn on the CPU.
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from dp_microadam.noise.chacha import NORMALS_PER_BLOCK, chacha_normals

LANES = 128
"""Blocks of ChaCha20 per program of the kernel: one per thread of four warps."""

_CHECK_KEY = bytes(range(32))
_CHECK_COUNT = 3 * NORMALS_PER_BLOCK * LANES + 5


@lru_cache
def unsupported_reason(device: torch.device) -> str | None:
    """Why normal numbers cannot be drawn on this device; None if they can.

    The first call for a device compiles the kernel and compares a few thousand numbers from a fixed key with those of
    ``chacha.py``. If that fails, there is a warning: runs are as private with noise from the CPU, but slower.
    """
    if device.type != "cuda":
        return f"the device is {device}; it must be a CUDA device"
    if find_spec("triton") is None:
        return "Triton is not installed (pip install 'dp-microadam[gpu]')"
    try:
        drawn = torch.empty(_CHECK_COUNT, dtype=torch.float64, device=device)
        write_normals(drawn, _CHECK_KEY)
        difference = float((drawn.cpu() - torch.from_numpy(chacha_normals(_CHECK_KEY, _CHECK_COUNT, LANES))).abs().max())
        # Elementary functions of a GPU may differ from the CPU's in the last bits. NaN is no agreement either.
        reason = None if difference < 1e-12 else "its numbers are not those of the reference"
    except Exception as error:
        # Whatever is missing (a driver, a C compiler, support for the card): the CPU can do it.
        reason = type(error).__name__
    if reason is not None:
        warnings.warn(f"noise is drawn on the CPU, because the kernel fails on {device}: {reason}", stacklevel=2)
    return reason


def write_normals(out: Tensor, key: bytes) -> None:
    """Fill a flat tensor with standard normal numbers, which are a function of the 256-bit key; a key is used once."""
    from dp_microadam.noise import chacha_kernel

    grid = (math.ceil(len(out) / (NORMALS_PER_BLOCK * LANES)),)
    if len(out):
        with torch.cuda.device_of(out):
            # Nothing is contracted to fused operations, as in NumPy.
            chacha_kernel.write_normals[grid](out, len(out), *key_words(key), lanes=LANES, enable_fp_fusion=False)


def key_words(key: bytes) -> list[int]:
    """A key of 256 bits as eight signed integers of 32 bits, as the kernels take it."""
    words: list[int] = np.frombuffer(key, dtype="<i4").tolist()
    return words
