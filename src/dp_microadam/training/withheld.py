"""Withholds error messages that may reveal training examples, and says at which stage of a step the error came up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from dp_microadam.errors import DPMicroAdamError, InputError, PrivacyError

Result = TypeVar("Result")
Item = TypeVar("Item")


class Stage(NamedTuple):
    """A stage of processing training examples: what happens in it, and how to see its errors on data that is not private."""

    what: str
    how_to_see: str


READING = Stage("its examples were read, by the Dataset or collate_fn", "read made-up examples with the same Dataset class")
TRANSFORMS = Stage("augment or prepare was applied", "call augment and prepare with a made-up batch")
LOSS = Stage("per_example_loss or its gradients were computed", "call per_example_loss(model, batch) with a made-up batch")


@contextmanager
def at_stage(stage: Stage) -> Iterator[None]:
    """Marks errors from within the block with the stage they came up at, unless they are marked already."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "stage_of_step"):
            error.stage_of_step = stage  # type: ignore[attr-defined]
        raise


def read_at_stage(stage: Stage, items: Iterable[Item]) -> Iterator[Item]:
    """The items, whose errors on the way are marked with the stage."""
    source = iter(items)
    while True:
        with at_stage(stage):
            try:
                item = next(source)
            except StopIteration:
                return
        yield item


def withheld(work: Callable[[], Result]) -> Result:
    """Call ``work``, which processes training examples; errors say nothing of them.

    Which examples fail, how many and how is private. Our own errors keep their message with all numbers removed, because these
    may describe sampled examples, unless they came from reading an example and may name it. Of any other error only the type
    and the stage are reported, with how to see it on made-up examples. The original error is not attached: no traceback and no
    ``__context__`` leads to it.
    """
    replacement: BaseException
    try:
        return work()
    except KeyboardInterrupt:
        replacement = KeyboardInterrupt()
    except (Exception, SystemExit, GeneratorExit) as error:
        replacement = _without_private_text(error)
    # Outside the except block: Python would attach the error that is being handled to the one that is raised.
    raise replacement


def _without_private_text(error: BaseException) -> BaseException:
    if isinstance(error, DPMicroAdamError) and not getattr(error, "about_an_example", False):
        if isinstance(error, InputError) and not isinstance(error, PrivacyError):
            return PrivacyError(f"{re.sub('[0-9]+', '…', str(error))} (numbers are withheld)")
        return _detached(error)
    stage: Stage = getattr(error, "stage_of_step", LOSS)
    return PrivacyError(
        f"a training batch could not be processed ({type(error).__name__}) while {stage.what}; the message may hold private "
        f"data and is withheld; to see it, {stage.how_to_see}, or train on made-up data with show_private_metrics=True"
    )


def _detached(error: DPMicroAdamError) -> DPMicroAdamError:
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
