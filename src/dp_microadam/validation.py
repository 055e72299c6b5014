"""Argument validation: each function returns a valid value, or raises an InputError with its name, value and allowed range.

Comparisons are written so that NaN fails every check. Unknown keyword arguments are refused with the nearest known one, and
those of Opacus with what stands for them here.
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from numbers import Real
from types import FunctionType
from typing import Any, TypeVar

from dp_microadam.errors import InputError

_LARGEST = 1e30
"""Of what is above zero: products with larger numbers, and float32, overflow."""

Function = TypeVar("Function", bound=Callable[..., Any])
Named = TypeVar("Named", bound=Any)

_OF_THE_PLAN = "the plan has it, which PrivacyPlan.solve makes"
_NO_CHOICE = "there is no choice here, leave it out"
_FIXED_NORM = "the clipping norm is fixed here; leave it out, and give max_grad_norm"

_OF_OPACUS = {
    "module": "the model is the first argument, and is not wrapped",
    "optimizer": "PrivateTrainer takes it after the model; in a loop of your own you step it yourself",
    "criterion": "the loss is loss(model, batch), which returns one value per example",
    "data_loader": "give its dataset as training data; the plan decides which examples form a batch",
    "noise_multiplier": _OF_THE_PLAN,
    "target_epsilon": "it is epsilon of PrivacyPlan.solve",
    "target_delta": "it is delta of PrivacyPlan.solve",
    "epochs": _OF_THE_PLAN,
    "sample_rate": "it is batch_size / dataset_size of the plan",
    "expected_batch_size": "it is batch_size of the plan",
    "accountant": _OF_THE_PLAN,
    "alphas": "the accountants choose their orders themselves; leave it out",
    "total_steps": "it is steps of the plan",
    "max_physical_batch_size": "it is performance=PerformanceSettings(physical_batch_size=…)",
    "secure_mode": "it is privacy=PrivacySettings(secure=True)",
    "noise_generator": "noise is drawn from the operating system's entropy; leave it out",
    "generator": "noise is drawn from the operating system's entropy; leave it out",
    "poisson_sampling": "every batch is a Poisson sample, which is what ε is computed for; leave it out",
    "rand_on_empty": "an empty sample is a step of noise alone; leave it out",
    "batch_first": "examples are the first dimension of every tensor; transpose them inside the loss",
    "loss_reduction": "the loss returns one value per example, and sums are divided by the plan's batch_size; leave it out",
    "grad_sample_mode": "each layer takes its cheapest way; leave it out",
    "wrap_model": f"models are not wrapped: {_NO_CHOICE}",
    "strict": f"examples that interact are always refused: {_NO_CHOICE}",
    "max_grad_norm": "it is privacy=PrivacySettings(max_grad_norm=…)",
    "clipping": "it is privacy=PrivacySettings(clipping=…), 'flat' or 'per-layer'",
    "normalize_clipping": _FIXED_NORM,
    "target_unclipped_quantile": _FIXED_NORM,
    "clipbound_learning_rate": _FIXED_NORM,
    "max_clipbound": _FIXED_NORM,
    "min_clipbound": _FIXED_NORM,
    "unclipped_num_std": _FIXED_NORM,
}
"""Arguments of Opacus' PrivacyEngine, DPOptimizer and BatchMemoryManager, and what stands for them here."""


_OF_SETTINGS = {
    "privacy=PrivacySettings": ("secure", "seed", "public", "unit_name", "show_private_metrics", "synthetic_batch"),
    "performance=PerformanceSettings": (
        *("physical_batch_size", "num_workers", "loader_options", "strategy", "autocast", "noise_memory_gib"),
    ),
    "record=RecordSettings": (
        *("evaluate_every", "checkpoint_every", "checkpoint_minutes", "keep_checkpoints"),
        *("config", "show_progress"),
    ),
}
"""Where options of steps and trainers are that people may pass directly."""


