"""Copies physical batches to a CUDA device ahead of their use: each crosses over while the one before it is processed.

Batches are pinned on the host and copied on a stream of their own, so that neither the host nor the device waits for a copy.
Only the batches of one logical step are given to :func:`copied_ahead`: nothing of a later step is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def copied_ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The batches on the device, in their order. When one is given out, the copy of the next has begun.

    Formal guarantees: values and order are those of ``batches``, of which at most one more is read than was given out. Work
    that is started on the device's current stream after a batch is given out sees it complete.
    """
    copies = torch.Stream(device=device)
    waiting: deque[tuple[Any, torch.Event]] = deque()
    try:
        for batch in batches:
            waiting.append(_begin_copy(batch, device, copies))
            if len(waiting) > 1:
                yield _completed(*waiting.popleft(), device)
        while waiting:
            yield _completed(*waiting.popleft(), device)
    finally:
        # After an error: memory that a copy still writes to must not be handed on before.
        for _, copied in waiting:
            torch.accelerator.current_stream(device).wait_event(copied)


def pinned(batch: Any) -> Any:
    """The batch with its tensors on the host in pinned memory, from which copies need not be waited for."""
    return tree_map(lambda leaf: leaf.pin_memory() if _on_host(leaf) else leaf, batch)


def _begin_copy(batch: Any, device: torch.device, copies: torch.Stream) -> tuple[Any, torch.Event]:
    """The batch on the device, where its values are valid after the event."""
    # Memory is taken and given back on the stream that computes, in whose order torch hands it on. So the stream of copies has
    # to wait for what was started there so far, which may still read that memory; what is started later runs beside it.
    computing = torch.accelerator.current_stream(device)
    batch = pinned(batch)
    there = tree_map(lambda leaf: torch.empty_like(leaf, device=device) if _on_host(leaf) else leaf, batch)
    copies.wait_stream(computing)
    with _on(copies, device):
        # torch keeps pinned memory from being used again before the copies of this stream are done.
        tree_map(lambda target, leaf: target.copy_(leaf, non_blocking=True) if _on_host(leaf) else None, there, batch)
    return there, copies.record_event()


def _completed(batch: Any, copied: torch.Event, device: torch.device) -> Any:
    """The batch, for work on the current stream: the stream waits for the copy, the host does not."""
    torch.accelerator.current_stream(device).wait_event(copied)
    return batch


def _on_host(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout == torch.strided


@contextmanager
def _on(stream: torch.Stream, device: torch.device) -> Iterator[None]:
    """Work within the block is started on this stream."""
    with torch.cuda.device(device):
        before = torch.accelerator.current_stream(device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
