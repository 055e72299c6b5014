"""The Gaussian mechanism: adds noise to the clipped sum once per logical step, then divides by the expected batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dp_microadam.errors import PrivacyError
from dp_microadam.noise.correlated import CorrelatedNoise
from dp_microadam.noise.randomness import Randomness
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.validation import require_integer, require_positive

# In secure mode results are rounded to a grid of about a millionth of the noise standard deviation: far coarser than
# float64 resolution there, far finer than the noise.
_GRID_BITS = 20


class GaussianMechanism:
    """The Gaussian mechanism of a plan: turns clipped sums into privatized means, (Σ + N(0, σ²S²)) / B.

    ``sensitivity`` S is the largest change of the sums that one example can cause, all tensors together in L2 norm. Take
    it from the object that did the clipping instead of repeating a number. B is the plan's expected batch size, never
    the number of examples a step happened to sample: that number is private, and dividing by it would let one example
    change every coordinate.

    Noise is drawn in float64 and added in float32 or wider, whatever the dtype of the sums. The results have that dtype
    too; rounding them to bfloat16 is post-processing. With a secure source the addition happens in float64 and its result
    is rounded to a fixed grid, because the last bits of a floating-point sum can reveal the summands. This mitigates such
    attacks; it is not a proof against them.

    Formal guarantees: if adding or removing one example changes the joint vector of sums by at most S in L2 norm,
    then the joint result of one call is a Gaussian mechanism of noise multiplier σ on real numbers; calls of
    different steps are independent. Assumes unpredictable randomness, one call per logical step, and sums accumulated
    over all its chunks. If the plan has bands, the noise of a step partly takes back that of the steps before it: the guarantee
    is then that of the banded matrix mechanism for all steps together, if each example is sampled at most once in as many steps
    as there are bands (``bands.py``), and calls of different steps are not independent.

    In distributed training each rank holds a part of the sum and adds a part of the noise. Each rank calls :meth:`add_noise` on
    its own sums; the results are all-reduced, and :meth:`mean` turns the total into what :meth:`privatize` returns for a
    complete sum. ``noise_slice`` gives, for a number of coordinates, the range of them that this rank adds noise to, all
    tensors together: if the slices of all ranks are a partition and their sources are independent, every coordinate of the
    total has noise of variance σ²S², and no rank draws more than its slice. Ranks trust each other: what one of them sends is
    not protected by itself, and outside of its slice it has no noise at all.

    >>> plan = PrivacyPlan(dataset_size=1000, batch_size=100, noise_multiplier=1.0, steps=10, delta=1e-5)
    >>> mechanism = GaussianMechanism(plan, sensitivity=0.5)
    >>> means = mechanism.privatize({"weight": torch.zeros(2, 3)}, step=0)
    >>> means["weight"].shape
    torch.Size([2, 3])
    >>> mechanism.privatize({"weight": torch.zeros(2, 3)}, step=0)
    Traceback (most recent call last):
        ...
    dp_microadam.errors.PrivacyError: step 0 was privatized already; noise is added once per logical step, to the sum
    ...
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        sensitivity: float,
        *,
        noise_slice: Callable[[int], range] = range,
        randomness: Randomness | None = None,
    ) -> None:
        self._plan = plan
        self._sensitivity = float(require_positive("sensitivity", sensitivity))
        self._scale = plan.noise_multiplier * self._sensitivity
        self._noise_slice = noise_slice
        self.noised = range(0)
        """The coordinates, tensor after tensor in the order of their names, to which the last step's noise was added."""
        self._randomness = randomness if randomness is not None else Randomness.from_entropy()
        self._last_step = -1
        self._correlation = CorrelatedNoise(plan.noise_coefficients.tolist()) if plan.bands > 1 else None

    @property
    def noise_deviation(self) -> float:
        """Standard deviation of the noise in each coordinate of a mean; it cannot be changed, as the accounting has read it."""
        return self._plan.noise_deviation(self._sensitivity)

    @property
    def noise_memory(self) -> int:
        """Bytes of noise kept for the next steps; 0 without correlation."""
        return 0 if self._correlation is None else self._correlation.memory

    def forget_noise(self) -> None:
        """Forget the noise of past steps, as after a step that failed; the next step begins a new chain."""
        if self._correlation is not None:
            self._correlation.forget()

    def privatize(self, sums: Mapping[str, Tensor], *, step: int) -> dict[str, Tensor]:
        """The privatized mean of each tensor of ``sums``, which together are the clipped sum of one logical step.

        A step that was already privatized, or an earlier one, is refused with a PrivacyError, and so are sums that are not
        finite, which have no bounded sensitivity, and noise for a slice of the coordinates only.
        """
        if len(self._noise_slice(count := sum(total.numel() for total in sums.values()))) < count:
            raise PrivacyError(
                "noise_slice leaves coordinates without noise, which the noise of other processes must protect; call add_noise "
                "in each process and sum what it returns"
            )
        return self.mean(self.add_noise(sums, step=step), like=sums)

    def add_noise(self, sums: Mapping[str, Tensor], *, step: int) -> dict[str, Tensor]:
        """Add this process' part of the noise to ``sums``. Raises what :meth:`privatize` raises for steps and sums."""
        require_integer("step", step, 0)
        if step <= self._last_step:
            raise PrivacyError(
                f"step {step} was privatized already; noise is added once per logical step, to the sum over all its chunks: "
                "call this after the last chunk"
            )
        if not _all_finite(sums):
            raise PrivacyError(
                "the clipped sums are not finite, so no amount of noise bounds what they reveal; use "
                "ClippedGradients, which leaves out examples whose gradients are not finite"
            )
        self._last_step = step
        self.noised = self._noise_slice(sum(total.numel() for total in sums.values()))
        ranges = noise_ranges(sums, self.noised)
        wide = self._randomness.secure or any(total.dtype == torch.float64 for total in sums.values())
        dtype = torch.float64 if wide else torch.float32
        noise = white_noise(sums, ranges, self._randomness, step=step, dtype=dtype)
        if self._correlation is not None:
            self._correlation.correlate_(noise, step=step)
        return self._added({name: total.detach() for name, total in sums.items()}, ranges, noise)

    def mean(self, noisy_sums: Mapping[str, Tensor], *, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Divide sums that carry all their noise by the expected batch size, in place.

        ``like`` are the sums before noise was added; they determine the dtypes of the result.
        """
        totals = list(noisy_sums.values())
        if totals and self._randomness.secure:
            grid = 2.0 ** (math.floor(math.log2(self._scale)) - _GRID_BITS)
            torch._foreach_div_(totals, grid)
            torch._foreach_round_(totals)
            torch._foreach_mul_(totals, grid)
        if totals:
            torch._foreach_div_(totals, self._plan.batch_size)
        return {name: total.to(_wide(like[name].dtype)) for name, total in noisy_sums.items()}

    def _added(self, sums: Mapping[str, Tensor], ranges: Mapping[str, range], noise: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums with noise in the coordinates that are this process' own; the noise is overwritten."""
        own = [total.reshape(-1)[ranges[name].start : ranges[name].stop] for name, total in sums.items()]
        found: dict[str, Tensor] = {}
        for (name, total), noisy in zip(sums.items(), self._noisy(own, list(noise.values())), strict=True):
            if len(noisy) < total.numel():
                part, noisy = noisy, total.reshape(-1).to(noisy.dtype, copy=True)
                noisy[ranges[name].start : ranges[name].stop] = part
            found[name] = noisy.view(total.shape)
        return found

    def _noisy(self, totals: list[Tensor], standard: list[Tensor]) -> list[Tensor]:
        """total + σS · standard normal of each tensor, computed in place of the noise, all tensors at once."""
        secure = self._randomness.secure
        noisy = [one.to(torch.float64 if secure else _wide(total.dtype)) for total, one in zip(totals, standard, strict=True)]
        if noisy:
            torch._foreach_mul_(noisy, self._scale)
            torch._foreach_add_(noisy, totals)
        return noisy

    def __repr__(self) -> str:
        return f"GaussianMechanism(noise_deviation={self.noise_deviation:g}, randomness={self._randomness.description!r})"


class NoNoise:
    """A mechanism without noise, for runs without privacy: it only divides by the expected batch size."""

    noise_deviation = 0.0
    noise_memory = 0
    noised = None

    def __init__(self, expected_batch_size: float) -> None:
        self._expected_batch_size = require_positive("expected_batch_size", expected_batch_size)

    def add_noise(self, sums: Mapping[str, Tensor], *, step: int) -> dict[str, Tensor]:
        """The sums as they are."""
        return dict(sums)

    def mean(self, sums: Mapping[str, Tensor], *, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums over the expected batch size."""
        return {name: total / self._expected_batch_size for name, total in sums.items()}

    def forget_noise(self) -> None:
        """There is none."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _all_finite(sums: Mapping[str, Tensor]) -> bool:
    found = [total.isfinite().all() for total in sums.values()]
    # Gathered on one device, so that looking at them waits for it once and not once per tensor.
    return not found or bool(torch.stack([one.to(found[0].device) for one in found]).all())


def noise_ranges(sums: Mapping[str, Tensor], own: range) -> dict[str, range]:
    """The coordinates of each tensor, flattened, that lie in this process' slice ``own``, whatever the order of ``sums``.

    Formal guarantees: if the slices of all processes are a partition of the coordinates, so are their ranges in each tensor.

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
    """Standard normal numbers for the given coordinates of each tensor: one flat tensor each, on the tensor's device.

    They are drawn on the host; for a CUDA device in pinned memory. With a fixed seed they are drawn for each tensor by its
    name, so that a run is the same on every device. A private source draws once for all tensors, which is faster.

    Formal guarantees: all numbers are independent of each other, of those of other steps and, unless the source has a fixed
    seed, of those of any other call.
    """
    found: dict[str, Tensor] = {}
    for device in dict.fromkeys(total.device for total in sums.values()):
        counts = {name: len(ranges[name]) for name, total in sums.items() if total.device == device}
        numbers = torch.empty(sum(counts.values()), dtype=dtype, pin_memory=device.type == "cuda")
        if randomness.private:
            randomness.fill_normals({f"noise {device}": numbers}, step)
        else:
            parts = dict(zip(counts, numbers.split(list(counts.values())), strict=True))
            randomness.fill_normals({f"noise {name}": part for name, part in parts.items()}, step)
        # torch keeps pinned memory from being used again before the copy is done.
        numbers = numbers.to(device, non_blocking=True)
        found |= dict(zip(counts, numbers.split(list(counts.values())), strict=True))
    return {name: found[name] for name in sums}
