"""The plan of a private search: the plan of each of its runs, whose ε covers the choice of the best one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

from dp_microadam.accounting.costs import LARGEST_NOISE_MULTIPLIER, PrivacyCost, first_non_negative, least_noise_within
from dp_microadam.accounting.selection import DISTRIBUTIONS, Repetitions, SelectedRun
from dp_microadam.errors import InputError
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.validation import explicit, require_one_of

Plan = TypeVar("Plan", bound=PrivacyPlan)


@dataclass(frozen=True)
class SelectionPlan(PrivacyPlan):
    """The privacy parameters of a search that publishes the best of a random number of runs.

    All fields of :class:`~dp_microadam.PrivacyPlan` are those of each run. ``epsilon`` is that of publishing the best run and
    nothing else, which is larger than ``single_run.epsilon``. The number of runs has mean ``expected_runs`` and a truncated
    negative binomial distribution of shape ``runs_shape``: 1 is geometric, 0 logarithmic.

    Formal guarantees: if every run samples, clips and adds noise as the plan says, for at most ``steps`` steps, if the number
    of runs is drawn from ``repetitions``, and if nothing is published but the run that is best by a score computed from what
    that run may publish, the search is (``epsilon``, ``delta``)-differentially private, for the neighbours of the plan. See
    :meth:`~dp_microadam.accounting.selection.SelectedRun.rdp` for the theorem.

    >>> plan = SelectionPlan.solve(
    ...     dataset_size=45_000, batch_size=4096, delta=1e-5, epsilon=8.0, steps=2480, expected_runs=10
    ... )
    >>> plan.noise_multiplier > plan.single_run_of_same_epsilon.noise_multiplier
    True
    >>> plan.single_run.epsilon < plan.epsilon <= 8.0
    True
    """

    accountant: str = "rdp"
    expected_runs: float = field(kw_only=True)
    runs_shape: float = field(kw_only=True, default=DISTRIBUTIONS["geometric"])

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accountant != "rdp":
            raise InputError(f"accountant is {self.accountant!r}; for a selection among runs it must be 'rdp'")
        repetitions = Repetitions(self.expected_runs, self.runs_shape)
        object.__setattr__(self, "expected_runs", repetitions.expected_runs)
        object.__setattr__(self, "runs_shape", repetitions.shape)

    @classmethod
    @explicit(*inspect.signature(PrivacyPlan.solve).parameters)
    def solve(  # type: ignore[override]  # it needs more
        cls, *, expected_runs: float, distribution: str = "geometric", **options: Any
    ) -> SelectionPlan:
        """A plan from two of ``epsilon``, ``noise_multiplier`` and ``steps``; the third is solved for.

        ``epsilon`` is that of the whole search; noise multiplier and steps are those of each run. ``distribution`` is
        ``"geometric"`` or ``"logarithmic"``. The other ``options`` are those of :meth:`~dp_microadam.PrivacyPlan.solve`, except
        that the accountant is ``"rdp"``, by which alone selections are known, and that automatic ``bands`` are one.

        Raises:
            InputError: for a value out of range, or if no plan exists.
        """
        shape = DISTRIBUTIONS[require_one_of("distribution", distribution, tuple(DISTRIBUTIONS))]
        bands = options.pop("bands", "auto")
        options = {"accountant": "rdp", **options, "bands": 1 if bands == "auto" else bands}
        # For one run alone first: that refuses bad options in the words of a plan, and is where solving starts.
        plan = cls.around(PrivacyPlan.solve(**options), expected_runs, shape)
        limit = options.get("epsilon")
        if limit is None:
            return plan
        if options.get("noise_multiplier") is not None:
            return plan._with_most_steps(limit)
        try:
            return _with_least_noise(plan, limit)
        except LookupError:
            raise InputError(
                f"no noise_multiplier up to {LARGEST_NOISE_MULTIPLIER} keeps the best of {expected_runs:g} expected runs "
                f"within epsilon {limit} at delta {plan.delta:g}; allow a larger epsilon or delta, or fewer runs or steps"
            ) from None

    @classmethod
    def around(cls, run: PrivacyPlan, expected_runs: float, runs_shape: float = 1.0) -> SelectionPlan:
        """The plan of a search whose runs have the plan ``run``."""
        return cls(**asdict(run), expected_runs=expected_runs, runs_shape=runs_shape)

    @property
    def repetitions(self) -> Repetitions:
        """The distribution of the number of runs."""
        return Repetitions(self.expected_runs, self.runs_shape)

    @cached_property
    def single_run(self) -> PrivacyPlan:
        """The plan of one of the runs by itself, had it been the only one."""
        return PrivacyPlan(**{field.name: getattr(self, field.name) for field in fields(PrivacyPlan)})

    @cached_property
    def single_run_of_same_epsilon(self) -> PrivacyPlan:
        """A single run of as many steps that spends this plan's ε without a search, with less noise."""
        return _with_least_noise(self.single_run, self.epsilon)

    @cached_property
    def single_step_growth(self) -> float:
        """As for one run, whose own ε it compares with."""
        return self.single_run.single_step_growth

    def spent_after(self, steps: int, resumed_at: Sequence[int] = ()) -> PrivacyCost:
        """The selection among runs of ``steps`` steps, as input for the accountants."""
        return SelectedRun((super().spent_after(steps, resumed_at),), self.repetitions)

    def _with_most_steps(self, limit: float) -> SelectionPlan:
        """The most steps that fit; a search of one step may spend more than the limit, however much noise a run has."""
        one = replace(self, steps=self.bands)
        if one.epsilon > limit:
            raise InputError(
                f"noise_multiplier {self.noise_multiplier} spends epsilon {one.epsilon:.3g} in the first step of "
                f"{self.expected_runs:g} expected runs, more than {limit} at delta {self.delta:g}; it must be larger, or the "
                "batch smaller"
            )
        # The search spends more than one run with as many steps, so the steps of one run alone are too many.
        most, just_above = self.steps // self.bands, math.nextafter(limit, math.inf)
        too_many = first_non_negative(
            lambda n: replace(self, steps=n * self.bands).epsilon - just_above, guess=1 + most // 4, stride=1 + most // 16
        )
        return replace(self, steps=(too_many - 1) * self.bands)


def _with_least_noise(plan: Plan, limit: float) -> Plan:
    """The plan with the least noise, as a multiple of ``NOISE_RESOLUTION``, that stays within ``limit``."""
    noise = least_noise_within(limit, lambda noise: replace(plan, noise_multiplier=noise).epsilon, plan.noise_multiplier)
    return replace(plan, noise_multiplier=noise)
