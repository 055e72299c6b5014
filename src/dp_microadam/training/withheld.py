"""Withholds error messages that may reveal training examples."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from dp_microadam.errors import DPMicroAdamError, InputError, PrivacyError

Result = TypeVar("Result")


def withheld(work: Callable[[], Result], advice: str) -> Result:
    """Call ``work``, which processes training examples; errors say nothing of them.

    Which examples fail, how many and how is private. Our own errors keep their message with all numbers removed, because these
    may describe sampled examples, unless they came from reading an example and may name it. Of any other error only the type
    is reported, followed by ``advice``. The original error is not attached: no traceback and no ``__context__`` leads to it.
    """
    replacement: BaseException
    try:
        return work()
    except KeyboardInterrupt:
        replacement = KeyboardInterrupt()
    except (Exception, SystemExit, GeneratorExit) as error:
        replacement = _without_private_text(error, advice)
    # Outside the except block: Python would attach the error that is being handled to the one that is raised.
    raise replacement


def _without_private_text(error: BaseException, advice: str) -> BaseException:
    if isinstance(error, DPMicroAdamError) and not getattr(error, "about_an_example", False):
        if isinstance(error, InputError) and not isinstance(error, PrivacyError):
            return PrivacyError(f"{re.sub('[0-9]+', '…', str(error))} (numbers are withheld)")
        return _detached(error)
    return PrivacyError(
        f"a training batch could not be processed ({type(error).__name__}); its message may hold private data and is withheld, "
        f"{advice}"
    )


def _detached(error: DPMicroAdamError) -> DPMicroAdamError:
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
