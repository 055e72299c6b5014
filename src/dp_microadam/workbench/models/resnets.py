"""Residual networks for private training from scratch, as De et al. (2022) train them: without statistics of batches.

Wide-ResNets (Zagoruyko and Komodakis, 2016) have GroupNorm instead of BatchNorm, weight-standardized convolutions, and the
activation before the normalization (ReLU → GroupNorm → convolution), so that the input of a convolution is normalized.

The normalizer-free ResNet-50 is that of Brock et al. (2021, "Characterizing Signal Propagation to Close the Performance Gap in
Unnormalized ResNets"). Without normalization layers, the variance of activations is controlled analytically. Filters are
standardized, so that a convolution preserves the variance of its input; the activation is γ·ReLU with γ² = 2/(1 − 1/π), which
has unit variance for standard normal inputs; a block computes x + α·g·f(β·act(x)), where β is one over the standard deviation
that x has at initialisation, so that the variance grows by α² per block. A block that changes shape takes its shortcut after
β·act(x), where the variance is one, which resets the growth.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d
from dp_microadam.validation import require_flag, require_integer

# The standard deviation of ReLU(z) is 1/γ for z ~ N(0, 1): its second moment is 1/2 and its mean 1/√(2π).
RELU_GAIN = math.sqrt(2 / (1 - 1 / math.pi))

_ALPHA = 0.2
"""Factor of a block's output before it is added to the shortcut."""


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
            projection = _convolution(in_channels, out_channels, 1, stride, standardize)
            self.shortcut = nn.Sequential(nn.ReLU(), nn.GroupNorm(groups, in_channels), projection)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(self.norm1(F.relu(x)))
        out = self.conv2(self.norm2(F.relu(out)))
        return out + self.shortcut(x)


class WideResNet(nn.Module):
    """Wide-ResNet; see :func:`wide_resnet`."""

    def __init__(self, depth: int, width: int, num_classes: int, groups: int, standardize: bool) -> None:
        super().__init__()
        channels = (16, 16 * width, 32 * width, 64 * width)
        self.stem = _convolution(3, channels[0], 3, 1, standardize)
        blocks: list[nn.Module] = []
        for stage, (before, after) in enumerate(pairwise(channels)):
            for index in range((depth - 4) // 6):
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
    depth: int = 16, width: int = 4, num_classes: int = 10, *, groups: int = 16, weight_standardization: bool = True
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
    require_flag("weight_standardization", weight_standardization)
    if (depth - 4) % 6:
        raise InputError(f"depth is {depth}; it must be 6n + 4 for a whole number n, such as 16, 28 or 40")
    if 16 % groups:
        raise InputError(f"groups is {groups}; it must divide the 16 channels of the first layer")
    return WideResNet(depth, width, num_classes, groups, weight_standardization)


def _normalizer_free(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> WeightStandardizedConv2d:
    return WeightStandardizedConv2d(
        in_channels, out_channels, kernel, form="variance", gain=True, stride=stride, padding=kernel // 2
    )


def scaled_relu(x: Tensor) -> Tensor:
    """γ·ReLU, which has unit variance for standard normal inputs."""
    return F.relu(x) * RELU_GAIN


class NormalizerFreeBlock(nn.Module):
    """Pre-activation bottleneck: 1×1, 3×3 and 1×1 convolutions with a quarter of the channels inside."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expected_std: float) -> None:
        super().__init__()
        inside = out_channels // 4
        self.beta = 1 / expected_std
        self.conv1 = _normalizer_free(in_channels, inside, 1)
        self.conv2 = _normalizer_free(inside, inside, 3, stride)
        self.conv3 = _normalizer_free(inside, out_channels, 1)
        changes_shape = stride != 1 or in_channels != out_channels
        self.shortcut = _normalizer_free(in_channels, out_channels, 1, stride) if changes_shape else None
        self.skip_gain = nn.Parameter(torch.tensor(1.0))  # as in De et al.; Brock et al. begin with 0

    def forward(self, x: Tensor) -> Tensor:
        active = scaled_relu(x) * self.beta
        shortcut = x if self.shortcut is None else self.shortcut(active)
        residual = self.conv3(scaled_relu(self.conv2(scaled_relu(self.conv1(active)))))
        return shortcut + residual * self.skip_gain * _ALPHA


class NormalizerFreeResNet(nn.Module):
    """Normalizer-free ResNet; see :func:`nf_resnet_50`, whose ``blocks_per_stage`` are (3, 4, 6, 3)."""

    def __init__(self, blocks_per_stage: tuple[int, ...], width: int, num_classes: int) -> None:
        super().__init__()
        channels = 16 * width
        self.stem = _normalizer_free(3, channels, 7, 2)
        blocks: list[nn.Module] = []
        variance = 1.0
        for stage, count in enumerate(blocks_per_stage):
            out_channels = 64 * width * 2**stage
            for index in range(count):
                stride = 2 if index == 0 and stage > 0 else 1
                blocks.append(NormalizerFreeBlock(channels, out_channels, stride, math.sqrt(variance)))
                channels = out_channels
                variance = (1.0 if index == 0 else variance) + _ALPHA**2
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(images), kernel_size=3, stride=2, padding=1)
        return self.head(scaled_relu(self.blocks(x)).mean(dim=(2, 3)))


def nf_resnet_50(num_classes: int = 1000, *, width: int = 4) -> NormalizerFreeResNet:
    """A ResNet-50 without normalization layers, for images of at least 32×32 pixels.

    The stem has 16·``width`` channels, the stages 64·``width``, doubled from stage to stage.

    >>> sum(p.numel() for p in nf_resnet_50().parameters())
    25557048
    """
    require_integer("num_classes", num_classes, 1)
    require_integer("width", width, 1)
    return NormalizerFreeResNet((3, 4, 6, 3), width, num_classes)
