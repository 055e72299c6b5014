"""Sizes of vision transformers."""

from __future__ import annotations

from typing import NamedTuple


class TransformerSize(NamedTuple):
    """Size of a transformer encoder; the hidden layers of its MLPs have four times the embedding width."""

    width: int
    layers: int
    heads: int


SIZES = {
    "tiny": TransformerSize(192, 12, 3),
    "small": TransformerSize(384, 12, 6),
    "base": TransformerSize(768, 12, 12),
    "large": TransformerSize(1024, 24, 16),
}
