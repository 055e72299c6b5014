"""Correlated noise: makes the noise C⁻¹z of the banded matrix mechanism one step at a time, from the last b − 1 noise vectors.

Row t of C·ẑ = z reads c_0·ẑ_t + c_1·ẑ_(t−1) + … + c_(b−1)·ẑ_(t−b+1) = z_t, so the noise of step t is what is left of the
independent noise z_t when the echo of the last steps is subtracted. ``bands.py`` has the theorem and the coefficients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from dp_microadam.errors import PrivacyError


class CorrelatedNoise:
    """The chain of noise vectors of one process: turns independent normal numbers into correlated ones, in place.

    ``coefficients`` are the first column of C. The noise of the last b − 1 steps is as secret as that of the present one, so
    the chain cannot be pickled, copied or printed, and no checkpoint has it. A resumed run begins a new chain.

    Formal guarantees: with ẑ_t the result for step t, C·ẑ equals the independent numbers that were passed in, up to rounding,
    where C has the given coefficients and is block diagonal: a block ends, and the next begins from nothing, at
    :meth:`forget`, where a step number is left out, and where names, sizes or dtypes of the tensors change. So the distance
    between two participations of an example is the distance of their step numbers, whatever happened in between. If each
    process keeps a chain for its own share of the noise, and all begin and end blocks at the same steps, the sum of their
    noise is such a chain too.

    >>> chain = CorrelatedNoise([0.8, 0.4])
    >>> first, second = torch.tensor([1.0]), torch.tensor([1.0])
    >>> chain.correlate_({"weight": first}, step=0)
    >>> chain.correlate_({"weight": second}, step=1)
    >>> first.item(), second.item()   # 1/0.8, then (1 − 0.4·1.25)/0.8
    (1.25, 0.625)
    >>> chain
    CorrelatedNoise(bands=2)
    """

    def __init__(self, coefficients: Sequence[float]) -> None:
        self._coefficients = np.asarray(coefficients, dtype=np.float64)
        if (length := float(np.linalg.norm(self._coefficients))) > 1 + 1e-9:
            raise PrivacyError(
                f"coefficients have length {length:.4g}; an example moves C by that much, which must be at most 1"
            )
        self._kept: dict[str, Tensor] = {}
        self._oldest_first: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._last_step: int | None = None
        self._length = 0

    @property
    def bands(self) -> int:
        return len(self._coefficients)

    @property
    def memory(self) -> int:
        """Bytes of the noise that is kept at present."""
        return sum(kept.numel() * kept.element_size() for kept in self._kept.values())

    def forget(self) -> None:
        """Forget all noise; the next step begins a new block."""
        self._kept.clear()
        self._last_step = None

    @torch.no_grad()
    def correlate_(self, white: Mapping[str, Tensor], *, step: int) -> None:
        """Replace the independent standard normal numbers of step number ``step`` by the noise of that step."""
        if self.bands == 1:
            for numbers in white.values():
                numbers.div_(float(self._coefficients[0]))
            return
        if self._last_step is None or step != self._last_step + 1 or not self._fits(white):
            self._begin(white)
        self._last_step = None  # until all tensors are done: an error in between ends the block
        slot = self._length % (self.bands - 1)
        first = float(self._coefficients[0])
        for name, numbers in white.items():
            kept, flat = self._kept[name], numbers.view(-1)
            flat.addmv_(kept.t(), self._weights(slot, kept), beta=1 / first, alpha=-1 / first)
            kept[slot].copy_(flat)
        self._length += 1
        self._last_step = step

    def _weights(self, slot: int, kept: Tensor) -> Tensor:
        """The coefficient of each kept vector, where ``slot`` has the oldest: c_k for the one that was added k steps ago."""
        place = kept.dtype, kept.device
        if place not in self._oldest_first:  # twice, so that a slice of it is any rotation, without a copy to the device
            self._oldest_first[place] = torch.tensor(np.tile(self._coefficients[:0:-1], 2), dtype=place[0], device=place[1])
        return self._oldest_first[place][len(kept) - slot : 2 * len(kept) - slot]

    def _fits(self, white: Mapping[str, Tensor]) -> bool:
        return self._kept.keys() == white.keys() and all(
            kept.shape[1] == white[name].numel() and kept.dtype == white[name].dtype for name, kept in self._kept.items()
        )

    def _begin(self, white: Mapping[str, Tensor]) -> None:
        self._kept = {
            name: torch.zeros((self.bands - 1, numbers.numel()), dtype=numbers.dtype, device=numbers.device)
            for name, numbers in white.items()
        }
        self._length = 0

    def __repr__(self) -> str:
        return f"CorrelatedNoise(bands={self.bands})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PrivacyError(
            "the noise of past steps cannot be saved or copied, since whoever has it can subtract it; begin a new chain"
        )
