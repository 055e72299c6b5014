"""Errors about training examples, without what they say of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from dp_microadam.errors import DPMicroAdamError, InputError, PrivacyError


@contextmanager
def withheld(advice: str, *, shown: bool = False) -> Iterator[None]:
    """What goes wrong with training examples, with which and how many, is private: the error does not say it.

    Our own sentences pass with their numbers struck out, since those may be of examples drawn; of any other error only its
    kind is told, followed by ``advice``. With ``shown`` everything passes as it is.
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
