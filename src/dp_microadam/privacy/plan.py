"""The plan of a private run: one frozen, public object that sampler, noise, accountant and ledger all read.

Because they all read the same object, the noise multiplier that was solved for is the one that is used, and the accounting
cannot differ from the sampling. This module does not import torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from dp_microadam.errors import InputError, PrivacyWarning
from dp_microadam.privacy.accounting import (
    ACCOUNTANTS,
    LARGEST_NOISE_MULTIPLIER,
    SMALLEST_NOISE_MULTIPLIER,
    SubsampledGaussian,
    epsilon,
    least_noise_multiplier,
    most_steps,
)
from dp_microadam.validation import require_in_open, require_integer, require_one_of, require_positive


@dataclass(frozen=True)
class PrivacyPlan:
    """The privacy parameters of a run: sampling, noise multiplier, number of steps and δ.

    ``batch_size`` is the expected batch size: each step samples each of the ``dataset_size`` training examples
    independently with probability ``sample_rate``. ``epsilon`` is not a field but computed from the others, so a plan
    cannot claim a smaller one than it has. Every field is public by declaration.

    Formal guarantees: a run that samples, clips and adds noise as the plan says, for at most ``steps`` steps, is
    (``epsilon``, ``delta``)-differentially private under adding or removing one training example.

    >>> plan = PrivacyPlan.solve(dataset_size=45_000, batch_size=4096, delta=1e-5, epsilon=8.0, noise_multiplier=3.0)
    >>> plan.steps
    2480
    >>> plan.epsilon <= 8.0 < plan.epsilon_after(plan.steps + 1)
    True
    """

    dataset_size: int
    batch_size: int
    noise_multiplier: float
    steps: int
    delta: float
    accountant: str = "rdp"

    def __post_init__(self) -> None:
        _require_sampling_and_delta(self.dataset_size, self.batch_size, self.delta, self.accountant)
        _require_noise_multiplier(self.noise_multiplier)
        require_integer("steps", self.steps, 1)
        # Plain numbers, whatever array library they came from: the plan is compared, and written as JSON.
        for kind, names in ((int, ("dataset_size", "batch_size", "steps")), (float, ("noise_multiplier", "delta"))):
            for name in names:
                object.__setattr__(self, name, kind(getattr(self, name)))

    @classmethod
    def solve(
        cls,
        *,
        dataset_size: int,
        batch_size: int,
        delta: float,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        steps: int | None = None,
        accountant: str = "rdp",
    ) -> PrivacyPlan:
        """A plan from two of ``epsilon``, ``noise_multiplier`` and ``steps``; the third is solved for.

        The solved number of steps is the largest that fits, and at least one. The solved noise multiplier is the smallest
        that fits, rounded up to a multiple of 0.0001. The plan's ε never exceeds ``epsilon``.

        Raises:
            InputError: for a value out of range, or if no plan exists.
        """
        _require_sampling_and_delta(dataset_size, batch_size, delta, accountant)
        given = {"epsilon": epsilon, "noise_multiplier": noise_multiplier, "steps": steps}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 2:
            raise InputError(
                f"exactly two of epsilon, noise_multiplier and steps must be given; got {' and '.join(names) or 'none'}"
            )
        if epsilon is not None:
            require_positive("epsilon", epsilon)
        if noise_multiplier is not None:
            noise_multiplier = _require_noise_multiplier(noise_multiplier)
        if steps is not None:
            require_integer("steps", steps, 1)
        if delta > 1 / dataset_size:
            warnings.warn(
                f"delta is {delta:g}, above 1/{dataset_size} = {1 / dataset_size:.3g}: publishing one whole example "
                "at random would satisfy it",
                PrivacyWarning,
                stacklevel=2,
            )

        sample_rate = batch_size / dataset_size
        if noise_multiplier is None:
            assert epsilon is not None
            assert steps is not None
            noise_multiplier = _solve_noise(sample_rate, steps, epsilon, delta, accountant)
        if steps is None:
            assert epsilon is not None
            steps = _solve_steps(sample_rate, noise_multiplier, epsilon, delta, accountant)
        return cls(dataset_size, batch_size, noise_multiplier, steps, delta, accountant)

    @property
    def sample_rate(self) -> float:
        """The probability with which each example is sampled in a step."""
        return self.batch_size / self.dataset_size

    @cached_property
    def epsilon(self) -> float:
        """ε at ``delta`` after all ``steps`` steps, computed by ``accountant``."""
        return self.epsilon_after(self.steps)

    def epsilon_after(self, steps: int, *, accountant: str | None = None) -> float:
        """ε at ``delta`` after the first ``steps`` steps, by default with the plan's own accountant."""
        return epsilon([self.spent_after(steps)], self.delta, accountant or self.accountant)

    def spent_after(self, steps: int) -> SubsampledGaussian:
        """The first ``steps`` steps, as input for the accountants."""
        return SubsampledGaussian(self.sample_rate, self.noise_multiplier, steps)

    def noise_deviation(self, sensitivity: float) -> float:
        """Standard deviation of the noise in each coordinate of a privatized mean: σ·S/B.

        An optimizer that corrects for the noise, as AdamBC does, subtracts the square of this.
        """
        return self.noise_multiplier * require_positive("sensitivity", sensitivity) / self.batch_size

    def to_dict(self) -> dict[str, Any]:
        """All fields, sample rate and ε, for JSON."""
        return {**asdict(self), "sample_rate": self.sample_rate, "epsilon": self.epsilon}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyPlan:
        """The plan that :meth:`to_dict` describes. Sample rate and ε are recomputed, not read."""
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in values]
        if missing:
            raise InputError(f"a privacy plan needs {', '.join(missing)}, which is missing")
        return cls(**{name: values[name] for name in names})


