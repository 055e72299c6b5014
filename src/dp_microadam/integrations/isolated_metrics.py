"""Keeps what a loss sees of training examples out of the metrics, counters and lists that a module keeps for its loggers.

A host logs at the end of an epoch whatever a module gathered by then. Gathered inside the loss, that is training accuracy and
realised counts, without noise. Updates of metrics and additions to counters and lists are refused rather than undone: a metric
that silently stays empty would be logged as if it meant something. The independence check runs the loss on synthetic examples
before the first step, so that the refusal comes before anything is written.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ProxyType

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dp_microadam.errors import PrivacyError
from dp_microadam.integrations.private_steps import PrivateSteps
from dp_microadam.training.evaluation import PerExample

_OF_TORCH = frozenset(nn.Module().__dict__)
"""Attributes of every module: parameters, buffers, submodules, hooks. The first two are watched where gradients are clipped."""

_DEPTH = 4
"""Lists in dicts in lists … of an attribute that are looked at."""

_NOT_LOOKED_INTO = (Tensor, nn.Module, Dataset, PrivateSteps, type, FunctionType, MethodType, ModuleType, ProxyType)
"""Attributes whose own attributes are not compared: they are looked at otherwise, are data, or belong to code."""

_LARGE = 65_536
"""Longer lists, and tensors of more numbers, are refused when they change, and not put back."""


class IsolatedLoss:
    """A per-example loss after which the Python attributes of the model, and of its host, are as they were before.

    ``host`` gives objects of the framework by name, such as its trainer, and ``hidden`` names their attributes that lead to
    loggers and callbacks: within the loss they cannot be used.

    Formal guarantees: in every module of the model, no torchmetrics ``Metric`` was updated, and plain attributes hold what
    they held: numbers, tensors, lists, sets and dicts, up to four levels deep, and attributes of objects. Updates of metrics
    are refused, and so are numbers, lists and sets that changed, tensors that were written to, and any use of a logger; other
    attributes, such as a cache or the last activations, are put back. Not seen are global variables, attributes of classes,
    objects inside objects, and files.
    """

    def __init__(self, loss: PerExample, host: Callable[[], Mapping[str, Any]], hidden: Collection[str]) -> None:
        self._loss = loss
        self._host = host
        self._hidden = hidden

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        owners = {name: module for name, module in model.named_modules() if not _is_metric(module)}
        entered: set[int] = set()
        kept = [_KeptAttributes(name, module, _DEPTH, entered) for name, module in owners.items()]
        kept += [
            _KeptAttributes(name, part, 2 if isinstance(part, torch.optim.Optimizer) else 1, entered)
            for name, part in self._host().items()
        ]
        changed: list[str] = []
        try:
            for each in kept:
                each.hide(self._hidden)
            with _no_metric_updated(model):
                losses = self._loss(model, batch)
        finally:
            for each in kept:
                changed += each.put_back()
        if changed:
            raise PrivacyError(
                f"{changed[0]} was changed by the loss, and would carry something of training examples out unprotected; "
                "keep figures in validation alone, on held-out examples"
            )
        return losses


@contextmanager
def nothing_logged(trainer: Any) -> Iterator[None]:
    """Put back the metrics that a Lightning trainer keeps for callbacks, loggers and the progress bar, and refuse new ones."""
    names = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
    before = {name: dict(getattr(trainer, name)) for name in names}
    changed = []
    try:
        yield
    finally:
        for name in names:
            now = getattr(trainer, name)
            if {key: str(value) for key, value in now.items()} != {key: str(value) for key, value in before[name].items()}:
                now.clear()
                now.update(before[name])
                changed.append(name)
    if changed:
        raise PrivacyError(
            f"trainer.{changed[0]} was changed while training examples were read, whose losses and metrics are private; "
            "log metrics in validation_step, on held-out examples"
        )


class _Hidden:
    """Stands in for what would carry figures out, and refuses whatever is asked of it."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def _refuse(self, *arguments: Any, **options: Any) -> Any:
        raise PrivacyError(
            f"{self.__dict__['_name']} was used while training examples were read; log in validation, on held-out examples"
        )

    __getattr__ = __setattr__ = __getitem__ = __iter__ = __call__ = __len__ = _refuse


_LOGGERS = ("log_metrics", "log_metric", "log_dict", "add_scalar", "define_metric")
"""What loggers of Lightning, MLflow, Comet, Fabric, TensorBoard and Weights & Biases have a method of."""


class _KeptAttributes:
    """The plain attributes of one module, or object of a host, at one moment."""

    def __init__(self, name: str, module: Any, depth: int, entered: set[int]) -> None:
        self._prefix = f"{name}." if name else ""
        self._module = module
        self._before = {key: value for key, value in module.__dict__.items() if key not in _OF_TORCH}
        self._marks = [(key, restore) for key, value in self._before.items() for restore in _ways_back(value, depth, entered)]

    def hide(self, names: Collection[str]) -> None:
        """Let nobody use the attributes with these names, nor loggers, until they are put back."""
        for key, value in self._before.items():
            if key in names or _is_logger(type(value)):  # type: ignore[arg-type]  # types are hashable
                self._module.__dict__[key] = _Hidden(self._prefix + key)

    def put_back(self) -> list[str]:
        """The names of attributes that gathered something; all of them are put back."""
        attributes = self._module.__dict__
        gathered = [key for key, restore in self._marks if restore()]
        for key in [key for key in attributes if key not in _OF_TORCH]:
            if key not in self._before:
                del attributes[key]
            elif attributes[key] is not self._before[key]:
                gathered += [key] if _counted(self._before[key], attributes[key]) else []
                attributes[key] = self._before[key]
        for key in self._before.keys() - attributes.keys():
            attributes[key] = self._before[key]
        return [f"attribute {self._prefix + key!r}" for key in gathered]


