"""MicroAdam's CPU kernel: lines 6–14 of Algorithm 1, one block at a time, compiled by Numba.

It computes what ``micro_adam._Batch.update`` computes, for a 4-bit residual and blocks of 32,768 coordinates. A block and all
scratch memory fit into a core's second-level cache. Arrays come with their shapes, which ``MicroAdam`` has checked; indices are
read from memory that others can write, so each is checked against the length of its block before it is used.
"""

# mypy: disable-error-code="no-untyped-def, misc, call-arg"

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from dp_microadam.optimizers.quantization import BUCKET, LEVELS

BLOCK = 32_768
HALF = BUCKET // 2
MAGNITUDE = np.uint32(0x7FFFFFFF)
"""Without the sign bit, float32 numbers have the order of their bits as integers."""

_WORTH_A_THREAD = 1 << 19


def update(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    factors: list[list[float]],
    per_block: int,
) -> None:
    """Update a weight, given gradient, state, factors by row of the window, and how many coordinates a block selects."""
    step, window = int(state["step"]), len(state["indices"])
    arguments = (
        weight.detach().view(-1).numpy(),
        gradient.detach().float().resolve_neg().reshape(-1).contiguous().numpy(),
        state["codes"].numpy(),
        state["bounds"].numpy(),
        state["indices"].numpy(),
        state["values"].view(torch.int16).numpy().view(np.uint16),
        per_block,
        (step - 1) % window,
        min(step, window),
        np.array(factors, dtype=np.float32),
        np.float32(group["lr"]),
        np.float32(group["eps"]),
    )
    blocks = -(-weight.numel() // BLOCK)
    threads = min(torch.get_num_threads(), max(1, weight.numel() // _WORTH_A_THREAD))
    if threads == 1:
        _update_blocks(*arguments, 0, blocks)
        return
    each = -(-blocks // threads)
    list(_pool(threads).map(lambda begin: _update_blocks(*arguments, begin, min(begin + each, blocks)), range(0, blocks, each)))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


@njit(nogil=True, cache=True, error_model="numpy")
def _update_blocks(weights, gradient, codes, bounds, indices, values, per_block, slot, filled, factors, lr, eps, begin, end):
    """Update blocks ``begin`` to ``end`` of a tensor, of which ``per_block`` coordinates are selected in each but the last."""
    # Scratch memory: a block, the positions found in it, and the two sums of line 14, which are zero between blocks.
    block, found, sums = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.int32), np.zeros((BLOCK, 2), np.float32)
    floor = np.uint32(0)
    for number in range(begin, end):
        start, first = number * BLOCK, number * per_block
        length = min(BLOCK, len(weights) - start)
        kept = min(per_block, indices.shape[1] - first)
        a, whole_buckets = block[:length], block[: -(-length // BUCKET) * BUCKET]
        bucket = start // BUCKET
        a[:] = gradient[start : start + length]
        _accumulate(whole_buckets, codes[bucket:], bounds[:, bucket:])
        floor = _select(a.view(np.uint32), kept, floor, found)
        column = slice(first, first + kept)
        _keep(a, found[:kept], indices[slot, column], values[slot, column])
        whole_buckets[length:] = a[length - 1]  # which leaves the last bucket's bounds as they are
        _requantize(whole_buckets, codes[bucket:], bounds[:, bucket:])
        _apply(weights[start : start + length], indices[:filled, column], values[:filled, column], factors, lr, eps, sums)


@njit(nogil=True, cache=True)
def _accumulate(a, codes, bounds):
    """Line 6: adds the decoded residual to the gradient."""
    for bucket in range(len(a) // BUCKET):
        middle = bucket * BUCKET + HALF
        low, high = a[middle - HALF : middle], a[middle : middle + HALF]
        lower = bounds[0, bucket]
        unit = (bounds[1, bucket] - lower) / np.float32(LEVELS)
        packed = codes[bucket]
        for j in range(HALF):
            low[j] += np.float32(np.int32(packed[j] & np.uint8(15))) * unit + lower
        for j in range(HALF):
            high[j] += np.float32(np.int32(packed[j] >> np.uint8(4))) * unit + lower


@njit(nogil=True, cache=True)
def _select(bits, kept, floor, found):
    """Line 7: the positions of the ``kept`` largest magnitudes, at the beginning of ``found``; ties go to the first.

    Magnitudes from ``floor`` on are looked at, a level that suited the block before; if they are too few or too many, another
    is searched for. Returns one for the next block.
    """
    count = _collect(bits, floor, found)
    if count < kept or count > 4 * kept + HALF:
        floor = _level(bits, kept, 2 * kept)
        count = _collect(bits, floor, found)
    magnitudes = np.empty(count, np.uint32)
    for i in range(count):
        magnitudes[i] = bits[found[i]] & MAGNITUDE
    threshold = _level(magnitudes, kept, kept)
    above = 0
    for i in range(count):
        above += magnitudes[i] > threshold
    ties = kept - above
    taken = 0
    for i in range(count):
        if magnitudes[i] > threshold or (magnitudes[i] == threshold and ties > 0):
            ties -= magnitudes[i] == threshold
            found[taken] = found[i]
            taken += 1
    return threshold - np.uint32(min(threshold, 1 << 20))  # an eighth below it


@njit(nogil=True, cache=True)
def _collect(bits, floor, found):
    """The positions of magnitudes of at least ``floor``, ascending; returns how many."""
    count = 0
    for begin in range(0, len(bits), 16):
        group = bits[begin : begin + 16]
        any_above = np.uint32(0)
        for j in range(len(group)):
            any_above |= np.uint32((group[j] & MAGNITUDE) >= floor)
        if any_above:
            for j in range(len(group)):
                if (group[j] & MAGNITUDE) >= floor:
                    found[count] = begin + j
                    count += 1
    return count


@njit(nogil=True, cache=True)
def _level(bits, least, most):
    """A magnitude that from ``least`` to ``most`` of ``bits`` reach; with ties the highest that ``least`` reach."""
    low, high = np.uint32(0), np.uint32(0x7FFFFFFF)
    while high - low > 1:
        middle = low + (high - low) // np.uint32(2)
        reached = np.int32(0)
        for i in range(len(bits)):
            reached += np.int32((bits[i] & MAGNITUDE) >= middle)
        if least <= reached <= most:
            return middle
        if reached > most:
            low = middle
        else:
            high = middle
    return low


@njit(nogil=True, cache=True)
def _keep(a, found, indices, values):
    """Lines 8 and 9: values in bfloat16, rounded to nearest even, and zero in their place."""
    bits = a.view(np.uint32)
    for i in range(len(found)):
        position = found[i]
        word = bits[position]
        indices[i] = position
        values[i] = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        a[position] = np.float32(0)


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"nnan", "nsz"})
def _requantize(a, codes, bounds):
    """Lines 10 and 11. There are no NaNs here, and the order of comparisons does not matter: these flags vectorize them."""
    for bucket in range(len(a) // BUCKET):
        values = a[bucket * BUCKET : (bucket + 1) * BUCKET]
        lower, upper = values[0], values[0]
        for j in range(BUCKET):
            lower = min(lower, values[j])
            upper = max(upper, values[j])
        bounds[0, bucket], bounds[1, bucket] = lower, upper
        unit = (upper - lower) / np.float32(LEVELS)
        inverse = np.float32(1) / unit if unit > np.float32(1e-30) else np.float32(0)
        low, high, packed = values[:HALF], values[HALF:], codes[bucket]
        for j in range(HALF):
            first = np.int32(min((low[j] - lower) * inverse + np.float32(0.5), np.float32(LEVELS)))
            second = np.int32(min((high[j] - lower) * inverse + np.float32(0.5), np.float32(LEVELS)))
            packed[j] = np.uint8(first | (second << np.int32(4)))


@njit(nogil=True, cache=True, error_model="numpy")
def _apply(weights, indices, values, factors, lr, eps, sums):
    """Lines 12 to 14: the window's values and their squares, weighted by age, and the step of each coordinate that it has."""
    words = np.empty(values.shape[1], np.uint32)
    decoded = words.view(np.float32)
    for row in range(len(indices)):
        first, second = factors[0, row], factors[1, row]
        for i in range(len(words)):
            words[i] = np.uint32(values[row, i]) << np.uint32(16)
        for i in range(len(words)):
            position = np.uint16(indices[row, i])
            if position < len(weights):
                sums[position, 0] += first * decoded[i]
                sums[position, 1] += second * (decoded[i] * decoded[i])
    for row in range(len(indices)):
        for i in range(len(words)):
            position = np.uint16(indices[row, i])
            if position < len(weights):
                weights[position] -= lr * sums[position, 0] / (eps + np.sqrt(sums[position, 1]))
                sums[position, 0] = sums[position, 1] = np.float32(0)  # done, should another row have it too
