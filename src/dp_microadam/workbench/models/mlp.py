"""A fully connected network."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

from dp_microadam.errors import InputError
from dp_microadam.validation import require_integer


def mlp(inputs: int, hidden: int | Sequence[int] = (128,), num_classes: int = 10) -> nn.Sequential:
    """A multilayer perceptron with ``hidden`` units per layer and tanh activations; inputs are flattened to ``inputs`` numbers.

    Tanh bounds the activations and thereby the gradients, so that clipping removes less (Papernot et al., 2021).

    >>> sum(p.numel() for p in mlp(784, [128, 64]).parameters())
    109386
    """
    require_integer("inputs", inputs, 1)
    require_integer("num_classes", num_classes, 1)
    widths = [hidden] if isinstance(hidden, int) else hidden
    if isinstance(widths, str) or not isinstance(widths, Sequence):
        raise InputError(f"hidden is {hidden!r}; it must be a whole number or a list of them")
    widths = [require_integer("hidden", width, 1) for width in widths]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise([inputs, *widths]):
        layers += [nn.Linear(before, after), nn.Tanh()]
    layers.append(nn.Linear(widths[-1] if widths else inputs, num_classes))
    return nn.Sequential(*layers)
