"""Standardized filters are what their formulas say, and their derivative is what the clipping engine uses."""

import pytest
import torch

from dp_microadam.clipping.rules.weight_standardized import Projection
from dp_microadam.errors import InputError
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d


def layer(form: str, **options) -> WeightStandardizedConv2d:
    torch.manual_seed(0)
    built = WeightStandardizedConv2d(4, 6, 3, form=form, **options).double()
    with torch.no_grad():
        built.weight.add_(0.3)
        if built.gain is not None:
            built.gain.copy_(torch.linspace(-1, 2, 6))
    return built


def test_norm_form_has_filters_of_mean_zero_and_norm_gain():
    built = layer("norm")
    filters = built.effective_weight().flatten(1)
    assert filters.mean(1).abs().max() < 1e-12
    torch.testing.assert_close(filters.norm(dim=1), built.gain.abs())


def test_variance_form_divides_by_the_standard_deviation_and_the_root_of_the_fan_in():
    built = layer("variance", eps=1e-3)
    w = built.weight.flatten(1)
    n = w.shape[1]
    expected = (w - w.mean(1, keepdim=True)) / (w.var(1, unbiased=False, keepdim=True) + 1e-3).sqrt() / n**0.5
    assert built.gain is None
    torch.testing.assert_close(built.effective_weight().flatten(1), expected)


def test_norm_form_keeps_its_scale_under_the_floor():
    built = layer("norm")
    with torch.no_grad():
        built.weight.copy_(0.5 + 1e-5 * torch.randn_like(built.weight))
        built.gain.fill_(1.0)
    w = built.weight.flatten(1)
    torch.testing.assert_close(built.effective_weight().flatten(1), (w - w.mean(1, keepdim=True)) / 1e-2)


@pytest.mark.parametrize("form", ["norm", "variance"])
@pytest.mark.parametrize("small", [False, True])
def test_the_projection_is_the_derivative_that_autograd_takes(form, small):
    built = layer(form, gain=True)
    if small:
        with torch.no_grad():
            built.weight[:3] *= 1e-4
    gradient = torch.randn(1, *built.weight.shape, dtype=torch.float64)
    expected_w, expected_gain = torch.autograd.grad(built.effective_weight(), [built.weight, built.gain], gradient[0])
    projection = Projection(built)
    found = projection.weight_gradients(gradient)
    torch.testing.assert_close(found[0], expected_w)
    along_ones, along_filter = projection.coordinates(gradient)
    torch.testing.assert_close(projection.unit * along_filter[0], expected_gain)
    whole = gradient.flatten(2).norm(dim=2).square() @ projection.slope.square()
    norm = projection.squared_norms(whole, along_ones, along_filter)
    torch.testing.assert_close(norm, expected_w.square().sum().view(1))


def test_wrong_forms_are_refused():
    with pytest.raises(InputError, match="'norm', 'variance'"):
        WeightStandardizedConv2d(1, 1, 1, form="mean")
    with pytest.raises(InputError, match="eps"):
        WeightStandardizedConv2d(1, 1, 1, eps=0.0)
