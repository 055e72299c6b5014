"""White noise of a step: independent standard normal numbers for the coordinates that one process adds noise to.

Processes that train together divide the coordinates: each draws the complete noise of its own slice and none elsewhere, so that
together they draw as many numbers as one process alone. A slice is a range of all coordinates, tensor after tensor in the order
of their names; a tensor's part of it is a range of that tensor's coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dp_microadam.errors import PrivacyError
from dp_microadam.noise.device_noise import unsupported_reason
from dp_microadam.noise.randomness import Randomness

_ALIGNMENT = 64
"""Tensors that become the result begin at a multiple of so many numbers in the buffer, for kernels that load many at once."""


def noise_ranges(sums: Mapping[str, Tensor], own: range) -> dict[str, range]:
    """The coordinates of each tensor, flattened, that lie in this process' slice ``own`` of all coordinates.

    Formal guarantees: if the slices of all processes are a partition of the coordinates, so are their ranges in each tensor.
    The order of ``sums`` does not matter.

    >>> noise_ranges({"a": torch.zeros(3), "b": torch.zeros(2, 2)}, range(2, 6))
    {'a': range(2, 3), 'b': range(0, 3)}
    """
    count = sum(total.numel() for total in sums.values())
    if own.step != 1 or not 0 <= own.start <= own.stop <= count:
        raise PrivacyError(f"noise_slice gave {own}; it must give consecutive coordinates of the {count} there are")
    found, begin = {}, 0
    for name in sorted(sums):
        size = sums[name].numel()
        start, stop = (min(max(place - begin, 0), size) for place in (own.start, own.stop))
        found[name] = range(start, stop)
        begin += size
    return {name: found[name] for name in sums}


def white_noise(
    sums: Mapping[str, Tensor], ranges: Mapping[str, range], randomness: Randomness, *, step: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Standard normal numbers for the given coordinates of each tensor: one flat tensor each.

    They are on the device of the tensor. For a CUDA device they are drawn there if :mod:`.device_noise` can and the source is
    private. Otherwise they are drawn on the host, in pinned memory, and cross over in one copy that the host does not wait for.
    With a fixed seed they are always drawn on the host, and for each tensor by its name, so that a run is the same on every
    device. A private source draws once for all tensors: a generator for each takes as long as 10,000 numbers.

    Formal guarantees: all numbers are independent of each other, of those of other steps and, unless the source has a fixed
    seed, of those of any other call.
    """
    found: dict[str, Tensor] = {}
    for device in dict.fromkeys(total.device for total in sums.values()):
        counts = {f"noise {name}": len(ranges[name]) for name, total in sums.items() if total.device == device}
        if device.type == "cuda":
            whole = all(len(ranges[name]) == total.numel() for name, total in sums.items())
            found |= _for_cuda(counts, device, randomness, step, dtype, alignment=_ALIGNMENT if whole else 1)
        elif randomness.private:
            buffer = _Buffer(counts)
            found |= buffer.parts(randomness.normals(f"noise {device}", step, buffer.size, dtype))
        else:
            found |= randomness.normals_for(counts, step, dtype)
    return {name: found[f"noise {name}"] for name in sums}


def _for_cuda(
    counts: Mapping[str, int], device: torch.device, randomness: Randomness, step: int, dtype: torch.dtype, alignment: int
) -> dict[str, Tensor]:
    """Normal numbers on the device, as parts of one buffer."""
    buffer = _Buffer(counts, alignment)
    if randomness.private and unsupported_reason(device) is None:
        numbers = torch.empty(buffer.size, dtype=dtype, device=device)
        randomness.fill_normals_on_device(numbers, "noise", step)
        return buffer.parts(numbers)
    host = torch.empty(buffer.size, dtype=dtype, pin_memory=True)
    randomness.fill_normals(buffer.parts(host), step)
    # torch keeps the pinned memory from being used again before the copy is done.
    return buffer.parts(host.to(device, non_blocking=True))


class _Buffer:
    """Places of flat tensors in one, each at a multiple of ``alignment`` numbers."""

    def __init__(self, counts: Mapping[str, int], alignment: int = 1) -> None:
        self._places: dict[str, slice] = {}
        self.size = 0
        for name, count in counts.items():
            self._places[name] = slice(self.size, self.size + count)
            self.size += -(-count // alignment) * alignment

    def parts(self, numbers: Tensor) -> dict[str, Tensor]:
        return {name: numbers[place] for name, place in self._places.items()}
