"""Ctrl-C handling: the first one lets the current step finish."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from dp_microadam.training.progress import tell


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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