def refuse_unknown(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise InputError for the first of the names ``given`` that is not ``known``.

    >>> refuse_unknown("PrivateTrainer", ["secure_mode"], ["secure"])
    Traceback (most recent call last):
        ...
    dp_microadam.errors.InputError: PrivateTrainer does not take secure_mode, which is Opacus'; it is privacy=...
    >>> refuse_unknown("PrivateTrainer", ["max_grad_nrom"], ["max_grad_norm"])
    Traceback (most recent call last):
        ...
    dp_microadam.errors.InputError: PrivateTrainer does not take max_grad_nrom; did you mean max_grad_norm?
    """
    known = list(known)
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        if name in _OF_OPACUS:
            raise InputError(f"{where} does not take {name}, which is Opacus'; {_OF_OPACUS[name]}")
        for settings, names in _OF_SETTINGS.items():
            if name in names:
                raise InputError(f"{where} does not take {name} itself; it is {settings}({name}=…)")
        hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known) or 'no keyword arguments'}"
        raise InputError(f"{where} does not take {name}; {hint}")


def explicit(*further: str, where: str = "") -> Callable[[Function], Function]:
    """Have a function refuse keyword arguments that are neither in its signature nor ``further`` ones.

    With ``further`` names, those that its ``**options`` stand for, the signature that ``help`` shows has them too. ``where`` is
    what messages call it.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        if (len(own) < len(signature.parameters) and not further) or hasattr(function, "is_explicit"):
            return function  # what it passes on is refused where that arrives
        more = [name for name in further if name not in signature.parameters]
        parameters = [*own, *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in more)]
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        known = [each.name for each in parameters if each.kind in kinds and each.name not in ("self", "cls")]
        accepted, refuse = frozenset(known), refuse_unknown
        called = where or function.__qualname__.removesuffix(".__init__")

        def checked(*arguments: Any, **options: Any) -> Any:
            if not options.keys() <= accepted:
                refuse(called, options, known)
            return function(*arguments, **options)

        # With the globals of the function, by which doctest finds its examples.
        found: Any = wraps(function)(FunctionType(checked.__code__, function.__globals__, closure=checked.__closure__))
        found.is_explicit = True
        found.__signature__ = signature.replace(parameters=parameters)
        named = {each.name for each in own} | {"return"}
        found.__annotations__ = {name: kind for name, kind in function.__annotations__.items() if name in named}
        return found

    return decorate


def public(value: Named) -> Named:
    """A public class or function of this library that refuses unknown keyword arguments as :func:`explicit` does.

    A class is changed in place: its constructor, and its public methods.
    """
    if inspect.isfunction(value):
        found: Any = explicit()(value)
        home, name = sys.modules[value.__module__], value.__name__
        if getattr(home, name, None) is value:
            setattr(home, name, found)  # so that it can be pickled by its name
        return found
    if inspect.isclass(value) and not issubclass(value, BaseException):
        for name in ["__init__", *(name for name in dir(value) if not name.startswith("_"))]:
            method = inspect.getattr_static(value, name)
            function = method.__func__ if isinstance(method, classmethod | staticmethod) else method
            if inspect.isfunction(function) and function.__module__.startswith(__package__):  # a host calls its own as it likes
                found = explicit(where=f"{value.__name__}.{name}".removesuffix(".__init__"))(function)
                setattr(value, name, found if function is method else type(method)(found))
    return value


def require_in_open_closed(name: str, value: float, low: float, high: float) -> float:
    """Require ``value`` in (low, high].

    >>> require_in_open_closed("density", 0.0, 0.0, 1.0)
    Traceback (most recent call last):
        ...
    dp_microadam.errors.InputError: density is 0.0; it must lie in (0, 1]
    """
    _require_number(name, value)
    if not low < value <= high:
        raise InputError(f"{name} is {value}; it must lie in ({low:g}, {high:g}]")
    return value


def require_in_closed_open(name: str, value: float, low: float, high: float) -> float:
    """Require ``value`` in [low, high)."""
    _require_number(name, value)
    if not low <= value < high:
        raise InputError(f"{name} is {value}; it must lie in [{low:g}, {high:g})")
    return value


def require_in_open(name: str, value: float, low: float, high: float) -> float:
    """Require ``value`` in (low, high)."""
    _require_number(name, value)
    if not low < value < high:
        raise InputError(f"{name} is {value}; it must lie in ({low:g}, {high:g})")
    return value


def require_positive(name: str, value: float) -> float:
    """Require a finite ``value`` above zero."""
    _require_number(name, value)
    if not (value > 0 and math.isfinite(value)):
        raise InputError(f"{name} is {value}; it must be a finite number above 0")
    if value > _LARGEST:
        raise InputError(f"{name} is {value}; it must be at most {_LARGEST:g}")
    return value


def require_non_negative(name: str, value: float) -> float:
    """Require a finite ``value`` of at least zero."""
    _require_number(name, value)
    if not (value >= 0 and math.isfinite(value)):
        raise InputError(f"{name} is {value}; it must be a finite number of at least 0")
    return value


def require_integer(name: str, value: int, low: int, high: int | None = None) -> int:
    """Require an integer ``value`` in [low, high]; a bool does not count as an integer."""
    _refuse_long(name, value)
    what = f"at least {low}" if high is None else f"from {low} to {high}"
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if isinstance(value, bool) or number < low or (high is not None and number > high):
        raise InputError(f"{name} is {value!r}; it must be a whole number {what}")
    return number


def require_flag(name: str, value: bool) -> bool:
    """Require true or false; a number does not count as one of them."""
    if not isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; it must be true or false")
    return value


def require_one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    """Require that ``value`` is one of ``choices``."""
    if value not in choices:
        raise InputError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return value


def _require_number(name: str, value: object) -> None:
    """Refuse text, booleans and the like, which comparisons would accept or stumble over."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} is {value!r}; it must be a number")
    _refuse_long(name, value)


def _refuse_long(name: str, value: object) -> None:
    """Refuse whole numbers that neither a float nor a tensor can hold."""
    if isinstance(value, int) and value.bit_length() > 63:
        raise InputError(f"{name} is a whole number of {value.bit_length()} bits; it must have at most 63")
