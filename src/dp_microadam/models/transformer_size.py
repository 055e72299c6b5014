"""The shapes that vision transformers come in."""

from __future__ import annotations

from typing import NamedTuple


class TransformerSize(NamedTuple):
    """The shape of an encoder; its MLPs are four times as wide as its tokens."""

    width: int
    layers: int
    heads: int


SIZES = {
    "tiny": TransformerSize(192, 12, 3),
    "small": TransformerSize(384, 12, 6),
    "base": TransformerSize(768, 12, 12),
    "large": TransformerSize(1024, 24, 16),
}