def _require_noise_multiplier(value: float) -> float:
    require_positive("noise_multiplier", value)
    if not SMALLEST_NOISE_MULTIPLIER <= value <= LARGEST_NOISE_MULTIPLIER:
        raise InputError(
            f"noise_multiplier is {value:g}; it must be from {SMALLEST_NOISE_MULTIPLIER:g} to {LARGEST_NOISE_MULTIPLIER}"
        )
    return float(value)


def _require_sampling_and_delta(dataset_size: int, batch_size: int, delta: float, accountant: str) -> None:
    require_integer("dataset_size", dataset_size, 1)
    require_integer("batch_size", batch_size, 1)
    if batch_size > dataset_size:
        raise InputError(
            f"batch_size is {batch_size}, more than the {dataset_size} examples of the dataset; it must be at most dataset_size"
        )
    require_in_open("delta", delta, 0, 1)
    require_one_of("accountant", accountant, ACCOUNTANTS)


def _solve_noise(sample_rate: float, steps: int, limit: float, delta: float, accountant: str) -> float:
    try:
        return least_noise_multiplier(sample_rate, steps, limit, delta, accountant)
    except LookupError:
        raise InputError(
            f"no noise_multiplier up to {LARGEST_NOISE_MULTIPLIER} keeps {steps} steps within epsilon {limit} at delta "
            f"{delta:g}; allow a larger epsilon or delta, or fewer steps"
        ) from None


def _solve_steps(sample_rate: float, noise_multiplier: float, limit: float, delta: float, accountant: str) -> int:
    try:
        steps = most_steps(sample_rate, noise_multiplier, limit, delta, accountant)
    except LookupError:
        raise InputError(
            f"epsilon {limit} never runs out with noise_multiplier {noise_multiplier} and sample rate "
            f"{sample_rate:.3g}; give the number of steps"
        ) from None
    if steps == 0:
        one = epsilon([SubsampledGaussian(sample_rate, noise_multiplier, 1)], delta, accountant)
        raise InputError(
            f"noise_multiplier {noise_multiplier} spends epsilon {one:.3g} in its first step, more than {limit} at "
            f"delta {delta:g}; it must be larger, or the batch smaller"
        )
    return steps
