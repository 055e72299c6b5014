"""What an exception in a pass of the independence check says: about the model, about double precision, or about the machine.

A model may raise any exception on synthetic numbers that it was not made for; such numbers are then left out of the check. An
exception about memory says nothing about the model, and to leave something out because of it would weaken the check unnoticed.
"""

from __future__ import annotations

_OF_PRECISION = ("double", "float64", "dtype", "datatype", "scalar type")


def refuse_if_out_of_memory(error: BaseException) -> None:
    """Raise the error again if it says that memory ran out."""
    if is_out_of_memory(error):
        raise error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the host, where torch raises a plain :class:`RuntimeError`."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def is_about_precision(error: BaseException) -> bool:
    """Whether the message says that an operation does not take double precision, or not together with another type."""
    text = str(error).lower()
    return not is_out_of_memory(error) and any(word in text for word in _OF_PRECISION)
