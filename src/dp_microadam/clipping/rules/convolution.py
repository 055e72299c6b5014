"""Convolutions in one, two and three dimensions, with any stride, padding, dilation and groups.

Two facts keep patches from being copied out of the image:

- *Direct gradients.* A batch of n images with G groups is, as far as a weight gradient is concerned, one image with n·G
  groups: the library's own weight-gradient kernel then returns one gradient per example.
- *Gram matrices of patches.* At stride 1 the product of the patches at t and t' is the sum over the kernel's shifts s
  of the product of the pixels at t+s and t'+s: K^d times fewer multiplications than with patches. The sum
  over shifts is taken one dimension after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam.clipping.cost import Shapes
from dp_microadam.clipping.outer_product import Factors, Measured, folded, measured_by_grams
from dp_microadam.clipping.rules.rule import OuterProductRule

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True)
class Geometry:
    """A convolution's shape, with the padding that the kernel itself can do; the rest is done to the input first."""

    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight_shape[2:]


def geometry_of(module: Convolution) -> tuple[Geometry, list[int]]:
    """The geometry, and the padding to apply beforehand in the order of ``F.pad`` (empty if there is none)."""
    margins = list(module._reversed_padding_repeated_twice)
    symmetric = margins[::2] == margins[1::2]
    done_by_kernel = module.padding_mode == "zeros" and symmetric
    geometry = Geometry(
        weight_shape=tuple(module.weight.shape),
        stride=tuple(module.stride),
        padding=tuple(margins[::2][::-1]) if done_by_kernel else (0,) * len(module.stride),
        dilation=tuple(module.dilation),
        groups=module.groups,
    )
    return geometry, [] if done_by_kernel or not any(margins) else margins


