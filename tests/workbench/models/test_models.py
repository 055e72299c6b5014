"""The models are those of the experiments: parameter counts, initialisation, shapes, independent examples."""

import math

import pytest
import torch
from torch import nn

from dp_microadam import InputError
from dp_microadam.workbench import models


@pytest.mark.parametrize(("standardized", "millions"), [(True, 2.75), (False, 2.75)])
def test_wide_resnet_16_4_has_the_published_number_of_parameters(standardized, millions):
    model = models.wide_resnet(weight_standardization=standardized)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == millions


def wide_resnet_parameters(depth: int, width: int, classes: int, per_convolution_channel: int, norms: bool) -> int:
    """Zagoruyko and Komodakis (2016), table 1, written as sums: n blocks of two 3×3 convolutions in each of three stages,
    a 1×1 convolution where the width changes, and a normalization with two numbers per channel before each convolution
    but the first, here one more before each shortcut's."""
    n, k = (depth - 4) // 6, width
    before, after = (16, 16 * k, 32 * k), (16 * k, 32 * k, 64 * k)
    weights = 27 * 16 + sum(9 * (i * o + (2 * n - 1) * o * o) + i * o for i, o in zip(before, after, strict=True))
    outputs = 16 + sum((2 * n + 1) * o for o in after)
    normalized = sum(2 * i + (2 * n - 1) * o for i, o in zip(before, after, strict=True)) + after[-1]
    return weights + per_convolution_channel * outputs + 2 * normalized * norms + (64 * k + 1) * classes


@pytest.mark.parametrize(("depth", "width", "millions"), [(16, 8, 11.0), (28, 10, 36.5), (40, 4, 8.9), (22, 8, 17.2)])
def test_wide_resnets_have_the_published_weights_and_theirs_alone(depth, width, millions):
    # Table 4 and 5 of that paper count 11.0M, 36.5M, 8.9M and 17.2M, with BatchNorm and without biases.
    with torch.device("meta"):
        model = models.wide_resnet(depth, width)
    found = sum(p.numel() for p in model.parameters())
    assert found == wide_resnet_parameters(depth, width, 10, per_convolution_channel=2, norms=True)
    plain = wide_resnet_parameters(depth, width, 10, per_convolution_channel=0, norms=True)
    assert abs(plain / 1e6 - millions) < 0.06
    assert sum(p.numel() for p in model.parameters() if p.dim() == 4) < plain < found < 1.01 * plain


def test_wide_resnet_starts_as_stated():
    torch.manual_seed(0)
    model = models.wide_resnet(16, 4, num_classes=100)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            assert module.gain.unique().tolist() == [1.0]
            assert module.bias.unique().tolist() == [0.0]
            count = module.weight.numel()
            # The deviation of `count` normal draws is within six of its own standard errors (false alarm 2e-9).
            assert abs(float(module.weight.detach().std()) * math.sqrt(module.fan_in) - 1) < 6 / math.sqrt(2 * count)
        elif isinstance(module, nn.GroupNorm):
            assert module.num_groups == 16
    assert abs(float(model.head.weight.detach().std()) * 16 - 1) < 6 / math.sqrt(2 * 25600)
    assert model.head.bias.unique().tolist() == [0.0]


@pytest.mark.parametrize(("depth", "width"), [(10, 1), (16, 4), (22, 2)])
def test_wide_resnet_has_two_convolutions_per_block_and_the_depth_asked_for(depth, width):
    model = models.wide_resnet(depth, width, num_classes=7)
    three_by_three = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    # Counted as in the original: 3×3 convolutions, three shortcuts' worth of stages, and the head.
    assert len(three_by_three) == 1 + 3 * 2 * (depth - 4) // 6
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    assert model.blocks[-1].conv2.out_channels == 64 * width


def test_an_activation_comes_before_each_normalization():
    model = models.wide_resnet(10, 1)
    seen = []
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[0].min().item()))
    model(torch.randn(2, 3, 16, 16))
    assert seen
    assert min(seen) == 0


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: models.wide_resnet(10, 1), (3, 32, 32)),
        (lambda: models.nf_resnet_50(10, width=1), (3, 32, 32)),
        (lambda: models.vit("tiny", 10, resolution=32), (3, 32, 32)),
        (models.tanh_cnn, (1, 28, 28)),
        (models.small_cnn, (3, 32, 32)),
    ],
)
def test_an_examples_output_does_not_depend_on_the_others(build, shape):
    torch.manual_seed(0)
    model = build()
    x = torch.randn(4, *shape)
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]), rtol=1e-4, atol=1e-5)


def test_tanh_cnn_has_the_published_number_of_parameters():
    assert sum(p.numel() for p in models.tanh_cnn().parameters()) == 26_010


def test_depths_and_groups_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="6n"):
        models.wide_resnet(depth=17)
    with pytest.raises(InputError, match="groups"):
        models.wide_resnet(groups=5)
