"""Builds methods and their base optimizers by name, for Python, recipes and the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from dp_microadam.errors import InputError
from dp_microadam.methods.table import METHODS, OPTIMIZERS
from dp_microadam.training.method import Method
from dp_microadam.training.rates import RunNoise, Schedule
from dp_microadam.validation import explicit, refuse_unknown, require_integer, require_one_of

_OWN_RATE = 1.0
"""The optimizer's own learning rate where a distance takes its place."""


def builder_of(name: str) -> Callable[..., Method]:
    """The function that builds the method called ``name`` for a model."""
    entry = METHODS[name]
    known = [option for base in entry.base_optimizers or (str(entry.optimizer),) for option in options_of(base)]

    @explicit(*dict.fromkeys((*entry.options, *known)), where=f"methods.{name.replace('-', '_')}")
    def build_method(
        model: nn.Module,
        *,
        lr: float | None = None,
        distance: float | None = None,
        schedule: Schedule | LRScheduler | None = None,
        average: float | None = None,
        **options: Any,
    ) -> Method:
        if lr is not None and distance is not None:
            raise InputError(f"both a learning rate ({lr:g}) and a distance ({distance:g}) are given; give one of the two")
        if lr is None and distance is None:
            lr, distance = entry.learning_rate, entry.distance
        rate = _OWN_RATE if lr is None else lr
        average = entry.average if average is None else average
        if entry.path is None:
            found = Method(make_optimizer(str(entry.optimizer), trainable(model), rate, options))
        else:
            given = {} if lr == entry.learning_rate else {"lr": rate}  # its own default may depend on its options
            found = at_path(entry.path)(model, **given, **options)
        return found.configure(distance=distance, schedule=schedule, average=average)

    build_method.__name__ = build_method.__qualname__ = name.replace("-", "_")
    taken = ", ".join(f"``{option}``" for option in entry.all_options)
    build_method.__doc__ = (
        f"{entry.summary}.\n\n    ``lr`` is a learning rate, or ``distance`` takes its place; ``schedule`` and ``average`` are "
        f"those of :class:`~dp_microadam.Method`. Options: {taken}."
    )
    return build_method


def build(
    name: str, model: nn.Module, options: Mapping[str, Any], *, lr: float | None = None, distance: float | None = None
) -> Method:
    """Build the method called ``name`` for ``model``, with the options of a recipe, whose lists stand for tuples.

    >>> build("dp-sgd", nn.Linear(2, 2), {"momentum": 0.9}).optimizer.defaults["momentum"]
    0.9

    Raises:
        InputError: for an option or value that the method or its optimizer does not accept, or a model it cannot train.
    """
    require_one_of("method", name, tuple(METHODS))
    own = {option: tuple(value) if isinstance(value, list) else value for option, value in options.items()}
    return builder_of(name)(model, lr=lr, distance=distance, **own)


def refuse_bad_options(
    name: str, options: Mapping[str, Any], *, lr: float | None = None, distance: float | None = None
) -> None:
    """Raise what :func:`build` would raise for these options on any model, before data is read or a model is built.

    ``public`` is the number of held-out examples that are public there, or the list of their indices.
    """
    from dp_microadam.methods.scaling import PublicExamples

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    options = {option: value for option, value in options.items() if option != "head"}
    if "public" in options:
        chosen = options["public"]
        for number in chosen if isinstance(chosen, list) else [chosen]:
            require_integer("optimizer.public", number, 0 if isinstance(chosen, list) else 1)
        options["public"] = PublicExamples(torch.zeros(1, 2), lambda model, batch: model(batch).sum(1))
    with torch.random.fork_rng(devices=[]):
        build(name, model, options, lr=lr, distance=distance).prepare(RunNoise(1.0, 1, 1.0), 1)


def make_optimizer(name: str, params: Iterable[Tensor], lr: float, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Create the optimizer called ``name``; options or values that it does not accept raise an InputError.

    >>> make_optimizer("sgd", [nn.Parameter(torch.zeros(2))], 4.0, {"momentum": 0.9}).defaults["momentum"]
    0.9
    """
    refuse_unknown(name, options, options_of(name))
    try:
        optimizer: torch.optim.Optimizer = at_path(OPTIMIZERS[name].path)(params, lr=lr, **options)
        return optimizer
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{option} = {value!r}" for option, value in options.items())
        raise InputError(
            f"{name} does not accept {given or f'lr = {lr}'} ({error}); give options and values that its signature takes"
        ) from None


def options_of(name: str) -> list[str]:
    """The options of the optimizer called ``name``, besides its learning rate."""
    return [option for option in inspect.signature(at_path(OPTIMIZERS[name].path)).parameters if option not in ("params", "lr")]


def at_path(path: str) -> Any:
    """Import the object at ``module:name``.

    >>> at_path("torch.optim:SGD").__name__
    'SGD'
    """
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
