"""What a recipe may say: names of methods, models and data with the options of each, and the types of its keys.

Beside the Python type, an annotation says what a value must be, in words and as a function. Models are listed by hand because
their code imports torch and recipes are checked without it. A test compares the list with that code.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from dp_microadam.errors import InputError
from dp_microadam.methods import table
from dp_microadam.workbench.data.catalogue import KNOWN_DATA, known

OPTIMIZER_OPTIONS = {name: entry.all_options for name, entry in table.METHODS.items()}
"""By method: its own options and those of its optimizer. The learning rate is the recipe's ``learning_rate``."""

NON_PRIVATE = "non-private"

PARTLY_TRAINED = ("dp-bitfit", "sparta")
"""Methods that train a part of the parameters, or other parts in other phases."""

LANGUAGE_MODEL = "hugging-face-causal"
TEXT_MODELS = ("hugging-face", LANGUAGE_MODEL)
TEXT_SETS = tuple(name for name in KNOWN_DATA if known(name).kind == "text")

_LORA_OPTIONS = ("lora_rank", "lora_alpha", "lora_targets")
_TRANSFORMER_OPTIONS = ("pretrained", "resolution", "patch_size", "trainable", "normalize_features", *_LORA_OPTIONS)

MODEL_OPTIONS: dict[str, tuple[str, ...]] = {
    "mlp": ("hidden",),
    "tanh-cnn": (),
    "small-cnn": ("width",),
    "wide-resnet": ("depth", "width", "groups", "weight_standardization"),
    "nf-resnet-50": ("width",),
    **{f"deit-{size}": _TRANSFORMER_OPTIONS for size in ("tiny", "small", "base")},
    **{f"vit-{size}": _TRANSFORMER_OPTIONS for size in ("tiny", "small", "base", "large")},
    "hugging-face": ("pretrained", "trainable", "pooling", *_LORA_OPTIONS),
    "hugging-face-causal": ("pretrained", *_LORA_OPTIONS),
}
"""Options by model."""

DATA_OPTIONS = {name: known(name).options for name in KNOWN_DATA}
"""Options by data set."""

TABLES = {"optimizer": OPTIMIZER_OPTIONS, "model_options": MODEL_OPTIONS, "data_options": DATA_OPTIONS}
"""A recipe's tables of options, by the method, model or data that has them."""

USER_OPTIONS = ("user_column", "user_table", "user_pattern")
"""Options of data that say whose each example is."""

BASES = tuple(OPTIMIZER_OPTIONS)
METHODS = (*BASES, NON_PRIVATE)
MODELS = tuple(MODEL_OPTIONS)
DATA_SETS = tuple(DATA_OPTIONS)


@dataclass(frozen=True)
class Rule:
    """What a value must be: of a Python type, and such that it ``fits``; ``words`` end the sentence "it must be …".

    With ``into``, it is kept in that form (an int becomes a float where a float belongs), so that recipes with the same meaning
    are equal.
    """

    words: str
    kind: Any
    fits: Callable[[Any], bool] = lambda value: True
    into: Callable[[Any], Any] = lambda value: value
    choices: tuple[str, ...] = ()

    def follows(self, value: Any) -> bool:
        """Whether the value is such."""
        if not isinstance(value, self.kind) or (isinstance(value, bool) and self.kind is not bool):
            return False
        try:
            str(value).encode()
            return self.fits(value)
        except (ValueError, OverflowError):
            return False


def one_of(*choices: str) -> Rule:
    return Rule(f"one of {', '.join(map(repr, choices))}", str, choices.__contains__, choices=choices)


def _whole(low: int) -> Rule:
    """No larger than what every TOML parser supports."""
    return Rule(f"a whole number of at least {low}", int, lambda value: low <= value < 2**63)


def _is_name(value: str) -> bool:
    """Fits on one line and can be part of the name of a folder."""
    return value.isprintable() and 0 < len(value.strip()) <= 100 and value[0] != "." and not set(value) & set("/\\")


def _is_noun(value: str) -> bool:
    return value.replace(" ", "").replace("-", "").isalpha() and len(value) <= 40 and value == value.strip()


def _is_table(value: Mapping[str, Any]) -> bool:
    items = [item for given in value.values() for item in (given if isinstance(given, list | tuple) else [given])]
    return all(isinstance(item, bool | int | float | str) for item in items)


def _positive(value: float) -> bool:
    return 0 < float(value) <= 1e30


Positive = Annotated[float, Rule("a number above 0, at most 1e30", int | float, _positive, float)]
Probability = Annotated[float, Rule("a number in (0, 1)", int | float, lambda value: 0 < value < 1, float)]
Share = Annotated[float, Rule("a number in [0, 1)", int | float, lambda value: 0 <= value < 1, float)]
Count = Annotated[int, _whole(1)]
Whole = Annotated[int, _whole(0)]
Canaries = Annotated[int, _whole(100)]
"""Fewer can show next to nothing."""
Name = Annotated[str, Rule("1 to 100 printable characters without slashes, and not begin with a dot", str, _is_name)]
Noun = Annotated[str, Rule("a noun such as patient, of at most 40 letters, spaces and hyphens", str, _is_noun)]
Key = Annotated[
    str, Rule("32 hexadecimal digits", str, lambda value: len(value) == 32 and not set(value) - set("0123456789abcdef"))
]
Weights = Annotated[
    tuple[float, ...],
    Rule(
        "a list of at least two numbers above 0, one for each class",
        list | tuple,
        lambda value: len(value) > 1 and all(isinstance(item, int | float) and _positive(item) for item in value),
        lambda value: tuple(map(float, value)),
    ),
]
Table = Annotated[
    dict[str, Any],
    Rule(
        "a table of options that are numbers, strings, true, false or lists of these",
        Mapping,
        _is_table,
        lambda value: {option: list(given) if isinstance(given, tuple) else given for option, given in value.items()},
    ),
]


def rules_of(kind: Any) -> Iterator[Rule]:
    """The rules of a type, of which a value must follow one."""
    if get_origin(kind) is Annotated:
        yield next(extra for extra in get_args(kind)[1:] if isinstance(extra, Rule))
    elif get_origin(kind) in (Union, types.UnionType):
        for member in get_args(kind):
            yield from rules_of(member)
    elif get_origin(kind) is Literal:
        yield one_of(*get_args(kind))
    elif kind in (bool, str):
        yield Rule("true or false" if kind is bool else "a string", kind)


def accepts(kind: Any, value: Any) -> bool:
    """Whether a key of this type can have the value."""
    left_out = value is None and type(None) in get_args(kind)
    return left_out or any(rule.follows(value) for rule in rules_of(kind))


def read(key: str, kind: Any, value: Any) -> Any:
    """The value in the form of the key.

    >>> read("steps", Count, 0)
    Traceback (most recent call last):
        ...
    dp_microadam.errors.InputError: steps is 0; it must be a whole number of at least 1
    """
    if not accepts(kind, value):
        raise InputError(f"{key} is {value!r}; it must be {' or '.join(rule.words for rule in rules_of(kind))}")
    return next((rule.into(value) for rule in rules_of(kind) if rule.follows(value)), None)
