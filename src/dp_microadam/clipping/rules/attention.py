"""An unfused nn.MultiheadAttention: the linear maps and products that it consists of.

torch.nn computes it in one function that hides its projections, and never calls ``out_proj``. While a model is recorded
this function takes its place: the packed projection and the output projection are then clipped like linear layers.
The batch comes first inside, whatever the order outside.
"""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dp_microadam.errors import InputError


class Unfused(TorchFunctionMode):
    """Context manager in which every nn.MultiheadAttention runs as the function below."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.multi_head_attention_forward:
            return multi_head_attention_forward(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def multi_head_attention_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """The result of ``torch.nn.functional.multi_head_attention_forward`` for the same arguments, time first."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    query, key, value = given.query, given.key, given.value
    if query.dim() != 3 or given.static_k is not None or given.static_v is not None:
        raise InputError(
            f"MultiheadAttention was given a query of shape {tuple(query.shape)}; it must have a batch dimension, and "
            "static_k and static_v are not supported"
        )
    same = query is key and key is value
    query = query.transpose(0, 1)
    key, value = (query, query) if same else (key.transpose(0, 1), value.transpose(0, 1))
    weights: Any = given.in_proj_weight
    if given.use_separate_proj_weight:
        weights = (given.q_proj_weight, given.k_proj_weight, given.v_proj_weight)
    q, k, v = _projections(query, key, value, weights, given.in_proj_bias)
    added = 0
    if given.bias_k is not None and given.bias_v is not None:
        k, v = (torch.cat([x, bias.expand(len(x), -1, -1)], 1) for x, bias in ((k, given.bias_k), (v, given.bias_v)))
        added += 1
    q, k, v = (x.unflatten(2, (given.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    if given.add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        added += 1
    mask = _merged_mask(given.attn_mask, given.key_padding_mask, given.num_heads, added, q)
    dropout = given.dropout_p if given.training else 0.0
    scores = None
    if given.need_weights:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(2, 3)
        scores = torch.softmax(scores if mask is None else scores + mask, -1)
        scores = F.dropout(scores, dropout) if dropout else scores
        mixed = scores @ v
        scores = scores.mean(1) if given.average_attn_weights else scores
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    output = F.linear(mixed.transpose(1, 2).flatten(2), given.out_proj_weight, given.out_proj_bias)
    return output.transpose(0, 1), scores


def _projections(query: Tensor, key: Tensor, value: Tensor, weights: Any, bias: Tensor | None) -> tuple[Tensor, ...]:
    if not isinstance(weights, tuple):
        if query is key and key is value:
            return F.linear(query, weights, bias).chunk(3, -1)
        weights = weights.chunk(3)
    biases: Any = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))


def _merged_mask(attention: Tensor | None, padding: Tensor | None, heads: int, added: int, like: Tensor) -> Tensor | None:
    """Both masks as one additive mask, (examples or 1, heads or 1, targets or 1, sources)."""
    merged = None
    if attention is not None:
        attention = _additive(attention, like)
        attention = attention.unflatten(0, (-1, heads)) if attention.dim() == 3 else attention[None, None]
        merged = F.pad(attention, (0, added))
    if padding is not None:
        padding = F.pad(_additive(padding, like)[:, None, None], (0, added))
        merged = padding if merged is None else merged + padding
    return merged


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)
