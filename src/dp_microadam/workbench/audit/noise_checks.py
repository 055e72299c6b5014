"""Checks of the noise that the optimizer receives: Gaussian, of the plan's variance, and never used twice.

``PrivateTrainer`` runs on examples whose gradients are exactly zero, so that what it publishes is noise alone: of two weights
of more than three blocks of random numbers each, and of small tensors beside them. In units of σC/B these are independent
standard normal numbers. Their squares are summed for each step and tensor (noise left out somewhere, or sometimes), those
beyond 4.8 are counted (tails that a coarse generator cuts off), and noise that occurs twice is looked for in two ways: equal
numbers, wherever and in whatever step they are, and a correlation between the same parts of any two blocks, tensors and steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betainc, ndtr
from scipy.stats import chi2
from torch import Tensor, nn

from dp_microadam.noise.randomness import Randomness
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.workbench.audit.check import FALSE_ALARM, Check, count_range, mean_square_range
from dp_microadam.workbench.audit.published import Stated, published_steps

Numbers = NDArray[np.float32]

EXAMPLES = 8
NOISE_MULTIPLIER = 1.3
DELTA = 1e-5
_CLIPPING_NORM = 0.7
_BLOCK = 1 << 16
_WIDTH = 450
_FAR = 4.8
# Four numbers in a row occur twice by chance with a probability below 1e-10 in billions; three would nearly suffice.
_WINDOW = 4
# Of all windows, those whose fingerprint is a multiple of this are compared: the same ones wherever they occur.
_EVERY = 16
_SEGMENT = 400
"""Number of values at the start of each block whose correlation with all other blocks is tested."""
_DRAW = 4


class NoisyModel(nn.Module):
    """A model with two large weights of equal size, and small tensors of equal size such as biases and gains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.norm = nn.LayerNorm(_WIDTH)
        self.last = nn.Linear(_WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.norm(self.second(torch.tanh(self.first(inputs)))))


