"""Where the independence check gets its examples from: random ones, or those of ``synthetic_batch``."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dp_microadam.clipping.batches import batch_size, repeated, synthetic, with_extreme_integers
from dp_microadam.clipping.check_errors import refuse_if_out_of_memory
from dp_microadam.clipping.checked_model import CheckedModel
from dp_microadam.clipping.integer_ranges import IndexTracker
from dp_microadam.clipping.no_side_effects import ReseedingError
from dp_microadam.errors import InputError

# Most of the check runs on this many examples: a first, a middle and a last one.
CHECK_SIZE = 3

_FEWEST_GIVEN = 4

_SEEDS = 2**31
_BETWEEN_SEEDS = 1_000_003


@dataclass(frozen=True)
class SyntheticExamples:
    """How the examples of a check are drawn.

    Attributes:
        seed: of the examples, and of the random numbers that the model draws on them.
        bounds: exclusive upper bounds of integers, one for each leaf of the batch; by default integers are 0 or 1.
        magnitude: the largest integer that the model computes with, rather than uses as an index.
    """

    seed: int
    bounds: Sequence[int] | None = None
    magnitude: float = 1.0

    def draw(self, batch: Any, count: int, synthetic_batch: Any, *, spread: bool = False) -> tuple[Any, Any]:
        """``count`` examples shaped like those of ``batch``, and ``count`` others that differ from them.

        They are examples of ``synthetic_batch`` if it is not None.
        """
        if synthetic_batch is None:
            return synthetic(batch, count, seed=self.seed, bounds=self.bounds, spread=spread)
        given = batch_size(synthetic_batch)
        if given < _FEWEST_GIVEN:
            raise InputError(f"synthetic_batch holds {given} examples; it must hold at least {_FEWEST_GIVEN}")
        return repeated(synthetic_batch, count)

    def reseeded(self, step: int) -> SyntheticExamples:
        """The same with another seed, which follows from this one and ``step``."""
        return replace(self, seed=(self.seed + _BETWEEN_SEEDS * step) % _SEEDS)


def new_seed() -> int:
    """A seed from the operating system's entropy."""
    return secrets.randbelow(_SEEDS)


def accepted_examples(
    checked: CheckedModel, start: SyntheticExamples, tracker: IndexTracker | None, batch: Any, synthetic_batch: Any
) -> SyntheticExamples:
    """Examples that the model accepts, with integers as large as possible.

    ``tracker`` knows which sizes the integers index; it is None where examples are given. Falls back to integers of 0 and 1,
    and then to seed 0.
    """

    def accepts(examples: SyntheticExamples) -> bool:
        return _is_accepted(checked, examples, batch, synthetic_batch)

    candidates = [] if tracker is None else tracker.candidates()
    single = [[*[2] * i, bound, *[2] * (len(b) - i - 1)] for b in candidates[:1] for i, bound in enumerate(b) if bound > 2]
    for bounds in candidates:
        if accepts(examples := _within(start, bounds, tracker)):
            return examples
    found = [2] * len(single[0]) if single else []
    for bounds in single if len(single) > 1 else []:
        if accepts(_within(start, bounds, tracker)):
            joined = [max(pair) for pair in zip(found, bounds, strict=True)]
            if accepts(_within(start, joined, tracker)):
                found = joined
    if found and max(found) > 2:
        return _within(start, found, tracker)
    return start if accepts(start) else SyntheticExamples(0)


def _is_accepted(checked: CheckedModel, examples: SyntheticExamples, batch: Any, synthetic_batch: Any) -> bool:
    drawn, _ = examples.draw(batch, CHECK_SIZE, synthetic_batch)
    checked.seed = examples.seed
    try:
        if examples.bounds is not None:
            largest = checked.losses(with_extreme_integers(drawn, examples.bounds), examples.seed)[0]
            if not bool(torch.isfinite(largest)):
                return False
        return checked.run(drawn).is_finite()
    except ReseedingError:
        raise
    except Exception as error:  # an index out of range, most often
        refuse_if_out_of_memory(error)
        return False
    finally:
        checked.seed = 0


def _within(examples: SyntheticExamples, bounds: Sequence[int], tracker: IndexTracker | None) -> SyntheticExamples:
    return replace(examples, bounds=bounds, magnitude=1.0 if tracker is None else tracker.magnitude(bounds))
