"""Wide residual networks (Zagoruyko and Komodakis, 2016) for private training, after De et al. (2022).

They have GroupNorm instead of BatchNorm, weight-standardized convolutions, and the activation before the normalization
(ReLU → GroupNorm → convolution), so that the input of a convolution is normalized.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d
from dp_microadam.validation import require_integer


def _convolution(in_channels: int, out_channels: int, kernel: int, stride: int, standardize: bool) -> nn.Conv2d:
    if standardize:
        return WeightStandardizedConv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2)
    layer = nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2)
    nn.init.normal_(layer.weight, std=math.sqrt(1.0 / layer.weight[0].numel()))
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


class WideBlock(nn.Module):
    """Residual block: twice ReLU → GroupNorm → 3×3 convolution; the shortcut is a projection where shapes change."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, groups: int, standardize: bool) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, in_channels)
        self.conv1 = _convolution(in_channels, out_channels, 3, stride, standardize)
        self.norm2 = nn.GroupNorm(groups, out_channels)
        self.conv2 = _convolution(out_channels, out_channels, 3, 1, standardize)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.ReLU(),
                nn.GroupNorm(groups, in_channels),
                _convolution(in_channels, out_channels, 1, stride, standardize),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(self.norm1(F.relu(x)))
        out = self.conv2(self.norm2(F.relu(out)))
        return out + self.shortcut(x)


class WideResNet(nn.Module):
    """Wide-ResNet; see :func:`wide_resnet`."""

    def __init__(self, depth: int, width: int, num_classes: int, groups: int, standardize: bool) -> None:
        super().__init__()
        channels = (16, 16 * width, 32 * width, 64 * width)
        blocks_per_stage = (depth - 4) // 6
        self.stem = _convolution(3, channels[0], 3, 1, standardize)
        blocks: list[nn.Module] = []
        for stage, (before, after) in enumerate(pairwise(channels)):
            for index in range(blocks_per_stage):
                stride = 2 if index == 0 and stage > 0 else 1
                blocks.append(WideBlock(before if index == 0 else after, after, stride, groups, standardize))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.GroupNorm(groups, channels[-1])
        self.head = nn.Linear(channels[-1], num_classes)
        nn.init.normal_(self.head.weight, std=math.sqrt(1.0 / channels[-1]))
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.blocks(self.stem(x))))
        return self.head(x.mean(dim=(2, 3)))


def wide_resnet(
    depth: int = 16,
    width: int = 4,
    num_classes: int = 10,
    *,
    groups: int = 16,
    weight_standardization: bool = True,
) -> WideResNet:
    """A Wide-ResNet with GroupNorm(``groups``) and, by default, weight standardization; it has no BatchNorm.

    Convolutions are initialised as N(0, 1/fan-in) with gain 1 and bias 0, the head as N(0, 1/inputs) with bias 0.

    >>> sum(p.numel() for p in wide_resnet(depth=16, width=4).parameters())
    2753818
    """
    require_integer("depth", depth, 10)
    require_integer("width", width, 1)
    require_integer("num_classes", num_classes, 1)
    require_integer("groups", groups, 1)
    if not isinstance(weight_standardization, bool):
        raise InputError(f"weight_standardization is {weight_standardization!r}; it must be true or false")
    if (depth - 4) % 6:
        raise InputError(f"depth is {depth}; it must be 6n + 4 for a whole number n, such as 16, 28 or 40")
    if 16 % groups:
        raise InputError(f"groups is {groups}; it must divide the 16 channels of the first layer")
    return WideResNet(depth, width, num_classes, groups, weight_standardization)
