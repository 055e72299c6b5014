"""Withholds error messages that may reveal training examples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from dp_microadam.errors import DPMicroAdamError, InputError, PrivacyError


@contextmanager
def withheld(advice: str, *, shown: bool = False) -> Iterator[None]:
    """Replace errors raised while processing training examples, since which examples fail, how many and how is private.

    Our own errors keep their message with all numbers removed, because these may describe sampled examples. Of any other error
    only the type is reported, followed by ``advice``. With ``shown`` errors pass unchanged.
    """
    try:
        yield
    except Exception as error:
        if shown or isinstance(error, PrivacyError):
            raise
        if isinstance(error, InputError):
            raise PrivacyError(f"{re.sub('[0-9]+', '…', str(error))} (numbers are withheld)") from None
        if isinstance(error, DPMicroAdamError):
            raise
        raise PrivacyError(
            f"a training batch could not be processed ({type(error).__name__}); its message may hold private data and is "
            f"withheld, {advice}"
        ) from None
