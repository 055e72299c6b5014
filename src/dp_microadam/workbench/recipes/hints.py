"""Hints for keys and options of a recipe that are misspelled or in the wrong place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dp_microadam.errors import InputError
from dp_microadam.workbench.recipes import vocabulary

_STEP_SIZES = ("lr", "learning_rate", "step_size")
"""Names of the learning rate in other libraries."""


def nearest(word: str, known: Iterable[str], sentence: str) -> str:
    """``sentence`` formatted with the known word closest to ``word``; empty if none is close."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return sentence.format(found[0]) if found else ""


def hint_for_key(key: str, known: Sequence[str]) -> str:
    """What was probably meant by a key that recipes do not have."""
    if key in _STEP_SIZES:
        return "the learning rate is the key learning_rate"
    for table, options in (
        ("optimizer", vocabulary.OPTIMIZER_OPTIONS),
        ("model_options", vocabulary.MODEL_OPTIONS),
        ("data_options", vocabulary.DATA_OPTIONS),
    ):
        if any(key in own for own in options.values()):
            return f"it is an option, {table}.{key}"
    return nearest(key, known, "the nearest known key is {}") or f"known keys are {', '.join(known)}"


def _hint_for_option(option: str, known: Sequence[str], owner: str, recipe_keys: Sequence[str]) -> str:
    if option in _STEP_SIZES:
        return "the learning rate is the recipe's own key learning_rate"
    if option in recipe_keys:
        return f"{option} is a key of the recipe itself"
    if not known:
        return f"{owner} has no options"
    hint = nearest(option, known, f"the nearest known option of {owner} is {{}}")
    return hint or f"known options of {owner} are {', '.join(known)}"


def refuse_unknown_options(
    table: str, given: Mapping[str, Any], known: Sequence[str], owner: str, recipe_keys: Sequence[str]
) -> None:
    """Raise an InputError for an option of a recipe's table that its method, model or data, the ``owner``, does not have."""
    for option, value in given.items():
        if option not in known:
            hint = _hint_for_option(option, known, owner, recipe_keys)
            raise InputError(f"recipe key {table}.{option} = {value!r} is unknown; {hint}")
