"""Runs the fused CPU kernel of MicroAdam, in which a block stays in cache for all of lines 6–14 of Algorithm 1.

It computes the same as ``micro_adam_update.plain_update``. Blocks are independent and are divided among threads; the kernel
releases Python's global lock. It gets tensors by their addresses, one table row per parameter, so that a step is one call
however many parameters there are.

Numba is optional: without it :func:`unsupported_reason` says so and plain torch runs instead.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dp_microadam.optimizers.bias import scales
from dp_microadam.optimizers.quantization import derive_key

if TYPE_CHECKING:
    from dp_microadam.optimizers.micro_adam_state import Layout

_WORTH_A_THREAD = 1 << 16
"""With fewer coordinates, starting another thread costs more than it saves."""

_MOST_THREADS = 1024
"""Upper limit of the thread pool, more than torch ever uses."""


def unsupported_reason(param: Tensor, group: dict[str, Any]) -> str | None:
    """Why the kernel does not support this parameter; None if it does."""
    if param.device.type != "cpu":
        return f"a parameter is on {param.device} and the kernel runs on the CPU only"
    if group["scope"] != "block":
        return f"scope is {group['scope']!r} and the kernel supports 'block' only"
    if not _numba_installed():
        return "Numba is not installed (pip install 'dp-microadam[fast]')"
    return None


@lru_cache(maxsize=1)
def _numba_installed() -> bool:
    return find_spec("numba") is not None


def table_row(target: Tensor, gradient: Tensor, state: dict[str, Any], layout: Layout, step: int) -> tuple[int, ...]:
    """One parameter, in the columns of ``micro_adam_kernel.FIELDS``. Tensors are contiguous float32 of the same size."""
    full, last = layout.segments[0], layout.segments[-1]
    error = state.get("codes", state.get("error"))
    return (
        target.data_ptr(),
        gradient.data_ptr(),
        0 if error is None else error.data_ptr(),
        state["bounds"].data_ptr() if "bounds" in state else 0,
        state["indices"].data_ptr(),
        state["values"].data_ptr(),
        target.numel(),
        full.length,
        full.kept,
        last.kept,
        layout.kept,
        step,
        derive_key(int(state["rounding_key"]), step) if "rounding_key" in state else 0,
    )


class Batch:
    """Parameters of one group that are queued for one call of the kernel."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group
        self._rows: list[tuple[int, ...]] = []
        self._scales: list[list[float]] = []
        self._alive: list[Tensor] = []

    def add(
        self, target: Tensor, gradient: Tensor, state: dict[str, Any], layout: Layout, second_moment: float | None = None
    ) -> None:
        """Queue one parameter. ``target`` and ``gradient`` are contiguous float32 of the same size.

        ``second_moment`` is that of the whole tensor, if its group has one.
        """
        step = int(state["step"])
        self._rows.append(table_row(target, gradient, state, layout, step))
        self._scales.append(scales(step, self.group, second_moment))
        self._alive += [target, gradient, *state.values()]

    def run(self) -> None:
        """Update every queued parameter."""
        if self._rows:
            rows, scales = np.array(self._rows, dtype=np.int64), np.array(self._scales, dtype=np.float32)
            update_rows(rows, scales, self.group, 1.0, self._alive)
            self._rows, self._scales, self._alive = [], [], []


def update_rows(
    rows: NDArray[np.int64], scales: NDArray[np.float32], group: dict[str, Any], decay: float, alive: Sequence[Any]
) -> None:
    """Multiply the parameters in a table by ``decay`` and subtract one step; ``alive`` owns the memory at its addresses."""
    # Imported here because importing compiles; Numba caches the result on disk, so only the first time is slow.
    from dp_microadam.optimizers import micro_adam_kernel as kernel

    powers = np.array([[beta**age for age in range(group["window"])] for beta in group["betas"]], dtype=np.float32)
    error = kernel.ERROR_CODES if group["quantize"] else kernel.ERROR_DENSE
    settings = (
        powers,
        np.float32(decay),
        np.float32(group["lr"]),
        np.float32(group["eps"]),
        group["bucket_size"],
        error if group["error_feedback"] else kernel.ERROR_NONE,
        group["rounding"] == "stochastic",
        group["window_dtype"] == torch.float32,
    )

    def share(low: int, high: int) -> None:
        # Threads left over from an interrupted step still write to these tensors, so they must stay alive.
        _ = alive
        try:
            scratch = _scratch.pop()
        except IndexError:
            scratch = kernel.new_scratch()
        kernel.step_blocks(rows, scales, low, high, *settings, scratch)
        _scratch.append(scratch)

    _share_out(share, int(rows[:, kernel.NUMEL].sum()))


def gradients_within(rows: NDArray[np.int64], limit: float) -> bool:
    """Whether every gradient in a table is finite and of magnitude at most ``limit``."""
    from dp_microadam.optimizers import micro_adam_kernel as kernel

    bits, found = np.float32(limit).view(np.uint32), []
    _share_out(lambda low, high: found.append(kernel.all_within(rows, low, high, bits)), int(rows[:, kernel.NUMEL].sum()))
    return all(found)


def _share_out(share: Callable[[int, int], None], total: int) -> None:
    """Call ``share(low, high)`` on equal ranges of ``total`` coordinates, with as many threads as torch would use."""
    threads = max(1, min(torch.get_num_threads(), total // _WORTH_A_THREAD))
    edges = [total * i // threads for i in range(threads + 1)]
    waiting = [_pool().submit(share, edges[i], edges[i + 1]) for i in range(1, threads)]
    try:
        share(edges[0], edges[1])
    finally:
        wait(waiting)
    for done in waiting:
        done.result()


_scratch: deque[Any] = deque()
"""Scratch memory of the kernel that no thread uses at the moment, about a megabyte each."""


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    """The thread pool for steps of any size; threads are created when needed and kept."""
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="micro_adam")


# Threads do not survive a fork, so a child process creates its own pool.
os.register_at_fork(after_in_child=_pool.cache_clear)
