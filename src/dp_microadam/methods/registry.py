"""Builds methods by name, for recipes and the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dp_microadam.errors import InputError
from dp_microadam.methods import table
from dp_microadam.methods.scale_sources import PublicExamples
from dp_microadam.methods.step_optimizers import at_path, make_optimizer, options_of, trainable
from dp_microadam.training.method import Method
from dp_microadam.training.rate_units import RunNoise
from dp_microadam.validation import explicit, require_integer, require_one_of


def builder_of(name: str) -> Callable[..., Method]:
    """The function that builds the method called ``name`` for a model."""
    entry = table.METHODS[name]
    if entry.path is not None:
        known = dict.fromkeys(option for base in entry.base_optimizers for option in options_of(base))
        found: Callable[..., Method] = explicit(*known, where=f"methods.{name.replace('-', '_')}")(at_path(entry.path))
        return found
    optimizer, default = str(entry.optimizer), entry.learning_rate

    @explicit(*options_of(optimizer), where=f"methods.{name.replace('-', '_')}")
    def build_method(model: nn.Module, *, lr: float = default, **options: Any) -> Method:
        return Method(make_optimizer(optimizer, trainable(model), lr, options))

    build_method.__name__ = build_method.__qualname__ = name.replace("-", "_")
    taken = ", ".join(f"``{option}``" for option in entry.all_options)
    build_method.__doc__ = f"{entry.summary}; {taken}."
    return build_method


def build(name: str, model: nn.Module, lr: float, options: Mapping[str, Any], lr_unit: str | None = None) -> Method:
    """Build the method called ``name`` for ``model``, with the options of a recipe; ``lr_unit`` None is the method's own.

    >>> build("dp-sgd", nn.Linear(2, 2), 4.0, {"momentum": 0.9}).optimizer.defaults["momentum"]
    0.9

    Raises:
        InputError: for an option or value that the method or its optimizer does not accept, or a model it cannot train.
    """
    require_one_of("method", name, tuple(table.METHODS))
    try:
        method = builder_of(name)(model, lr=lr, **{option: _value(value) for option, value in options.items()})
    except TypeError as error:
        given = ", ".join(f"{option} = {value!r}" for option, value in options.items())
        raise InputError(
            f"{name} does not accept {given} ({error}); give options and values that its signature takes"
        ) from None
    method.set_lr_unit(lr_unit or table.METHODS[name].lr_unit)
    return method


def refuse_bad_options(name: str, lr: float, options: Mapping[str, Any], lr_unit: str | None = None) -> None:
    """Raise what :func:`build` would raise for these options on any model, before data is read or a model is built."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    options = {option: value for option, value in options.items() if option != "head"}
    if "public" in options:
        _refuse_bad_public(options["public"])
        options["public"] = PublicExamples(torch.zeros(1, 2), lambda model, batch: model(batch).sum(1))
    with torch.random.fork_rng(devices=[]):
        build(name, model, lr, options, lr_unit).measure(RunNoise(1.0, 1.0))


def _refuse_bad_public(chosen: Any) -> None:
    """In a recipe ``public`` is the number of held-out examples that are public, or the list of their indices."""
    for number in chosen if isinstance(chosen, list) else [chosen]:
        require_integer("optimizer.public", number, 0 if isinstance(chosen, list) else 1)


def _value(value: Any) -> Any:
    """A recipe's value for Python: lists become tuples, and names of dtypes become dtypes."""
    if isinstance(value, list):
        return tuple(value)
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    return dtype if isinstance(dtype, torch.dtype) else value
