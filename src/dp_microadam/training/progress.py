"""What a run shows on a terminal, public figures only, and how Ctrl-C ends it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

CHECKING = "checking that no example influences another's gradient, before the first step"

_REFRESH_SECONDS = 0.5
_LINE_SECONDS = 15.0
_PATIENCE_SECONDS = 3.0


class Progress:
    """Shows steps done, ε spent, expected examples (or what is ``counted``) per second and time left.

    The rate is the *expected* batch size times steps per second: the realised batch size is private.
    """

    def __init__(
        self,
        total: int,
        done: int,
        expected_batch: int,
        spent: Callable[[int], str],
        *,
        shown: bool = True,
        counted: str = "examples",
    ) -> None:
        self._total = total
        self._first = self._done = done
        self._expected_batch = expected_batch
        self._spent = spent
        self._shown = shown
        self._counted = counted
        self._begin = self._last = time.monotonic()
        self._bar = _bar() if shown and sys.stderr.isatty() else None
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("training", total=total, completed=done, spent="", rate="")

    def advance(self, done: int) -> None:
        """Update the display: ``done`` steps are recorded."""
        self._done = done
        now = time.monotonic()
        if not self._shown or now - self._last < (_REFRESH_SECONDS if self._bar else _LINE_SECONDS):
            return
        self._last = now
        if self._bar:
            self._bar.update(self._task, completed=done, spent=self._spent(done), rate=self._rate_in_words())
        else:
            left = (self._total - done) * (now - self._begin) / max(1, done - self._first)
            self.say(f"step {done} of {self._total} · {self._spent(done)} · {self._rate_in_words()} · {clock(left)} left")

    def say(self, text: str) -> None:
        """Print one line for the user."""
        if self._shown and self._bar:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._shown:
            tell(text)

    def close(self) -> None:
        if self._bar:
            self._bar.update(self._task, completed=self._done, spent=self._spent(self._done), rate=self._rate_in_words())
            self._bar.stop()
            self._bar = None

    def _rate_in_words(self) -> str:
        elapsed = max(1e-9, time.monotonic() - self._begin)
        return f"{(self._done - self._first) * self._expected_batch / elapsed:,.0f} {self._counted}/s expected"


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=20),  # so that the rest fits beside it on 80 columns
        TextColumn("{task.fields[spent]} · {task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=Console(file=sys.stderr),
    )


def tell(text: str) -> None:
    """Print one line to standard error; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def said_if_slow(text: str, *, shown: bool = True, patience: float = _PATIENCE_SECONDS) -> Iterator[None]:
    """Print the line if what happens inside takes longer than ``patience`` seconds, and then how long it took."""
    begin, said = time.monotonic(), threading.Event()

    def say() -> None:
        said.set()
        tell(text)

    timer = threading.Timer(patience, say)
    timer.daemon = True
    if shown:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if said.is_set():
        tell(f"done in {time.monotonic() - begin:.0f} s")


def clock(seconds: float) -> str:
    """
    >>> clock(3725)
    '1:02:05'
    """
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class Fraction:
    """Says every few seconds on standard error what part of a piece of work is done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._last = time.monotonic()

    def tell(self, done: float) -> None:
        if time.monotonic() - self._last >= _LINE_SECONDS:
            self._last = time.monotonic()
            tell(f"{self._what}: {100 * done:.0f} %")


class Interruptible:
    """Context manager in which the first Ctrl-C or SIGTERM only sets ``requested``; a second one interrupts at once.

    A signal in the middle of an optimizer's step would leave parameters half updated. Outside the main thread, where Python
    delivers no signals, this does nothing.
    """

    def __init__(self, *, shown: bool = True) -> None:
        self.requested = False
        self._shown = shown
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruptible:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._shown:
            tell("finishing this step; press Ctrl-C again to stop at once")

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
