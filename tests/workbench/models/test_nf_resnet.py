"""NF-ResNet-50 has the published size, keeps the variances that its analysis predicts, and has no normalization layer."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dp_microadam import InputError
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d
from dp_microadam.workbench import models
from dp_microadam.workbench.models.nf_resnet import RELU_GAIN


def resnet_50_parameters(classes: int, per_channel: int) -> int:
    """He et al. (2016), table 1: convolutions, ``per_channel`` numbers for each of their channels, and the head."""
    convolutions = [(3, 64, 7)]
    before = 64
    for inside, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        convolutions.append((before, 4 * inside, 1))
        for _ in range(count):
            convolutions += [(before, inside, 1), (inside, inside, 3), (inside, 4 * inside, 1)]
            before = 4 * inside
    weights = sum(i * o * k * k for i, o, k in convolutions)
    return weights + per_channel * sum(o for _, o, _ in convolutions) + (before + 1) * classes


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_it_has_the_published_25_6_million_parameters():
    # The count of the original with BatchNorm's scale and shift, which is published as 25,557,032; here they are gain and
    # bias of the convolutions, and each of the sixteen blocks has a gain besides.
    assert resnet_50_parameters(1000, per_channel=2) == 25_557_032
    assert parameters(models.nf_resnet_50()) == 25_557_032 + 16
    assert parameters(models.nf_resnet_50(gain=False)) == resnet_50_parameters(1000, per_channel=1) + 16


def test_every_convolution_is_standardized_in_variance_form_and_nothing_normalizes():
    model = models.nf_resnet_50(10, width=1)
    with_weights = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    convolutions = [m for m in with_weights if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 1 + 3 * 16 + 4
    assert all(isinstance(m, WeightStandardizedConv2d) and m.form == "variance" for m in convolutions)
    assert len([m for m in with_weights if isinstance(m, nn.Linear)]) == 1
    assert {type(m).__name__ for m in with_weights} == {"WeightStandardizedConv2d", "Linear", "NormalizerFreeBlock"}
    assert not list(model.buffers())


@pytest.mark.parametrize("side", [32, 47, 64, 224])
def test_images_from_32_pixels_on_are_taken(side):
    torch.manual_seed(0)
    model = models.nf_resnet_50(7, width=1).eval()
    sides = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: sides.append(output.shape[-1]))
    with torch.no_grad():
        assert model(torch.randn(2, 3, side, side)).shape == (2, 7)
    halved = side
    for _ in range(5):
        halved = math.ceil(halved / 2)
    assert sides[-1] == halved


def test_the_scaled_activation_has_unit_variance_on_a_unit_normal_input():
    # ∫ relu(z)² φ(z) dz = 1/2 and ∫ relu(z) φ(z) dz = 1/√(2π), here by the trapezoid rule.
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    second = torch.trapezoid(F.relu(z) ** 2 * density, z)
    first = torch.trapezoid(F.relu(z) * density, z)
    assert float(RELU_GAIN**2 * (second - first**2)) == pytest.approx(1, abs=1e-8)


def predicted_variances(alpha: float) -> list[float]:
    """After each block: 1 + α² after a block that changes shape, α² more after every other."""
    return [1 + (index + 1) * alpha**2 for count in (3, 4, 6, 3) for index in range(count)]


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_variances_grow_by_alpha_squared_and_start_anew_where_the_shape_changes(alpha):
    # Channels' variances over images and places, averaged over channels, as Brock et al. plot them. The analysis knows no
    # borders, so images wrap around here; means that differ between channels take away the rest.
    torch.manual_seed(0)
    model = models.nf_resnet_50(10, width=2, alpha=alpha)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode, module._reversed_padding_repeated_twice = "circular", [module.padding[0]] * 4
    found = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: found.append(float(output.var(dim=(0, 2, 3)).mean())))
    with torch.no_grad():
        model(torch.randn(8, 3, 128, 128))
    assert found == pytest.approx(predicted_variances(alpha), rel=0.15)


def test_blocks_divide_by_the_predicted_standard_deviation_of_their_input():
    model = models.nf_resnet_50(10, width=1, alpha=0.3)
    inputs = [1.0, *predicted_variances(0.3)[:-1]]
    assert [1 / block.beta**2 for block in model.blocks] == pytest.approx(inputs)


def test_a_skip_gain_of_zero_leaves_the_shortcuts_alone():
    torch.manual_seed(0)
    model = models.nf_resnet_50(10, width=1, skip_gain=0.0)
    x = torch.randn(2, 256 // 4, 8, 8)
    torch.testing.assert_close(model.blocks[1](x), x)
    assert [block.skip_gain.item() for block in models.nf_resnet_50(10, width=1).blocks] == [1.0] * 16


def test_stochastic_depth_skips_blocks_by_example_in_training_only():
    torch.manual_seed(0)
    model = models.nf_resnet_50(10, width=1, stochastic_depth=0.5)
    assert [block.drop_rate for block in model.blocks] == pytest.approx([0.5 * index / 16 for index in range(16)])
    block = model.blocks[15]
    x = torch.randn(200, 512, 1, 1)
    skipped = (block(x) == x).flatten(1).all(1)
    # Of 200 draws with chance 0.46875, between 50 and 140 (more than 6 standard deviations: false alarm below 1e-9).
    assert 50 < int(skipped.sum()) < 140
    assert not bool((block.eval()(x) == x).flatten(1).all(1).any())


def test_the_head_starts_as_stated():
    torch.manual_seed(0)
    head = models.nf_resnet_50(1000, width=1).head
    # Six standard errors of the deviation of 512,000 draws: false alarm 2e-9.
    assert abs(float(head.weight.detach().std()) / 0.01 - 1) < 6 / math.sqrt(2 * head.weight.numel())
    assert head.bias.unique().tolist() == [0.0]


@pytest.mark.parametrize(
    ("option", "value"),
    [("width", 0), ("alpha", -0.1), ("skip_gain", math.inf), ("stochastic_depth", 1.0), ("num_classes", 0)],
)
def test_options_out_of_range_are_refused_by_name(option, value):
    with pytest.raises(InputError, match=f"^{option} is "):
        models.nf_resnet_50(**{option: value})
