"""Checks that a state of MicroAdam matches its parameter and the options of its group, before every step."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

from torch import Tensor

from dp_microadam.optimizers.micro_adam_checks import version_of
from dp_microadam.optimizers.micro_adam_state import (
    Entries,
    StateFormat,
    changed_option,
    contents_mismatch,
    entries_for,
    fits,
    local_state,
    state_mismatch,
)


class _CheckedState(NamedTuple):
    """A state whose contents were checked; they are not checked again until one of these fields changes."""

    param: Tensor  # kept alive, so that its id is not reused
    form: StateFormat
    size: int
    entries: Entries
    indices: Tensor
    version: int


class CheckedStates:
    """The states that were checked. Contents are read again only after someone else changed them."""

    def __init__(self) -> None:
        self._seen: dict[int, _CheckedState] = {}

    def remember(self, param: Tensor, own: Tensor, state: dict[str, Any], form: StateFormat) -> None:
        """Trust the contents of this state until something other than a step changes it."""
        indices = state["indices"]
        self._seen[id(param)] = _CheckedState(param, form, own.numel(), entries_for(param, form), indices, version_of(indices))

    def forget_others(self, params: Container[Tensor], count: int) -> None:
        """Forget parameters that are not among these ``count``."""
        if len(self._seen) > count:
            self._seen = {key: seen for key, seen in self._seen.items() if seen.param in params}

    def mismatch(self, param: Tensor, own: Tensor, state: dict[str, Any], form: StateFormat) -> str | None:
        """What does not match the parameter or the options of its group, in words that follow the parameter's name."""
        seen = self._seen.get(id(param))
        if seen is None or seen.indices is not state.get("indices"):
            wrong, known = state_mismatch(param, state, form), False
        elif seen.form is not form and seen.form != form:
            wrong, known = changed_option(seen.form, form), True
        elif seen.size != own.numel():
            wrong = f"has {own.numel()} coordinates, but its state has {seen.size}; create a new optimizer"
            known = True
        else:
            wrong = None if fits(param, state, seen.entries) else state_mismatch(param, state, form)
            known = seen.version == version_of(seen.indices)
        if wrong is None and not known:
            wrong = contents_mismatch(own, local_state(param, state, form), form)
            if wrong is None:
                self.remember(param, own, state, form)
        return wrong
