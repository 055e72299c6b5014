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
        owners: dict[str, Any] = {name: module for name, module in model.named_modules() if not _is_metric(module)}
        entered: set[int] = set()
        kept = [each for name, owner in owners.items() for each in _kept(name, owner, _DEPTH, entered)]
        host = self._host()
        for name, part in host.items():
            kept += _kept(name, part, 2 if isinstance(part, torch.optim.Optimizer) else 1, entered)
        changed: list[str] = []
        try:
            for name, owner in (*owners.items(), *host.items()):
                for key, value in list(vars(owner).items()):
                    if key in self._hidden or _is_logger(type(value)):  # type: ignore[arg-type]  # types are hashable
                        vars(owner)[key] = _Hidden(f"{name}.{key}".lstrip("."))
            with _no_metric_updated(model):
                losses = self._loss(model, batch)
        finally:
            changed = [what for each in reversed(kept) if (what := each.put_back()) is not None]
        if changed:
            raise PrivacyError(
                f"attribute {changed[0]!r} was changed by the loss, and would carry something of training examples out "
                "unprotected; keep figures in validation alone, on held-out examples"
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


@cache
def _is_logger(kind: type) -> bool:
    return any(hasattr(kind, method) for method in _LOGGERS)


def _kept(name: str, owner: Any, depth: int, entered: set[int]) -> Iterator[_Kept]:
    """The plain attributes of a module, or object of a host, and the containers and tensors in them.

    Objects in ``entered``, such as a configuration that all modules hold, are kept by another owner.
    """
    attributes = {key: value for key, value in vars(owner).items() if key not in _OF_TORCH}
    yield _Kept(name, vars(owner), attributes)
    for key, value in attributes.items():
        for container in _containers(value, depth, entered):
            yield _Kept(f"{name}.{key}".lstrip("."), container, container)


def _containers(value: Any, depth: int, entered: set[int]) -> Iterator[Any]:
    if depth == 0:
        return
    if isinstance(value, list | deque | set | dict | tuple):
        if not isinstance(value, tuple):
            yield value
        inside = list(value.values() if isinstance(value, dict) else value) if len(value) <= _LARGE else []
    else:
        if isinstance(value, Tensor) and not value.is_inference():
            yield value
        if depth < _DEPTH or id(value) in entered or isinstance(value, _NOT_LOOKED_INTO) or not hasattr(value, "__dict__"):
            return
        entered.add(id(value))
        yield vars(value)
        inside, depth = list(vars(value).values()), 2
    for one in inside:
        if isinstance(one, list | deque | set | dict | tuple | Tensor):
            yield from _containers(one, depth - 1, entered)


class _Kept:
    """A container or tensor, and what it held at one moment; of large ones the number of entries, or of writes."""

    def __init__(self, name: str, value: Any, held: Any) -> None:
        self.name = name
        self._value = value
        self._of_owner = held is not value
        self._mark = value._version if isinstance(value, Tensor) else len(held)
        small = (held.numel() if isinstance(held, Tensor) else len(held)) <= _LARGE
        keep: Any = Tensor.clone if isinstance(held, Tensor) else dict if isinstance(held, dict) else list
        self._before = keep(held.detach() if isinstance(held, Tensor) else held) if small else None

    def put_back(self) -> str | None:
        """Make it hold what it held; what gathered something, if it did: a number that changed, or any entry but a dict's."""
        value, before = self._value, self._before
        if isinstance(value, Tensor):
            written = value._version != self._mark
            if written and before is not None:
                with torch.no_grad():
                    value.detach().copy_(before)
            return self.name if written else None
        if before is None:
            return self.name if len(value) != self._mark else None
        if isinstance(value, dict):
            return self._put_back_entries(value, before)
        same = len(value) == len(before) and all(one is other for one, other in zip(value, before, strict=True))
        if not same:
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(before)
        return None if same else self.name

    def _put_back_entries(self, value: dict[Any, Any], before: dict[Any, Any]) -> str | None:
        changed = [key for key in before if value.get(key) is not before[key]]
        more = [key for key in value if key not in before and key not in _OF_TORCH]
        for key in more:
            dict.__delitem__(value, key)
        counted = [key for key in changed if _counted(before[key], value.get(key))]
        dict.update(value, {key: before[key] for key in changed})
        if counted and self._of_owner:
            return f"{self.name}.{counted[0]}".lstrip(".")
        return self.name if counted or (isinstance(value, Counter) and more) else None


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
