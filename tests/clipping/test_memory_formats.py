"""Channels-last images and bfloat16 activations: norms and sums as exact as promised, without copies that are not needed."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dp_microadam.clipping.outer_product import OuterProductSum
from dp_microadam.clipping.rules.convolution import ConvolutionFactors, ConvolutionRule, Geometry
from dp_microadam.clipping.rules.linear import LinearRule

CHANNELS_LAST = torch.channels_last


class Copies(TorchDispatchMode):
    """Elements that were copied only to be laid out anew."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if str(function).split(".")[1] in ("clone", "_to_copy", "copy_", "contiguous", "_reshape_copy"):
            self.elements += found.numel()
        return found


@pytest.mark.parametrize(("strategy", "images"), [("ghost", 0), ("keep", 1), ("drop", 1)])
def test_channels_last_images_are_copied_at_most_once(strategy, images):
    """One group per example needs the channels of all examples side by side, which channels-last images do not have."""
    torch.manual_seed(0)
    geometry = Geometry((4, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    inputs, deltas = (torch.randn(5, n, 8, 8).to(memory_format=CHANNELS_LAST) for n in (3, 4))
    with Copies() as copies:
        part = OuterProductSum(ConvolutionFactors(inputs, deltas, geometry), strategy)
        part.squared_norms()
        part.weighted_sum(torch.rand(5))
    assert copies.elements == images * (inputs.numel() + deltas.numel())


@pytest.mark.parametrize("strategy", ["ghost", "keep", "drop"])
def test_contiguous_images_are_not_copied(strategy):
    geometry = Geometry((4, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    with Copies() as copies:
        part = OuterProductSum(ConvolutionFactors(torch.randn(5, 3, 8, 8), torch.randn(5, 4, 8, 8), geometry), strategy)
        part.squared_norms()
        part.weighted_sum(torch.rand(5))
    assert copies.elements == 0


RULES = {
    "linear": (lambda strategy: LinearRule("", nn.Linear(9, 7), ("weight", "bias"), strategy), (6, 9), (6, 7)),
    "convolution": (
        lambda strategy: ConvolutionRule("", nn.Conv2d(3, 4, 3, padding=1), ("weight", "bias"), strategy),
        (3, 6, 6),
        (4, 6, 6),
    ),
}


@pytest.mark.parametrize("strategy", ["ghost", "keep", "drop"])
@pytest.mark.parametrize("name", RULES)
def test_norms_and_sums_of_bfloat16_layers_are_float32_and_exact(name, strategy):
    """As autocast hands them over: bfloat16 input and output gradient. This CPU cannot run such a network as a whole."""
    torch.manual_seed(0)
    make, input_shape, output_shape = RULES[name]
    inputs, gradient = torch.randn(4, *input_shape).bfloat16(), torch.randn(4, *output_shape).bfloat16()
    exact = {key: value.double() for key, value in _formed(make, inputs, gradient).items()}
    call = make(strategy).observe((inputs,), {}, gradient)
    squares = call.squared_norms(gradient)
    expected = sum(value.flatten(1).square().sum(1) for value in exact.values())
    assert squares.dtype == torch.float32
    torch.testing.assert_close(squares.double(), expected, rtol=2e-5, atol=0)
    coefficients = torch.rand(4)
    for key, total in call.clipped_sums(coefficients).items():
        weighed = torch.tensordot(coefficients.double(), exact[key], dims=1)
        assert total.dtype == torch.float32
        assert (total.double() - weighed).norm() <= 1e-5 * weighed.norm()


def _formed(make, inputs: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """Each example's gradients by autograd, in double precision on the same bfloat16 values."""
    module = make(None).module.double()
    found: dict[str, list[Tensor]] = {"weight": [], "bias": []}
    for row, delta in zip(inputs.double(), gradient.double(), strict=True):
        output = module(row.unsqueeze(0))
        for key, value in zip(
            found, torch.autograd.grad(output, [module.weight, module.bias], delta.unsqueeze(0)), strict=True
        ):
            found[key].append(value)
    return {key: torch.stack(values) for key, values in found.items()}
