"""Clipping norms of single layers, for per-layer clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dp_microadam.errors import InputError


def layer_bounds(layers: Sequence[str], bound: float, weights: Mapping[str, float] | None) -> dict[str, float]:
    """The clipping norms C_l by layer name, in proportion to the weights, with Σ C_l² = C².

    >>> layer_bounds(["first", "second"], 5.0, {"first": 3.0, "second": 4.0})
    {'first': 3.0, 'second': 4.0}
    """
    given = dict.fromkeys(layers, 1.0) if weights is None else dict(weights)
    if given.keys() != set(layers):
        wrong = sorted(given.keys() ^ set(layers))[0]
        raise InputError(f"layer_weights must name exactly the trainable layers; {wrong!r} is missing or unknown")
    for name, weight in given.items():
        if not (math.isfinite(weight) and weight > 0):
            raise InputError(f"layer_weights[{name!r}] is {weight}; it must be a finite number above 0")
    scale = bound / math.sqrt(sum(weight**2 for weight in given.values()))
    return {name: weight * scale for name, weight in given.items()}


def layer_of(parameter: str) -> str:
    """The name of the module that owns a parameter."""
    return parameter.rpartition(".")[0]


def blocks_of(groups: list[set[str]]) -> list[set[str]]:
    """The finest partition in which no group is divided."""
    blocks: list[set[str]] = []
    for group in groups:
        apart = [block for block in blocks if block.isdisjoint(group)]
        blocks = [*apart, group.union(*(block for block in blocks if not block.isdisjoint(group)))]
    return blocks