@cache
def _is_logger(kind: type) -> bool:
    return any(hasattr(kind, method) for method in _LOGGERS)


def _ways_back(value: Any, depth: int, entered: set[int]) -> Iterator[Callable[[], bool]]:
    """Functions that put a container, or what is inside, back, and say whether it gathered something.

    Objects in ``entered``, such as a configuration that all modules hold, have theirs.
    """
    if depth == 0:
        return
    if isinstance(value, list | deque):
        yield _list_back(value)
        inside: list[Any] = list(value) if len(value) <= _LARGE else []
    elif isinstance(value, set):
        yield _set_back(value)
        inside = []
    elif isinstance(value, dict):
        yield _dict_back(value)
        inside = list(value.values()) if len(value) <= _LARGE else []
    elif isinstance(value, tuple):
        inside = list(value)
    else:
        if isinstance(value, Tensor) and not value.is_inference():
            yield _tensor_back(value)
        if depth < _DEPTH or id(value) in entered or isinstance(value, _NOT_LOOKED_INTO) or not hasattr(value, "__dict__"):
            return
        entered.add(id(value))
        yield _dict_back(value.__dict__)
        inside, depth = list(value.__dict__.values()), 2
    for one in inside:
        if isinstance(one, list | deque | set | dict | tuple | Tensor):
            yield from _ways_back(one, depth - 1, entered)


def _list_back(value: list[Any] | deque[Any]) -> Callable[[], bool]:
    before, count = (list(value), len(value)) if len(value) <= _LARGE else (None, len(value))

    def restore() -> bool:
        same = len(value) == count and (before is None or all(one is other for one, other in zip(value, before, strict=True)))
        if not same and before is not None:
            value.clear()
            value.extend(before)
        return not same

    return restore


def _set_back(value: set[Any]) -> Callable[[], bool]:
    before = set(value)

    def restore() -> bool:
        same = value == before
        if not same:
            value.clear()
            value.update(before)
        return not same

    return restore


def _dict_back(value: dict[Any, Any]) -> Callable[[], bool]:
    before = dict(value)

    def restore() -> bool:
        changed = [key for key in before if key not in value or value[key] is not before[key]]
        gathered = isinstance(value, Counter) and dict(value) != before
        gathered = gathered or any(_counted(before[key], value.get(key)) for key in changed)
        if changed or len(value) != len(before):
            value.clear()
            value.update(before) if not isinstance(value, Counter) else dict.update(value, before)
        return gathered

    return restore


def _tensor_back(value: Tensor) -> Callable[[], bool]:
    version = value._version
    before = value.detach().clone() if value.numel() <= _LARGE else None

    def restore() -> bool:
        if value._version == version:
            return False
        if before is not None:
            with torch.no_grad():
                value.detach().copy_(before)
        return True

    return restore


def _counted(before: Any, now: Any) -> bool:
    """Whether a number became another, as counters and sums do; a flag is no figure."""
    if not (_is_number(before) and _is_number(now)):
        return False
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        return True  # what is inside may not be looked at while gradients are taken of many examples at once
    return bool(before != now)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def _is_metric(value: Any) -> bool:
    """Whether it is a torchmetrics Metric; where that library was not imported, nothing is."""
    metrics = sys.modules.get("torchmetrics")
    return metrics is not None and isinstance(value, metrics.Metric)


@contextmanager
def _no_metric_updated(model: nn.Module) -> Iterator[None]:
    """Refuse updates of every Metric in the model, its lists and dicts, before they change anything."""
    replaced: list[tuple[Any, dict[str, Any]]] = []
    try:
        for name, metric in _metrics_of(model):
            own = {key: metric.__dict__[key] for key in ("update", "forward") if key in metric.__dict__}
            replaced.append((metric, own))
            metric.__dict__.update(update=_refusing(name, metric), forward=_refusing(name, metric))
        yield
    finally:
        for metric, own in reversed(replaced):
            for key in ("update", "forward"):
                metric.__dict__.pop(key, None)
            metric.__dict__.update(own)


def _metrics_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    if "torchmetrics" not in sys.modules:
        return
    seen: set[int] = set()
    for name, module in model.named_modules():
        found = [(name, module)]
        for key, value in module.__dict__.items():
            if key not in _OF_TORCH and isinstance(value, list | tuple | dict) and len(value) <= _LARGE:
                held = value.values() if isinstance(value, dict) else value
                modules = [each for each in held if isinstance(each, nn.Module)]
                found += [(f"{name}.{key}" if name else key, one) for each in modules for one in each.modules()]
        for where, one in found:
            if _is_metric(one) and id(one) not in seen:
                seen.add(id(one))
                yield where, one


def _refusing(name: str, metric: Any) -> Callable[..., Any]:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise PrivacyError(
            f"metric {name!r} ({type(metric).__name__}) was updated from training examples, and would be logged unprotected; "
            "call it in validation_step, on held-out examples"
        )

    return refuse
