"""Keeps what a loss sees of training examples out of the metrics, counters and lists that a module keeps for its loggers.

A host logs at the end of an epoch whatever a module gathered by then. Gathered inside the loss, that is training accuracy and
realised counts, without noise. What a loss gathered is not only put back but refused: a metric that silently stays empty would
be logged as if it meant something. The independence check runs the loss on synthetic examples before the first step, so that
the refusal comes before anything is written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
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

_HOOKS = _OF_TORCH - {"_parameters", "_buffers", "_modules"}
"""Those not looked at in a module inside a list, dict or object, whose parameters and buffers nothing else watches."""

_DEPTH = 4
"""Lists in dicts in lists … of an attribute that are looked at."""

_CONTAINERS = (list, deque, set, dict, tuple)
_NOT_LOOKED_INTO = (Dataset, PrivateSteps, type, FunctionType, MethodType, ModuleType, ProxyType)
"""Attributes whose own attributes are not compared: they are data, or belong to code."""

_LARGE = 65_536
"""Longer lists are not searched for others, and tensors of more numbers are refused when they change, and not put back."""

_LOGGERS = ("log_metrics", "log_metric", "log_dict", "add_scalar", "define_metric")
"""What loggers of Lightning, MLflow, Comet, Fabric, TensorBoard and Weights & Biases have a method of."""


class IsolatedLoss:
    """A per-example loss after which the Python attributes of the model, and of its host, are as they were before.

    ``host`` gives objects of the framework by name, such as its trainer, and ``hidden`` names their attributes that lead to
    loggers and callbacks: within the loss they cannot be used.

    Formal guarantees: in every module of the model, metrics among them, plain attributes hold what they held: numbers, tensors,
    lists, sets and dicts, up to four levels deep, and attributes of objects. A module in any of these is kept with its
    submodules, parameters and buffers. Numbers, lists and sets that changed, tensors that were written to, and any use of a
    logger are refused; other attributes, such as a cache or the last activations, are put back. Not seen are
    global variables, attributes of classes, objects inside objects, and files.
    """

    def __init__(self, loss: PerExample, host: Callable[[], Mapping[str, Any]], hidden: Collection[str]) -> None:
        self._loss = loss
        self._host = host
        self._hidden = hidden

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        modules, host = dict(model.named_modules()), self._host()
        entered = set(map(id, modules.values()))
        kept = [one for name, module in modules.items() for one in _kept(name, module, _DEPTH, entered)]
        for name, part in host.items():
            kept += _kept(name, part, 2 if isinstance(part, torch.optim.Optimizer) else 1, entered)
        changed: list[str] = []
        try:
            for name, owner in (*modules.items(), *host.items()):
                for key, value in list(vars(owner).items()):
                    if key in self._hidden or _is_logger(type(value)):  # type: ignore[arg-type]  # types are hashable
                        vars(owner)[key] = _Hidden(f"{name}.{key}".lstrip("."))
            losses = self._loss(model, batch)
        finally:
            changed = [what for one in reversed(kept) if (what := one.put_back()) is not None]
        if changed:
            raise PrivacyError(
                f"attribute {changed[0]!r} was changed by the loss, and would carry something of training examples out "
                "unprotected; keep figures and update metrics in validation alone, on held-out examples"
            )
        return losses


class _Hidden:
    """Stands in for what would carry figures out, and refuses whatever is asked of it."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def _refuse(self, *arguments: Any, **options: Any) -> Any:
        raise PrivacyError(
            f"{self.__dict__['_name']} was used while training examples were read; log in validation, on held-out examples"
        )

    __getattr__ = __setattr__ = __getitem__ = __iter__ = __call__ = __len__ = _refuse


@cache
def _is_logger(kind: type) -> bool:
    return any(hasattr(kind, method) for method in _LOGGERS)


def _kept(name: str, owner: Any, depth: int, entered: set[int]) -> Iterator[_Kept]:
    """The plain attributes of a module, or object of a host, and the containers and tensors in them.

    Objects in ``entered``, such as a configuration that all modules hold, are kept by another owner.
    """
    yield _Kept(name, vars(owner), of_object=True)
    for key, value in list(vars(owner).items()):
        if key not in _OF_TORCH:
            for container in _containers(value, depth, entered):
                yield _Kept(f"{name}.{key}".lstrip("."), container)


def _containers(value: Any, depth: int, entered: set[int]) -> Iterator[Any]:
    """Those in ``value``; all of a module, however deep it is found, as nothing else watches one that is no submodule."""
    is_module = isinstance(value, nn.Module)
    if depth == 0 and not is_module:
        return
    if isinstance(value, Tensor):
        if not value.is_inference():
            yield value
    elif isinstance(value, _CONTAINERS):
        if not isinstance(value, tuple):
            yield value
        inside = list(value.values() if isinstance(value, dict) else value) if len(value) <= _LARGE else []
        for one in inside:
            if isinstance(one, (*_CONTAINERS, Tensor, nn.Module)):
                yield from _containers(one, depth - 1, entered)
    elif id(value) not in entered and hasattr(value, "__dict__") and not isinstance(value, _NOT_LOOKED_INTO):
        if depth < _DEPTH and not is_module:  # an object inside an object
            return
        entered.add(id(value))
        yield vars(value)
        for key, one in list(vars(value).items()):
            if key not in _HOOKS:
                yield from _containers(one, _DEPTH if is_module else 1, entered)


class _Kept:
    """A container or tensor, and what it held at one moment."""

    def __init__(self, name: str, value: Any, *, of_object: bool = False) -> None:
        self.name, self._value, self._of_object = name, value, of_object
        if isinstance(value, Tensor):
            self._version = value._version
            self._before: Any = value.detach().clone() if value.numel() <= _LARGE else None
        else:
            self._before = dict(value) if isinstance(value, dict) else list(value)

    def put_back(self) -> str | None:
        """Make it hold what it held; what gathered something, if it did: a number that changed, or any entry but a dict's."""
        value, before = self._value, self._before
        if isinstance(value, dict):
            return self._put_back_entries(value, before)
        if isinstance(value, Tensor):
            written = value._version != self._version
            if written and before is not None:
                with torch.no_grad():
                    value.detach().copy_(before)
            return self.name if written else None
        same = len(value) == len(before) and all(one is other for one, other in zip(value, before, strict=True))
        if not same:
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(before)
        return None if same else self.name

    def _put_back_entries(self, value: dict[Any, Any], before: dict[Any, Any]) -> str | None:
        changed = [key for key in before if value.get(key) is not before[key]]
        more = [key for key in value if key not in before]
        counted = [key for key in changed if _counted(before[key], value.get(key))]
        for key in more:
            dict.__delitem__(value, key)
        dict.update(value, {key: before[key] for key in changed})
        if counted and self._of_object:
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
