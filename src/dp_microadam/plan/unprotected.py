"""The plan of a run without privacy, for comparison."""

from __future__ import annotations

from dataclasses import dataclass

from dp_microadam.accounting.one_step import require_room
from dp_microadam.plan.plan import require_unit


@dataclass(frozen=True)
class UnprotectedPlan:
    """The plan of a run without privacy: Poisson sampling and a number of steps, but no clipping, noise or guarantee.

    ``unit`` and ``examples_per_user`` say what is sampled and averaged, as in :class:`~dp_microadam.PrivacyPlan`.
    """

    dataset_size: int
    batch_size: int
    steps: int
    unit: str = "example"
    examples_per_user: int | None = None
    max_batch_size: int | None = None

    bands = 1
    """There is no noise to correlate, and every step samples from all examples."""

    def __post_init__(self) -> None:
        require_unit(self.unit, self.examples_per_user)
        require_room(self.max_batch_size, self.batch_size)
