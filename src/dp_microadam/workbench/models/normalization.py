"""Normalization constants for the inputs of pretrained networks."""

from __future__ import annotations

from typing import NamedTuple


class Normalization(NamedTuple):
    """(x − mean)/std per channel, for pixels in [0, 1]. Public numbers, never computed from private data."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Constants that DeiT was trained with."""

CENTRED = Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Maps pixels to [−1, 1], as in the ViTs of Google and of "How to train your ViT" (Steiner et al., 2021)."""
