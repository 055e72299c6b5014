"""Small networks for quick private training on one machine.

Tanh bounds the activations and thereby the gradients, so that clipping removes less (Papernot et al., 2021).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.validation import require_integer


class ChannelsLastMaxPool2d(nn.MaxPool2d):
    """:class:`torch.nn.MaxPool2d` with the channels of a pixel side by side in memory.

    On a CPU, PyTorch's kernel for that layout takes several channels at a time, that for rows of pixels one number at a
    time: for the 26,010-parameter network it was the largest part of a step. Convolutions that follow keep the layout.
    Dimensions are moved instead of asking for ``torch.channels_last``, because ``torch.func.vmap`` knows no memory formats.
    """

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.movedim(-3, -1).contiguous().movedim(-1, -3))


def mlp(inputs: int, hidden: int | Sequence[int] = (128,), num_classes: int = 10) -> nn.Sequential:
    """A multilayer perceptron with ``hidden`` units per layer and tanh activations; inputs are flattened to ``inputs`` numbers.

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
    return nn.Sequential(*layers, nn.Linear(widths[-1] if widths else inputs, num_classes))


def tanh_cnn(num_classes: int = 10) -> nn.Sequential:
    """The convolutional network with tanh activations of Papernot et al. (2021, "Tempered Sigmoid Activations for Deep Learning
    with Differential Privacy").

    For 28×28 images with one channel; 26,010 parameters with ten classes.

    >>> sum(p.numel() for p in tanh_cnn().parameters())
    26010
    """
    require_integer("num_classes", num_classes, 1)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=3),
        nn.Tanh(),
        ChannelsLastMaxPool2d(kernel_size=2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.Tanh(),
        ChannelsLastMaxPool2d(kernel_size=2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, num_classes),
    )


def small_cnn(num_classes: int = 10, width: int = 32, in_channels: int = 3) -> nn.Sequential:
    """A small convolutional network: four convolutions, average pooling and a linear head, for images of at least 8×8 pixels.

    >>> sum(p.numel() for p in small_cnn().parameters())
    103786
    """
    require_integer("num_classes", num_classes, 1)
    require_integer("width", width, 1)
    require_integer("in_channels", in_channels, 1)
    return nn.Sequential(
        nn.Conv2d(in_channels, width, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(width, width, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(2 * width, 4 * width, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, num_classes),
    )
