"""What gradients are multiplied by so that their norms stay within the bound, and the bounds of single layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def clipping_coefficients(norms: Tensor, bound: float, usable: Tensor) -> Tensor:
    """min(1, C/‖g‖), and zero for examples that are removed."""
    return torch.where(usable, bound / norms.clamp(min=bound), torch.zeros_like(norms))


def layer_bounds(parameters: Iterable[str], bound: float) -> dict[str, float]:
    """The clipping norms C_l of the parameters' layers, all equal, with Σ C_l² = C².

    >>> layer_bounds(["first.weight", "first.bias", "second.weight", "third.weight", "fourth.weight"], 5.0)["first"]
    2.5
    """
    layers = dict.fromkeys(map(layer_of, parameters))
    return dict.fromkeys(layers, bound / math.sqrt(len(layers)))


def layer_of(parameter: str) -> str:
    """The name of the module that owns a parameter."""
    return parameter.rpartition(".")[0]


def blocks_of(groups: Sequence[set[str]]) -> list[list[int]]:
    """The finest partition of the groups, by index, in which groups that have something in common are together.

    >>> blocks_of([{"a"}, {"b", "c"}, {"c"}])
    [[0], [1, 2]]
    """
    blocks: list[tuple[set[str], list[int]]] = []
    for index, group in enumerate(groups):
        apart = [block for block in blocks if block[0].isdisjoint(group)]
        together = [block for block in blocks if not block[0].isdisjoint(group)]
        names = group.union(*(names for names, _ in together))
        blocks = [*apart, (names, [*(i for _, members in together for i in members), index])]
    return [members for _, members in blocks]
