"""Gives every row of a batch the same random numbers, so that passes over batches of different sizes can be compared.

Removing an example from a batch shifts the random numbers of those after it: dropout gives them other masks, and their
losses change although no examples are mixed. Inside :func:`identical_random_rows` a random tensor is drawn for its first row
and repeated for the others. Every example then has the same mask, and the random stream advances by the same amount
whatever the number of examples. Attention that drops out inside a fused kernel runs without dropout.

Random tensors whose rows are not examples (noise on weights, say) repeat their first row too, which is the same in all
compared passes. Random tensors that have the examples in another dimension than the first still advance the stream by an
amount that depends on the batch size; a model that uses them is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten

# Each writes into, or is shaped like, its first tensor or its list of sizes.
_DRAWS_IN_PLACE = {
    _aten.bernoulli_,
    _aten.uniform_,
    _aten.normal_,
    _aten.random_,
    _aten.exponential_,
    _aten.geometric_,
    _aten.cauchy_,
    _aten.log_normal_,
}
_DRAWS = {
    _aten.bernoulli,
    _aten.normal,
    _aten.poisson,
    _aten.rand,
    _aten.randn,
    _aten.randint,
    _aten.rand_like,
    _aten.randn_like,
    _aten.randint_like,
}


@contextmanager
def identical_random_rows() -> Iterator[None]:
    """Context manager in which the rows of every random tensor are identical."""
    with _NoAttentionDropout(), _RepeatFirstRow():
        yield


class _RepeatFirstRow(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = func.overloadpacket
        if operation is _aten.native_dropout:
            return _dropout(func, *args, **kwargs)
        if operation not in _DRAWS and operation not in _DRAWS_IN_PLACE:
            return func(*args, **kwargs)
        rows = next((_rows(value) for value in args if _rows(value)), 0)
        if not rows:
            return func(*args, **kwargs)
        first = func(*(_first(value, rows) for value in args), **{k: _first(v, rows) for k, v in kwargs.items()})
        repeated = first.expand(rows, *first.shape[1:]).clone()
        return args[0].copy_(repeated) if operation in _DRAWS_IN_PLACE else repeated


def _rows(value: Any) -> int:
    if isinstance(value, Tensor):
        return len(value) if value.dim() else 0
    return value[0] if isinstance(value, list | tuple) and value else 0


def _first(value: Any, rows: int) -> Any:
    if _rows(value) != rows:
        return value
    return value[:1] if isinstance(value, Tensor) else [1, *value[1:]]


def _dropout(func: Any, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or not _rows(x):
        return func(x, p, train)
    scaled, mask = func(torch.ones_like(x[:1]), p, train)
    return x * scaled, mask.expand_as(x).clone()


class _NoAttentionDropout(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        if func is F.multi_head_attention_forward:  # it drops out inside, where no dispatch mode sees it
            args = (*args[:10], 0.0, *args[11:])
        return func(*args, **kwargs)
