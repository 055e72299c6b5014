"""Withholds errors, warnings and log messages that may reveal training examples, and says at which stage an error came up."""

from __future__ import annotations

import logging
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

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
    except BaseException as error:
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


class MutedLikeItsParent:
    """A loader's ``worker_init_fn``, which mutes the worker if :func:`withheld` was running where the worker was started."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None = None) -> None:
        self._worker_init_fn = worker_init_fn
        self._muted = False

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are not forked, and know of their parent what is pickled."""
        return {**self.__dict__, "_muted": _depth > 0}

    def __call__(self, worker: int) -> None:
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)
        if self._muted or _depth:
            _silence()


@contextmanager
def muted() -> Iterator[None]:
    """Within the block no thread shows warnings, log messages, or errors in destructors and threads.

    That one came up, and when, is private like its text, so nothing is told in its place.
    """
    global _depth, _hooks
    with _switching:
        _hooks = _hooks if _depth else _silence()
        _depth += 1
    try:
        yield
    finally:
        with _switching:
            _depth -= 1
            if not _depth:
                _set_hooks(_hooks)
                with suppress(ValueError):
                    warnings.filters.remove(_IGNORED)  # type: ignore[attr-defined]


def _silence() -> tuple[Any, ...]:
    """Show nothing from now on; returns what showed it.

    Python is not told of the filter: it would repeat warnings outside that it gives once. It keeps no record of a warning that
    is ignored, so that one that is missing later does not tell of this one.
    """
    warnings.filters.insert(0, _IGNORED)  # type: ignore[attr-defined]
    return _set_hooks((_say_nothing, _say_nothing, _say_nothing, sys.maxsize))


def _set_hooks(new: tuple[Any, ...]) -> tuple[Any, ...]:
    old = warnings.showwarning, sys.unraisablehook, threading.excepthook, logging.root.manager.disable
    warnings.showwarning, sys.unraisablehook, threading.excepthook, level = new
    logging.disable(level)
    return old


def _say_nothing(*message: Any, **options: Any) -> None:
    """In place of what shows a message."""


_IGNORED = "ignore", None, Warning, re.compile(""), 0
_switching, _depth = threading.Lock(), 0
_hooks: tuple[Any, ...] = ()


def withheld(work: Callable[[], Result], *, shown: bool = False) -> Result:
    """Call ``work``, which processes training examples; errors, warnings and log messages say nothing of them.

    Which examples fail, how many and how is private. Our own errors keep their message with all numbers removed, because these
    may describe sampled examples, unless they came from reading an example and may name it. Of any other error only the type
    and the stage are reported, with how to see it on made-up examples. The original error is not attached: no traceback and no
    ``__context__`` leads to it. With ``shown`` everything is shown, outside of any guarantee.
    """
    if shown:
        return work()
    replacement: BaseException
    try:
        with muted():
            return work()
    except KeyboardInterrupt:
        replacement = KeyboardInterrupt()
    except BaseException as error:
        replacement = _without_private_text(error)
    # Outside the except block: Python would attach the error that is being handled to the one that is raised.
    raise replacement


def _without_private_text(error: BaseException) -> BaseException:
    if isinstance(error, DPMicroAdamError) and not getattr(error, "about_an_example", False) and not _from_the_loss(error):
        if isinstance(error, InputError) and not isinstance(error, PrivacyError):
            return PrivacyError(f"{re.sub('[0-9]+', '…', str(error))} (numbers are withheld)")
        return _detached(error)
    stage: Stage = getattr(error, "stage_of_step", LOSS)
    return PrivacyError(
        f"a training batch could not be processed ({type(error).__name__}) while {stage.what}; the message may hold private "
        f"data and is withheld; to see it, {stage.how_to_see}, or train on made-up data with show_private_metrics=True"
    )


def _from_the_loss(error: BaseException) -> bool:
    """Whether the loss or the model may have given the error its text: by raising it, or by calling what names a value."""
    modules = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    names_no_value = isinstance(error, PrivacyError) and modules[-1] == "dp_microadam"
    return not names_no_value and any(module not in ("dp_microadam", "torch") for module in modules)


def _detached(error: DPMicroAdamError) -> DPMicroAdamError:
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