class ConvolutionFactors(Factors):
    """a as (B·r, channels, *image) and δ as (B·r, outputs, *map), with r consecutive images for each example."""

    def __init__(self, inputs: Tensor, deltas: Tensor, geometry: Geometry, rows_per_example: int = 1) -> None:
        super().__init__(inputs, deltas, rows_per_example)
        self.geometry = geometry

    def gradient_size(self) -> int:
        return prod(self.geometry.weight_shape) * self.rows_per_example

    def per_example(self, rows: slice | Tensor) -> Tensor:
        count = self.rows_per_example
        if isinstance(rows, slice):
            rows = slice(rows.start * count, rows.stop * count)
        elif count > 1:
            rows = (rows.unsqueeze(1) * count + torch.arange(count, device=rows.device)).flatten()
        return folded(gradients_in_groups(self.inputs[rows], self.deltas[rows], self.geometry), count)

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        rows = self.rows_per_example
        own = coefficients if rows == 1 else coefficients.repeat_interleave(rows)
        scaled = self.deltas * own.view(-1, *[1] * (self.deltas.dim() - 1))
        return weight_gradient(self.inputs, scaled, self.geometry.weight_shape, self.geometry, self.geometry.groups)

    def ghost(self) -> Measured:
        by_shifts = all(step == 1 for step in self.geometry.stride)
        inputs, deltas = self._grams_by_shifts() if by_shifts else self._grams_by_offsets()
        return measured_by_grams(inputs, deltas, len(self))

    def _grouped(self, tensor: Tensor) -> Tensor:
        """(B·G, channels of a group, r · pixels)."""
        rows = self.rows_per_example
        if rows == 1:
            return tensor.reshape(len(tensor) * self.geometry.groups, -1, prod(tensor.shape[2:]))
        apart = tensor.reshape(-1, rows, self.geometry.groups, tensor.shape[1] // self.geometry.groups, prod(tensor.shape[2:]))
        return apart.permute(0, 2, 3, 1, 4).flatten(3).flatten(0, 1)

    def _grams_by_shifts(self) -> tuple[Tensor, Tensor]:
        size, rows = self.inputs.shape[2:], self.rows_per_example
        inputs = _pairs_of_images(grams_of(self._grouped(self.inputs)), rows).view(-1, *size, *size)
        for dimension, length in enumerate(self.deltas.shape[2:]):
            inputs = self._sum_over_shifts(inputs, dimension, length)
        deltas = grams_of(self._grouped(self.deltas))
        if rows == 1:
            return inputs.reshape(deltas.shape), deltas
        positions = prod(self.deltas.shape[2:])
        pairs = inputs.reshape(len(deltas), rows, rows, positions, positions)
        return pairs.transpose(2, 3).reshape(deltas.shape), deltas

    def _sum_over_shifts(self, grams: Tensor, dimension: int, length: int) -> Tensor:
        """Σₖ G[t + k, t' + k] along one dimension of the image, over ``length`` positions; zero outside the image."""
        first, second = 1 + dimension, 1 + dimension + len(self.geometry.kernel)
        pixels, padding = grams.shape[first], self.geometry.padding[dimension]
        shape = list(grams.shape)
        shape[first] = shape[second] = length
        total = grams.new_zeros(shape)
        for k in range(self.geometry.kernel[dimension]):
            shift = k * self.geometry.dilation[dimension] - padding
            start, stop = max(0, -shift), min(length, pixels - shift)
            if start < stop:
                count = stop - start
                shifted = grams.narrow(first, start + shift, count).narrow(second, start + shift, count)
                total.narrow(first, start, count).narrow(second, start, count).add_(shifted)
        return total

    def _grams_by_offsets(self) -> tuple[Tensor, Tensor]:
        margins = [side for margin in reversed(self.geometry.padding) for side in (margin, margin)]
        images = F.pad(self.inputs, margins) if any(margins) else self.inputs
        deltas = grams_of(self._grouped(self.deltas))
        inputs = torch.zeros_like(deltas)
        for offset in product(*map(range, self.geometry.kernel)):
            pixels = self._grouped(images[(slice(None), slice(None), *self._seen_at(offset))])
            inputs.baddbmm_(pixels.transpose(1, 2), pixels)
        return inputs, deltas

    def _seen_at(self, offset: tuple[int, ...]) -> list[slice]:
        """The pixels that meet the kernel's element at ``offset``, over all output positions."""
        starts = [o * d for o, d in zip(offset, self.geometry.dilation, strict=True)]
        lengths = self.deltas.shape[2:]
        steps = self.geometry.stride
        return [slice(b, b + (n - 1) * s + 1, s) for b, n, s in zip(starts, lengths, steps, strict=True)]


def grams_of(flat: Tensor) -> Tensor:
    """Products of all pairs of pixels of (B, channels, pixels), as (B, pixels, pixels)."""
    return flat.transpose(1, 2) @ flat


def _pairs_of_images(grams: Tensor, rows: int) -> Tensor:
    """(B, rows · pixels, rows · pixels) as products of single images, (B·rows², pixels, pixels)."""
    if rows == 1:
        return grams
    pixels = grams.shape[1] // rows
    return grams.view(-1, rows, pixels, rows, pixels).transpose(2, 3).reshape(-1, pixels, pixels)


def gradients_in_groups(inputs: Tensor, deltas: Tensor, geometry: Geometry) -> Tensor:
    """gᵢ of every example, (B, *weight shape), by the library's weight gradient with one group per example."""
    count = len(inputs)
    outputs, *filter_shape = geometry.weight_shape
    # By way of one dimension, since a channels-last image of one pixel would keep strides that torch takes for channels-last.
    inputs, deltas = (images.reshape(-1).view(1, -1, *images.shape[2:]) for images in (inputs, deltas))
    gradients = weight_gradient(inputs, deltas, (count * outputs, *filter_shape), geometry, count * geometry.groups)
    return gradients.view(count, outputs, *filter_shape)


def weight_gradient(inputs: Tensor, deltas: Tensor, shape: tuple[int, ...], geometry: Geometry, groups: int) -> Tensor:
    """The library's weight gradient, in the full precision of its operands."""
    placeholder = inputs.new_empty(1).expand(shape)  # the kernel asks for the weight's shape, not for its values
    no_output_padding = [0] * len(geometry.stride)
    _, gradient, _ = torch.ops.aten.convolution_backward(
        deltas,
        inputs,
        placeholder,
        None,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        False,
        no_output_padding,
        groups,
        [False, True, False],
    )
    return gradient


def padded_shape(inputs: Tensor, margins: list[int]) -> torch.Size:
    """Shape of one example after ``F.pad`` with these margins."""
    shape = list(inputs.shape[1:])
    for index in range(len(margins) // 2):
        shape[-1 - index] += margins[2 * index] + margins[2 * index + 1]
    return torch.Size(shape)


class ConvolutionRule(OuterProductRule):
    module: Convolution

    def __init__(self, name: str, module: nn.Module, trainable: tuple[str, ...], forced_strategy: str | None = None) -> None:
        super().__init__(name, module, trainable, forced_strategy)
        self.geometry, self.margins = geometry_of(self.module)

    def factors(self, inputs: Tensor, deltas: Tensor, rows: int) -> ConvolutionFactors:
        if self.margins:
            mode = "constant" if self.module.padding_mode == "zeros" else self.module.padding_mode
            inputs = F.pad(inputs, self.margins, mode=mode)
        return ConvolutionFactors(inputs, deltas, self.geometry, rows)

    def bias_gradients(self, deltas: Tensor, rows: int) -> Tensor:
        return folded(deltas.flatten(2).sum(2), rows)

    def shapes(self, factors: Factors) -> Shapes:
        inputs = factors.inputs
        return convolution_shapes(self.geometry, inputs.shape[1:], inputs.element_size(), factors.rows_per_example)


def convolution_shapes(geometry: Geometry, image_shape: torch.Size, itemsize: int, rows: int = 1) -> Shapes:
    """The numbers that the choice of a strategy depends on, for an example of so many images.

    Gram matrices grow with the square of their number, everything else with the number. Their pairs are copied apart and back.
    """
    channels, *image = image_shape
    padded = [n + 2 * p for n, p in zip(image, geometry.padding, strict=True)]
    reach = [d * (k - 1) for d, k in zip(geometry.dilation, geometry.kernel, strict=True)]
    positions = prod((n - r - 1) // s + 1 for n, r, s in zip(padded, reach, geometry.stride, strict=True))
    weights, outputs, taps = prod(geometry.weight_shape), geometry.weight_shape[0], prod(geometry.kernel)
    if all(step == 1 for step in geometry.stride):
        pixels = prod(image)
        input_gram, passes = pixels**2 * channels, sum(geometry.kernel) * pixels**2
    else:
        input_gram, passes = positions**2 * channels * taps, positions * channels * taps
    if rows > 1:
        passes += prod(image) ** 2 + positions**2
    return Shapes(
        weights=weights,
        activations=rows * (prod(image_shape) + positions * outputs),
        product=float(rows * positions * weights),
        gram=float(rows**2 * (input_gram + positions**2 * outputs)),
        gram_passes=float(rows**2 * passes * geometry.groups),
        itemsize=itemsize,
    )


class TransposedConvolutionRule(ConvolutionRule):
    masks_rows = False  # rows of the weight belong to inputs

    def factors(self, inputs: Tensor, deltas: Tensor, rows: int) -> ConvolutionFactors:
        # Output padding of a stride or more leaves room for further positions of the convolution, where nothing came from.
        more = [side for p, s in zip(self.module.output_padding, self.module.stride, strict=True) for side in (p // s, 0)][::-1]
        return ConvolutionFactors(deltas, F.pad(inputs, more) if any(more) else inputs, self.geometry, rows)
