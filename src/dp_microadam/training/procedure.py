"""What a method adds to the training loop: phases, a scale before the clip, rows that train, and what it learns on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

GRADIENTS = "gradients"
ROW_NORMS = "row norms"
"""What a step may ask of the training data: Σ of clipped gradients, or Σ of the norms of their rows."""


class Steps(Protocol):
    """What phases are planned from: any plan has it, private or not."""

    @property
    def dataset_size(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def steps(self) -> int: ...


@dataclass(frozen=True)
class Phase:
    """Consecutive steps that ask the same of the same parameters.

    ``trainable`` are names of parameters, all others being frozen meanwhile; None leaves them as the model has them. ``rate``
    multiplies the learning rate; at 0 the optimizer does not step and no weight moves.
    """

    name: str
    steps: int
    trainable: frozenset[str] | None = None
    rate: float = 1.0
    query: str = GRADIENTS

    @property
    def asks(self) -> tuple[frozenset[str] | None, str]:
        """What the gradients are taken of; phases that agree here share their preparation."""
        return self.trainable, self.query


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """The phase of step number ``step``, counted from 0; the last one goes on as long as it is asked for.

    >>> phase_at([Phase("first", 2), Phase("second", 3)], 2).name
    'second'
    """
    return phases_from(phases, step)[0]


def phases_from(phases: Sequence[Phase], step: int) -> Sequence[Phase]:
    """The phase of step number ``step`` and all that follow."""
    for number, phase in enumerate(phases):
        if step < phase.steps:
            return phases[number:]
        step -= phase.steps
    return phases[-1:]


class Procedure:
    """What a method does around the steps of :class:`~dp_microadam.training.trainer.PrivateTrainer`; this one does nothing.

    The trainer asks in this order: once :meth:`phases`, :meth:`calibrate` and :meth:`refuse_data`; :meth:`begin` when a phase
    begins, and again when a run is resumed within it; at each step :meth:`scale` and :meth:`row_masks`, then :meth:`receive`.

    Formal guarantees: a procedure sees the training data only through ``receive``, which is given privatized means. Whatever
    it computes from them, and hands back as scale, masks or gradients, is post-processing and costs nothing. The trainer
    samples, clips, adds noise and accounts in every phase alike, so one plan covers them all. Subclasses must keep to this: no
    training data by another way.
    """

    clipped = "the gradient of each example"
    """What is clipped, in the words of the privacy statement."""

    public: tuple[str, ...] = ()
    """What the method uses without protection, in words."""

    def phases(self, plan: Steps) -> tuple[Phase, ...]:
        """The phases of a run, which add up to the plan's steps."""
        return (Phase("training", plan.steps),)

    def calibrate(self, noise_deviation: float) -> None:
        """Be told the deviation σS/B of the noise in each coordinate of a privatized mean; 0 without privacy."""

    def refuse_data(self, train: Any) -> None:
        """Raise an InputError if the method cannot be used on this training data; only its identity may be looked at."""

    def begin(self, phase: Phase) -> None:
        """A phase begins, or is taken up again after a resume: must not change anything a second time."""

    def scale(self) -> Mapping[str, Tensor]:
        """What gradients are multiplied with before they are clipped, by parameter name; called once per step."""
        return {}

    def row_masks(self) -> Mapping[str, Tensor]:
        """Which rows of weights train, by parameter name; others have neither gradient nor noise and do not move."""
        return {}

    def receive(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take the privatized means of a step; returns the gradients the optimizer is given, by parameter name."""
        return means

    def state_dict(self) -> dict[str, Any]:
        """All that :meth:`load_state_dict` needs to go on exactly; tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the state that :meth:`state_dict` gave."""
