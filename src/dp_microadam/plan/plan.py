"""The plan of a private run: one frozen, public object that sampler, noise, accountant and ledger all read.

So the noise multiplier that was solved for is the one that is used, and the accounting cannot differ from the sampling.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

from dp_microadam.accounting.costs import (
    ACCOUNTANTS,
    DEFAULT_ACCOUNTANT,
    LARGEST_NOISE_MULTIPLIER,
    PrivacyCost,
    SubsampledGaussian,
    epsilon,
    least_noise_multiplier,
    most_steps,
)
from dp_microadam.accounting.one_step import SMALLEST_NOISE_MULTIPLIER, Cap, cap_of, require_room
from dp_microadam.errors import InputError, PrivacyWarning
from dp_microadam.plan.bands import (
    DEFAULT_NOISE_MEMORY_GIB,
    Floats,
    NoiseRatios,
    banded_square_root,
    choose_bands,
    noise_ratios,
    refuse_bands,
    refuse_memory,
)
from dp_microadam.plan.learning_rate import DISTANCE, walk_scale
from dp_microadam.validation import explicit, require_in_open, require_integer, require_one_of, require_positive

_MOST_STEPS = 10**12

LEAST_DELTA = 2.0**-128
"""The smallest δ that generators of noise honour.

All noise of a block is a function of the 192 bits of its generator's state. An event of probability δ thus comes with a whole
number of the 2¹⁹² states, and there are about δ·2¹⁹² of them, give or take the square root: from δ = 2⁻¹²⁸ on that is right to
one part in 2³², as the tails of the noise are (``noise/randomness.py``). Of a much smaller δ nothing could be said.
"""


class _Sampling:
    """What every plan says of sampling: of examples, or of users with all their examples."""

    dataset_size: int
    batch_size: int
    bands: int
    examples_per_user: int | None

    @property
    def sample_rate(self) -> float:
        """The probability with which each example or user is sampled in a step of its group: bands·B/N. One band, one group."""
        return self.bands * self.batch_size / self.dataset_size

    @property
    def unit(self) -> str:
        """Whom the plan is for: ``"example"``, or ``"user"`` if it says how many examples of a user enter a step."""
        return "example" if self.examples_per_user is None else "user"


@dataclass(frozen=True)
class UnprotectedPlan(_Sampling):
    """The plan of a run without privacy: Poisson sampling and a number of steps, but no clipping, noise or guarantee."""

    dataset_size: int
    batch_size: int
    steps: int
    examples_per_user: int | None = None
    max_batch_size: int | None = None

    bands = 1
    """There is no noise to correlate, and every step samples from all examples."""

    def __post_init__(self) -> None:
        _require_sampling(self.dataset_size, self.batch_size, self.examples_per_user, self.max_batch_size)


@dataclass(frozen=True)
class PrivacyPlan(_Sampling):
    """The privacy parameters of a run: sampling, noise multiplier, number of steps and δ.

    ``batch_size`` is the expected batch size: each step samples each of the ``dataset_size`` training examples
    independently with probability ``sample_rate``. ``epsilon`` is not a field but computed from the others, so a plan
    cannot claim a smaller one than it has. Every field is public by declaration.

    ``bands`` above 1 is correlated noise: the training examples are divided into ``bands`` groups by their number alone, step t
    samples from group t mod ``bands`` only, and the noise of a step depends on that of the last ``bands`` − 1 steps, which it
    partly takes back (``bands.py``).

    With ``examples_per_user`` the guarantee is for users, who have several examples each: ``dataset_size`` counts users and
    ``batch_size`` is the expected number of users per step; a step samples users, and the gradient of a user is the mean over
    at most ``examples_per_user`` of their examples, clipped as a whole.

    ``max_batch_size`` is the largest number of examples, or users, in a step; of a larger sample so many are kept at random. ε
    is larger for it, the more often the cap is reached (``one_step.py`` has the theorem).

    Formal guarantees: a run that samples, clips and adds noise as the plan says, for at most ``steps`` steps, is
    (``epsilon``, ``delta``)-differentially private under adding or removing one training example, or one user with all their
    examples, however many, while the others keep their numbers. With correlated noise ε is that of ⌈steps/bands⌉ steps of rate
    bands·B/N and the same noise multiplier, by the theorem of ``bands.py``. A run that is resumed, when the data may come in
    another order, must begin its noise anew and end at :meth:`last_step`. With ``max_batch_size`` it holds for each of the
    ``dataset_size`` examples or users, compared with the same data without them; it depends on that number, which is public.

    >>> plan = PrivacyPlan.solve(dataset_size=45_000, batch_size=4096, delta=1e-5, epsilon=8.0, noise_multiplier=3.0)
    >>> plan.steps
    2813
    >>> plan.epsilon <= 8.0 < plan.epsilon_after(plan.steps + 1)
    True
    """

    dataset_size: int
    batch_size: int
    noise_multiplier: float
    steps: int
    delta: float
    accountant: str = DEFAULT_ACCOUNTANT
    bands: int = 1
    examples_per_user: int | None = None
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        _require_sampling(self.dataset_size, self.batch_size, self.examples_per_user, self.max_batch_size)
        require_delta(self.delta)
        require_one_of("accountant", self.accountant, ACCOUNTANTS)
        _require_noise_multiplier(self.noise_multiplier, self.max_batch_size)
        require_integer("steps", self.steps, 1)
        refuse_bands(self.bands, self.dataset_size, self.batch_size)
        if self.bands > self.steps:
            raise InputError(f"bands is {self.bands}, more than the {self.steps} steps; it must be at most steps")
        # Plain numbers, whatever array library they came from: the plan is compared, and written as JSON.
        for kind, names in ((int, ("dataset_size", "batch_size", "steps", "bands")), (float, ("noise_multiplier", "delta"))):
            for name in names:
                object.__setattr__(self, name, kind(getattr(self, name)))
        for name in ("examples_per_user", "max_batch_size"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, int(getattr(self, name)))

    @classmethod
    @explicit()
    def solve(
        cls,
        *,
        dataset_size: int,
        batch_size: int,
        delta: float,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        steps: int | None = None,
        epochs: float | None = None,
        accountant: str = DEFAULT_ACCOUNTANT,
        bands: int | str = "auto",
        parameters: int | None = None,
        noise_memory_gib: float = DEFAULT_NOISE_MEMORY_GIB,
        examples_per_user: int | None = None,
        max_batch_size: int | None = None,
    ) -> PrivacyPlan:
        """A plan from two of ``epsilon``, ``noise_multiplier`` and ``steps``; the third is solved for.

        The solved number of steps is the largest that fits, and at least one. The solved noise multiplier is the smallest
        that fits, rounded up to a multiple of 0.0001. The plan's ε never exceeds ``epsilon``. ``epochs`` stand for
        ``steps``: dataset_size / batch_size steps each, in which an example is sampled once on average.
        ``accountant="pld"`` is tighter than ``"rdp"``, which the paper used; both are upper bounds.

        ``bands="auto"`` takes up to 16 bands if these leave at most 0.8 of one band's noise in the running sum, as few as are
        nearly as good. Bands keep noise between steps, 4·(bands − 1) bytes for each parameter, at most ``noise_memory_gib``: it
        is one band unless ``epsilon``, ``steps`` and the number of trainable ``parameters`` are given.

        Raises:
            InputError: for a value out of range, or if no plan exists.
        """
        _require_sampling(dataset_size, batch_size, examples_per_user, max_batch_size)
        require_delta(delta)
        require_one_of("accountant", accountant, ACCOUNTANTS)
        if epochs is not None:
            if steps is not None:
                raise InputError(f"epochs is {epochs} and steps is {steps}; both say how long to train: leave one out")
            # As a decimal fraction: 8.3 · 60,000 / 600 is 830, and 830.0000000000001 in floating point.
            steps = math.ceil(Fraction(str(require_positive("epochs", epochs))) * dataset_size / batch_size)
        given = {"epsilon": epsilon, "noise_multiplier": noise_multiplier, "steps": steps}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 2:
            raise InputError(
                f"exactly two of epsilon, noise_multiplier and steps must be given; got {' and '.join(names) or 'none'}"
            )
        if epsilon is not None:
            require_positive("epsilon", epsilon)
        if noise_multiplier is not None:
            noise_multiplier = _require_noise_multiplier(noise_multiplier, max_batch_size)
        if steps is not None and require_integer("steps", steps, 1) > _MOST_STEPS:
            raise InputError(f"steps are more than {_MOST_STEPS:,}, which no accountant can add up; it must be at most that")
        if delta > 1 / dataset_size:
            warnings.warn(
                f"delta is {delta:g}, above 1/{dataset_size} = {1 / dataset_size:.3g}: publishing "
                f"{'one whole example' if examples_per_user is None else 'all that one user has'} at random would satisfy it",
                PrivacyWarning,
                stacklevel=3,
            )

        shared: dict[str, Any] = {
            "dataset_size": dataset_size,
            "batch_size": batch_size,
            "delta": delta,
            "accountant": accountant,
            "max_batch_size": max_batch_size,
        }
        if isinstance(bands, str):
            if bands != "auto":
                raise InputError(f"bands is {bands!r}; it must be a whole number of at least 1, or 'auto'")
            bands = choose_bands(parameters, noise_memory_gib, steps=steps, epsilon=epsilon, **shared)
        refuse_bands(bands, dataset_size, batch_size)
        if parameters is not None:
            refuse_memory(bands, parameters, noise_memory_gib)
        sample_rate = bands * batch_size / dataset_size
        cap = cap_of(max_batch_size, dataset_size, bands)
        if noise_multiplier is None:
            assert epsilon is not None
            assert steps is not None
            noise_multiplier = _solved_noise(sample_rate, steps, epsilon, delta, accountant, bands, cap)
        if steps is None:
            assert epsilon is not None
            steps = bands * _solved_steps(sample_rate, noise_multiplier, epsilon, delta, accountant, cap)
        return cls(**shared, noise_multiplier=noise_multiplier, steps=steps, bands=bands, examples_per_user=examples_per_user)

    @property
    def cap(self) -> Cap | None:
        """The cap on the units of a step, with the number of units that a step samples from."""
        return cap_of(self.max_batch_size, self.dataset_size, self.bands)

    @property
    def noise_coefficients(self) -> Floats:
        """The first column of the matrix C of the noise, of norm at most 1: (1,) for independent noise."""
        return banded_square_root(self.bands)

    @cached_property
    def noise_ratios(self) -> NoiseRatios:
        """The noise of single steps and of running sums, relative to independent noise of the same multiplier."""
        return noise_ratios(self.bands, self.steps)

    @cached_property
    def single_step_growth(self) -> float:
        """The noise of a single step relative to that of one band with the same ε and steps; 1 for one band."""
        if self.bands == 1:
            return 1.0
        rate, cap = self.batch_size / self.dataset_size, cap_of(self.max_batch_size, self.dataset_size)
        one = _solved_noise(rate, self.steps, self.epsilon, self.delta, self.accountant, cap=cap)
        return self.noise_multiplier / one * self.noise_ratios.single_step

    @cached_property
    def epsilon(self) -> float:
        """ε at ``delta`` after all ``steps`` steps, computed by ``accountant``."""
        return self.epsilon_after(self.steps)

    def epsilon_after(self, steps: int, resumed_at: Sequence[int] = (), *, accountant: str | None = None) -> float:
        """ε at ``delta`` after the first ``steps`` steps, by default with the plan's own accountant."""
        return epsilon([self.spent_after(steps, resumed_at)], self.delta, accountant or self.accountant)

    def spent_after(self, steps: int, resumed_at: Sequence[int] = ()) -> PrivacyCost:
        """The first ``steps`` steps, as input for the accountants; with bands, those that may have sampled one example."""
        count = self.participations(steps, resumed_at)
        return SubsampledGaussian(self.sample_rate, self.noise_multiplier, count, self.bands, self.cap)

    def participations(self, steps: int, resumed_at: Sequence[int] = ()) -> int:
        """How many of the first ``steps`` steps, of a run that was resumed before some of them, can sample the same example.

        Formal guarantees: holds whatever numbers the examples have in each session, from one resume to the next, if they do
        not change within it.

        >>> plan = PrivacyPlan(1000, 10, 1.0, 64, 1e-5, bands=8)
        >>> plan.participations(64), plan.participations(64, [4]), plan.participations(64, range(1, 64))
        (8, 9, 64)
        """
        edges = [0, *(step for step in resumed_at if step < steps), steps]
        return sum(-(-(stop - start) // self.bands) for start, stop in pairwise(edges))

    def last_step(self, resumed_at: Sequence[int] = ()) -> int:
        """The number of steps after which a run that was resumed before these steps ends, so that it stays within ε.

        >>> PrivacyPlan(1000, 10, 1.0, 64, 1e-5, bands=8).last_step([4])
        60
        """
        *before, start = (0, *resumed_at)
        left = self.participations(self.steps) - self.participations(start, before)
        return max(start, min(self.steps, start + left * self.bands))

    def noise_deviation(self, sensitivity: float) -> float:
        """Standard deviation of the noise in each coordinate of a privatized mean: σ·S/B, with bands times their ratio."""
        independent = self.noise_multiplier * require_positive("sensitivity", sensitivity) / self.batch_size
        return independent * self.noise_ratios.single_step

    def noise_walk(self, sensitivity: float = 1.0) -> float:
        """Standard deviation of the noise in each coordinate of the sum of all means, as correlated noise leaves it."""
        independent = self.noise_multiplier * require_positive("sensitivity", sensitivity) / self.batch_size
        return independent * math.sqrt(self.steps) * self.noise_ratios.running_sum

    def learning_rate(self, parameters: int, sensitivity: float = 1.0) -> float:
        """The learning rate of SGD for which noise alone takes the weights as far as ``learning_rate.py`` says is best.

        ``parameters`` is the number of trainable parameters, ``sensitivity`` the clipping norm.

        >>> plan = PrivacyPlan(45_000, 4_096, 3.0, 2_480, 1e-5)
        >>> round(plan.learning_rate(2_750_000), 2)
        1.01
        """
        return DISTANCE * walk_scale(parameters) / self.noise_walk(sensitivity)

    def to_dict(self) -> dict[str, Any]:
        """All fields, unit, sample rate and ε, for JSON."""
        return {**asdict(self), "unit": self.unit, "sample_rate": self.sample_rate, "epsilon": self.epsilon}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The plan that :meth:`to_dict` describes. Unit, sample rate and ε are recomputed, not read."""
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in values]
        if missing:
            raise InputError(f"a privacy plan needs {', '.join(missing)}, which is missing")
        return cls(**{name: values[name] for name in names})


def _require_noise_multiplier(value: float, max_batch_size: int | None) -> float:
    require_positive("noise_multiplier", value)
    # Where a cap is reached, the sensitivity is twice as large.
    smallest = SMALLEST_NOISE_MULTIPLIER * (1 if max_batch_size is None else 2)
    if not smallest <= value <= LARGEST_NOISE_MULTIPLIER:
        raise InputError(f"noise_multiplier is {value:g}; it must be from {smallest:g} to {LARGEST_NOISE_MULTIPLIER}")
    return float(value)


def _require_sampling(dataset_size: int, batch_size: int, examples_per_user: int | None, max_batch_size: int | None) -> None:
    require_integer("dataset_size", dataset_size, 1)
    require_integer("batch_size", batch_size, 1)
    units = "examples" if examples_per_user is None else "users"
    if batch_size > dataset_size:
        raise InputError(
            f"batch_size is {batch_size}, more than the {dataset_size} {units} of the dataset; it must be at most dataset_size"
        )
    if examples_per_user is not None:
        require_integer("examples_per_user", examples_per_user, 1)
    require_room(max_batch_size, batch_size)


def require_delta(delta: float) -> None:
    """Require a probability that is no smaller than ``LEAST_DELTA``."""
    if require_in_open("delta", delta, 0, 1) < LEAST_DELTA:
        raise InputError(
            f"delta is {delta:g}; it must be at least {LEAST_DELTA:.1g}, the smallest that a generator of noise can honour"
        )


def _solved_noise(
    sample_rate: float, steps: int, limit: float, delta: float, accountant: str, bands: int = 1, cap: Cap | None = None
) -> float:
    """The least noise multiplier that keeps ``steps`` steps, ⌈steps/bands⌉ of them of one group, within ε = ``limit``."""
    try:
        return least_noise_multiplier(sample_rate, -(-steps // bands), limit, delta, accountant, cap)
    except LookupError:
        raise InputError(
            f"no noise_multiplier up to {LARGEST_NOISE_MULTIPLIER} keeps {steps} steps within epsilon {limit} at delta "
            f"{delta:g}; allow a larger epsilon or delta, or fewer steps"
        ) from None


def _solved_steps(
    sample_rate: float, noise_multiplier: float, limit: float, delta: float, accountant: str, cap: Cap | None
) -> int:
    """The largest number of steps of one group within ε = ``limit``."""
    try:
        steps = most_steps(sample_rate, noise_multiplier, limit, delta, accountant, cap)
    except LookupError:
        raise InputError(
            f"epsilon {limit} never runs out with noise_multiplier {noise_multiplier} and sample rate "
            f"{sample_rate:.3g}; give the number of steps"
        ) from None
    if steps == 0:
        one = epsilon([SubsampledGaussian(sample_rate, noise_multiplier, 1, cap=cap)], delta, accountant)
        raise InputError(
            f"noise_multiplier {noise_multiplier} spends epsilon {one:.3g} in its first step, more than {limit} at "
            f"delta {delta:g}; it must be larger, or the batch smaller"
        )
    return steps
