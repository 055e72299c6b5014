"""Normalizer-free ResNet-50 (Brock et al., 2021, "Characterizing Signal Propagation to Close the Performance Gap in
Unnormalized ResNets"), which De et al. (2022) train privately on ImageNet.

Without normalization layers, the variance of activations is controlled analytically. Filters are standardized, so that a
convolution preserves the variance of its input; the activation is γ·ReLU with γ² = 2/(1 − 1/π), which has unit
variance for standard normal inputs; a block computes x + α·g·f(β·act(x)), where β is one over the standard deviation
that x has at initialisation, so that the variance grows by α² per block. A block that changes shape takes its shortcut
after β·act(x), where the variance is one, which resets the growth.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam.errors import InputError
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d
from dp_microadam.validation import require_in_closed_open, require_integer, require_non_negative

# The standard deviation of ReLU(z) is 1/γ for z ~ N(0, 1): its second moment is 1/2 and its mean 1/√(2π).
RELU_GAIN = math.sqrt(2 / (1 - 1 / math.pi))


def scaled_relu(x: Tensor) -> Tensor:
    """γ·ReLU, which has unit variance for standard normal inputs."""
    return F.relu(x) * RELU_GAIN


class NormalizerFreeBlock(nn.Module):
    """Pre-activation bottleneck: 1×1, 3×3 and 1×1 convolutions with a quarter of the channels inside."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        *,
        alpha: float,
        expected_std: float,
        skip_gain: float,
        drop_rate: float,
        gain: bool,
    ) -> None:
        super().__init__()
        inside = out_channels // 4
        self.alpha = alpha
        self.beta = 1 / expected_std
        self.drop_rate = drop_rate
        self.conv1 = _convolution(in_channels, inside, 1, 1, gain)
        self.conv2 = _convolution(inside, inside, 3, stride, gain)
        self.conv3 = _convolution(inside, out_channels, 1, 1, gain)
        changes_shape = stride != 1 or in_channels != out_channels
        self.shortcut = _convolution(in_channels, out_channels, 1, stride, gain) if changes_shape else None
        self.skip_gain = nn.Parameter(torch.tensor(float(skip_gain)))

    def forward(self, x: Tensor) -> Tensor:
        active = scaled_relu(x) * self.beta
        shortcut = x if self.shortcut is None else self.shortcut(active)
        residual = self.conv3(scaled_relu(self.conv2(scaled_relu(self.conv1(active)))))
        if self.training and self.drop_rate > 0:
            kept = torch.rand(len(residual), 1, 1, 1, dtype=residual.dtype, device=residual.device) >= self.drop_rate
            residual = residual * kept
        return shortcut + residual * self.skip_gain * self.alpha


class NormalizerFreeResNet(nn.Module):
    """Normalizer-free ResNet; see :func:`nf_resnet_50`, whose ``blocks_per_stage`` are (3, 4, 6, 3)."""

    def __init__(
        self,
        blocks_per_stage: tuple[int, ...],
        width: int,
        num_classes: int,
        *,
        alpha: float,
        skip_gain: float,
        stochastic_depth: float,
        gain: bool,
    ) -> None:
        super().__init__()
        channels = 16 * width
        self.stem = _convolution(3, channels, 7, 2, gain)
        blocks: list[nn.Module] = []
        variance = 1.0
        for stage, count in enumerate(blocks_per_stage):
            out_channels = 64 * width * 2**stage
            for index in range(count):
                block = NormalizerFreeBlock(
                    channels,
                    out_channels,
                    stride=2 if index == 0 and stage > 0 else 1,
                    alpha=alpha,
                    expected_std=math.sqrt(variance),
                    skip_gain=skip_gain,
                    drop_rate=stochastic_depth * len(blocks) / sum(blocks_per_stage),
                    gain=gain,
                )
                blocks.append(block)
                channels = out_channels
                variance = (1.0 if index == 0 else variance) + alpha**2
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(images), kernel_size=3, stride=2, padding=1)
        return self.head(scaled_relu(self.blocks(x)).mean(dim=(2, 3)))


def nf_resnet_50(
    num_classes: int = 1000,
    *,
    width: int = 4,
    alpha: float = 0.2,
    skip_gain: float = 1.0,
    stochastic_depth: float = 0.0,
    gain: bool = True,
) -> NormalizerFreeResNet:
    """A ResNet-50 without normalization layers, for images of at least 32×32 pixels.

    Args:
        num_classes: size of the output.
        width: the stem has 16·``width`` channels, the stages 64·``width``, doubled from stage to stage.
        alpha: factor of a block's output before it is added to the shortcut.
        skip_gain: initial value of each block's trainable gain; 1 in De et al., 0 in Brock et al.
        stochastic_depth: probability that an example skips the last block; it decreases linearly to zero at the first.
        gain: whether filters have a trainable gain per channel.

    >>> sum(p.numel() for p in nf_resnet_50().parameters())
    25557048
    """
    for name, value in {"alpha": alpha, "skip_gain": skip_gain, "stochastic_depth": stochastic_depth}.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{name} is {value!r}; it must be a number")
    if not isinstance(gain, bool):
        raise InputError(f"gain is {gain!r}; it must be true or false")
    require_integer("num_classes", num_classes, 1)
    require_integer("width", width, 1)
    require_non_negative("alpha", alpha)
    require_non_negative("skip_gain", skip_gain)
    require_in_closed_open("stochastic_depth", stochastic_depth, 0, 1)
    return NormalizerFreeResNet(
        (3, 4, 6, 3), width, num_classes, alpha=alpha, skip_gain=skip_gain, stochastic_depth=stochastic_depth, gain=gain
    )


def _convolution(in_channels: int, out_channels: int, kernel: int, stride: int, gain: bool) -> WeightStandardizedConv2d:
    return WeightStandardizedConv2d(
        in_channels, out_channels, kernel, form="variance", gain=gain, stride=stride, padding=kernel // 2
    )