class NoiseStatistics:
    """Accumulates statistics of the noise of many steps: sums of squares, tails, fingerprints and samples."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.sizes: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.squares: list[list[float]] = []
        self.far = 0
        self.total = 0.0
        self._fingerprints: list[NDArray[np.uint64]] = []
        self._segments: list[Numbers] = []
        self._places: list[str] = []

    def observe(self, noise: dict[str, Numbers]) -> None:
        """Add the noise of one step, in units of its standard deviation, by tensor."""
        self.names = tuple(noise)
        self.sizes = np.array([numbers.size for numbers in noise.values()])
        self.squares.append([float(np.square(numbers, dtype=np.float64).sum()) for numbers in noise.values()])
        step = len(self.squares)
        for name, numbers in noise.items():
            self.far += int(np.count_nonzero(np.abs(numbers) > _FAR))
            self.total += float(numbers.sum(dtype=np.float64))
            if len(numbers) >= _WINDOW:
                self._fingerprints.append(_fingerprints(numbers))
            for block, start in enumerate(range(0, len(numbers) - _SEGMENT + 1, _BLOCK)):
                self._segments.append(numbers[start : start + _SEGMENT].copy())
                self._places.append(f"step {step}, {name}, block {block + 1}")

    @property
    def numbers(self) -> int:
        return len(self.squares) * int(self.sizes.sum())

    def checks(self) -> list[Check]:
        """Formal guarantees: for independent standard normal numbers each check fails with at most ``FALSE_ALARM``."""
        size = f"{len(self.squares):,} steps, {len(self.sizes)} tensors, {self.numbers:,} numbers"
        return [self._variance(size), self._each(size), self._mean(size), self._tails(size), self._equal(size), self._related()]

    def _variance(self, size: str) -> Check:
        question = "is the noise as large as the plan says, over all steps?"
        statistic = "mean square of the noise over the plan's variance"
        value = float(np.sum(self.squares)) / self.numbers
        return Check("noise", "variance", question, statistic, value, *mean_square_range(self.numbers), FALSE_ALARM, size)

    def _each(self, size: str) -> Check:
        squares = np.array(self.squares)
        tails = np.minimum(chi2.sf(squares, self.sizes), chi2.cdf(squares, self.sizes))
        step, tensor = np.unravel_index(int(np.argmin(tails)), tails.shape)
        return Check(
            "noise",
            "each step and tensor",
            "has every tensor its noise in every step?",
            "smallest two-sided p-value of a tensor's variance in one step, times their number",
            min(1.0, 2 * tails.size * float(tails.min())),
            FALSE_ALARM,
            np.inf,
            FALSE_ALARM,
            size,
            f"step {step + 1}, {self.names[tensor]}",
        )

    def _mean(self, size: str) -> Check:
        value = self.total / self.numbers**0.5
        return Check(
            "noise", "mean", "is the noise without a direction of its own?", "sum of all noise over its deviation", value,
            -_normal_limit(), _normal_limit(), FALSE_ALARM, size,
        )  # fmt: skip

    def _tails(self, size: str) -> Check:
        probability = 2 * float(ndtr(-_FAR))
        question = "does the noise reach as far as a Gaussian does?"
        low, high = count_range(self.numbers, probability)
        return Check("noise", "tails", question, f"numbers beyond {_FAR} deviations", self.far, low, high, FALSE_ALARM, size)

    def _equal(self, size: str) -> Check:
        fingerprints = np.sort(np.concatenate(self._fingerprints))
        repeated = int(np.count_nonzero(fingerprints[1:] == fingerprints[:-1]))
        # Fingerprints of 64 bits coincide by chance, once in so many audits.
        alarm = len(fingerprints) ** 2 / 2 / 2**64
        question = "does no run of noise occur twice: in other places, tensors, steps or runs?"
        statistic = f"repeated runs of {_WINDOW} numbers"
        # One coincidence is allowed, which squares the probability.
        return Check("noise", "repeated numbers", question, statistic, repeated, 0, 1, alarm**2, size)

    def _related(self) -> Check:
        """Cosines of independent normal vectors: (1 + c)/2 is Beta((n−1)/2, (n−1)/2), whatever the other vector is."""
        vectors = np.array(self._segments, dtype=np.float64)
        # Noise that is missing has no direction; its variance is another check's.
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        directions = vectors / np.where(lengths > 0, lengths, 1)
        cosines = np.abs(np.triu(directions @ directions.T, 1))
        first, second = np.unravel_index(int(np.argmax(cosines)), cosines.shape)
        pairs = len(vectors) * (len(vectors) - 1) // 2
        half = (_SEGMENT - 1) / 2
        p_value = 2 * pairs * float(betainc(half, half, max(0.0, (1 - cosines[first, second]) / 2)))
        return Check(
            "noise",
            "related noise",
            "is noise unrelated between blocks, tensors, steps and runs?",
            "smallest p-value of a correlation between two segments, times the number of pairs",
            min(1.0, p_value),
            FALSE_ALARM,
            np.inf,
            FALSE_ALARM,
            f"{len(vectors):,} segments of {_SEGMENT} numbers",
            f"{self._places[first]}; {self._places[second]}",
        )


def published_noise(steps: int, advance: Callable[[int], None] = lambda steps: None) -> tuple[NoiseStatistics, Stated]:
    """Noise of a run of ``PrivateTrainer`` and of a short second run, and the privacy statement of the first."""
    statistics = NoiseStatistics()
    stated = None
    for count in (steps, max(2, steps // 20)):

        def observe(noise: dict[str, Numbers]) -> None:
            statistics.observe(noise)
            advance(1)

        run = observe_noise(noise_plan(count), observe)
        stated = run if stated is None else stated
    assert stated is not None
    return statistics, stated


def observe_noise(plan: PrivacyPlan, observe: Callable[[dict[str, Numbers]], None]) -> Stated:
    """Run ``PrivateTrainer`` on examples without gradients; ``observe`` gets each step's noise by tensor, in units of σC/B."""
    unit = plan.batch_size / (plan.noise_multiplier * _CLIPPING_NORM)

    def look(gradients: dict[str, Tensor]) -> None:
        observe({name: (gradient * unit).flatten().numpy() for name, gradient in gradients.items()})

    data = (torch.ones(EXAMPLES, _WIDTH), torch.zeros(EXAMPLES))
    return published_steps(NoisyModel(), _weighted_loss, data, plan, look, max_grad_norm=_CLIPPING_NORM, physical_batch_size=4)


def noise_plan(steps: int) -> PrivacyPlan:
    """A plan with sample rate 1, whose ε is known in closed form."""
    return PrivacyPlan(EXAMPLES, EXAMPLES, NOISE_MULTIPLIER, steps, DELTA, "pld")


def _weighted_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, weights = batch
    return model(inputs).squeeze(1) * weights


def seed_check(draws: int, advance: Callable[[int], None] = lambda steps: None) -> Check:
    """Check that separate generators never start alike, which short seeds would cause by the birthday paradox."""
    randomness = Randomness.from_entropy()
    starts = np.empty((draws, _DRAW), dtype=np.float32)
    for step in range(draws):
        starts[step] = randomness.normals("noise", step, _DRAW).numpy()
        advance(1)
    repeated = draws - len(np.unique(starts, axis=0))
    question = "are the seeds of separate draws long enough never to coincide?"
    return Check("noise", "seeds", question, "draws that equal another", repeated, 0, 0, 0.0, f"{draws:,} draws")


def _fingerprints(numbers: Numbers) -> NDArray[np.uint64]:
    """64-bit fingerprints of some windows of consecutive numbers, chosen by content so that equal windows are both chosen."""
    # A copy of the bits, of which −0 and 0 are one number.
    bits = (numbers + np.float32(0)).view(np.uint32).astype(np.uint64)
    mixed = np.zeros(len(bits) - _WINDOW + 1, dtype=np.uint64)
    for offset in range(_WINDOW):
        mixed = (mixed ^ bits[offset : len(bits) - _WINDOW + 1 + offset]) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed[mixed % np.uint64(_EVERY) == 0]


def _normal_limit() -> float:
    """Two-sided range of a standard normal variable at ``FALSE_ALARM``."""
    return float(chi2.isf(FALSE_ALARM, 1)) ** 0.5
