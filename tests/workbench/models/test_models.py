"""The models are those of the experiments: parameter counts, initialisation, shapes; by name; and they are clipped exactly."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam import InputError
from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.clipping.per_example import clipped_sum
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d
from dp_microadam.workbench import models
from dp_microadam.workbench.models import registry
from dp_microadam.workbench.models.resnets import RELU_GAIN, NormalizerFreeResNet


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def wide_resnet_parameters(depth: int, width: int, classes: int, per_convolution_channel: int) -> int:
    """Zagoruyko and Komodakis (2016), table 1, written as sums: n blocks of two 3×3 convolutions in each of three stages,
    a 1×1 convolution where the width changes, and a normalization with two numbers per channel before each convolution
    but the first, here one more before each shortcut's."""
    n, k = (depth - 4) // 6, width
    before, after = (16, 16 * k, 32 * k), (16 * k, 32 * k, 64 * k)
    weights = 27 * 16 + sum(9 * (i * o + (2 * n - 1) * o * o) + i * o for i, o in zip(before, after, strict=True))
    outputs = 16 + sum((2 * n + 1) * o for o in after)
    normalized = sum(2 * i + (2 * n - 1) * o for i, o in zip(before, after, strict=True)) + after[-1]
    return weights + per_convolution_channel * outputs + 2 * normalized + (64 * k + 1) * classes


@pytest.mark.parametrize(
    ("depth", "width", "millions"), [(16, 8, 11.0), (28, 10, 36.5), (40, 4, 8.9), (22, 8, 17.2), (16, 4, 2.75)]
)
def test_wide_resnets_have_the_published_weights_and_theirs_alone(depth, width, millions):
    # Table 4 and 5 of that paper, with BatchNorm and without biases; 2.75M is of De et al. (2022).
    with torch.device("meta"):
        model = models.wide_resnet(depth, width)
    assert parameters(model) == wide_resnet_parameters(depth, width, 10, per_convolution_channel=2)
    plain = wide_resnet_parameters(depth, width, 10, per_convolution_channel=0)
    assert abs(plain / 1e6 - millions) < 0.06
    assert plain < parameters(model) < 1.01 * plain
    # Counted as in the original: 3×3 convolutions, and the head.
    three_by_three = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(three_by_three) == 1 + 3 * 2 * (depth - 4) // 6


def test_wide_resnet_starts_as_stated_and_activates_before_it_normalizes():
    torch.manual_seed(0)
    model = models.wide_resnet(16, 4, num_classes=100)
    seen = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            assert (module.gain.unique().tolist(), module.bias.unique().tolist()) == ([1.0], [0.0])
            # The deviation of so many normal draws is within six of its own standard errors (false alarm 2e-9).
            spread = 6 / math.sqrt(2 * module.weight.numel())
            assert abs(float(module.weight.detach().std()) * math.sqrt(module.fan_in) - 1) < spread
        elif isinstance(module, nn.GroupNorm):
            assert module.num_groups == 16
            module.register_forward_pre_hook(lambda _, args: seen.append(args[0].min().item()))
    assert abs(float(model.head.weight.detach().std()) * 16 - 1) < 6 / math.sqrt(2 * 25600)
    assert model.head.bias.unique().tolist() == [0.0]
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 100)
    assert min(seen) == 0


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


def test_nf_resnet_50_has_the_published_25_6_million_parameters_and_nothing_normalizes():
    # The count of the original with BatchNorm's scale and shift, which is published as 25,557,032; here they are gain and
    # bias of the convolutions, and each of the sixteen blocks has a gain besides.
    assert resnet_50_parameters(1000, per_channel=2) == 25_557_032
    assert parameters(models.nf_resnet_50()) == 25_557_032 + 16
    model = models.nf_resnet_50(10, width=1)
    with_weights = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    assert {type(m).__name__ for m in with_weights} == {"WeightStandardizedConv2d", "Linear", "NormalizerFreeBlock"}
    convolutions = [m for m in with_weights if isinstance(m, WeightStandardizedConv2d)]
    assert (len(convolutions), {m.form for m in convolutions}) == (1 + 3 * 16 + 4, {"variance"})


def test_the_scaled_activation_has_unit_variance_on_a_unit_normal_input():
    # ∫ relu(z)² φ(z) dz = 1/2 and ∫ relu(z) φ(z) dz = 1/√(2π), here by the trapezoid rule.
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    second, first = torch.trapezoid(F.relu(z) ** 2 * density, z), torch.trapezoid(F.relu(z) * density, z)
    assert float(RELU_GAIN**2 * (second - first**2)) == pytest.approx(1, abs=1e-8)


def test_variances_grow_by_alpha_squared_and_start_anew_where_the_shape_changes():
    # Channels' variances over images and places, averaged over channels, as Brock et al. plot them. The analysis knows no
    # borders, so images wrap around here; means that differ between channels take away the rest.
    torch.manual_seed(0)
    model = models.nf_resnet_50(10, width=2)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode, module._reversed_padding_repeated_twice = "circular", [module.padding[0]] * 4
    found = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: found.append(float(output.var(dim=(0, 2, 3)).mean())))
    with torch.no_grad():
        model(torch.randn(8, 3, 128, 128))
    # 1 + α² after a block that changes shape, α² more after every other.
    predicted = [1 + (index + 1) * 0.2**2 for count in (3, 4, 6, 3) for index in range(count)]
    assert found == pytest.approx(predicted, rel=0.15)
    assert [1 / block.beta**2 for block in model.blocks] == pytest.approx([1.0, *predicted[:-1]])
    assert [block.skip_gain.item() for block in model.blocks] == [1.0] * 16
    # Six standard errors of the deviation of 5,120 draws: false alarm 2e-9.
    assert abs(float(model.head.weight.detach().std()) / 0.01 - 1) < 6 / math.sqrt(2 * model.head.weight.numel())


SMALL = {
    "mlp": ((1, 28, 28), {"hidden": [16, 8]}),
    "tanh-cnn": ((1, 28, 28), {}),
    "small-cnn": ((1, 28, 28), {"width": 4}),
    "wide-resnet": ((3, 8, 8), {"depth": 10, "width": 1}),
    "nf-resnet-50": ((3, 32, 32), {"width": 1}),
    "deit-tiny": ((3, 8, 8), {"resolution": 32}),
    "vit-tiny": ((3, 32, 32), {"resolution": 16}),
}
"""Larger transformers differ from the tiny one by three numbers."""


@pytest.mark.parametrize("name", SMALL)
def test_a_model_gives_one_score_per_class_and_an_examples_do_not_depend_on_the_others(name):
    assert {kind.partition("-")[0] for kind in SMALL} == {one.partition("-")[0] for one in registry.BUILDERS} - {"hugging"}
    torch.manual_seed(0)
    shape, options = SMALL[name]
    model, x = models.build(name, 7, shape, **options), torch.randn(4, *shape)
    assert model(x).shape == (4, 7)
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]), rtol=1e-4, atol=1e-5)
    assert models.build(name, 1, shape, **options)(x).shape == (4, 1)


def test_small_networks_are_those_of_their_papers():
    assert parameters(models.build("tanh-cnn", 10, (1, 28, 28))) == 26_010  # Papernot et al. (2021)
    for shape in ((1, 28, 28), (3, 8, 8), (2, 9, 31)):
        model = models.build("small-cnn", 10, shape, width=4)
        assert model(torch.randn(2, *shape)).shape == (2, 10)
    for hidden, widths in ((32, [32]), ([32, 16], [32, 16]), ([], [])):
        layers = [layer for layer in models.mlp(12, hidden, 3) if isinstance(layer, torch.nn.Linear)]
        assert [layers[0].in_features, *(layer.out_features for layer in layers)] == [12, *widths, 3]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("tanh-cnn", (3, 28, 28)),
        ("small-cnn", (3, 7, 32)),
        ("wide-resnet", (1, 28, 28)),
        ("nf-resnet-50", (3, 31, 64)),
        ("deit-tiny", (1, 28, 28)),
        ("vit-base", (3, 32, 48)),
    ],
)
def test_images_a_model_cannot_take_are_refused(name, shape):
    with pytest.raises(InputError, match=rf"model {name} takes .*; these are {shape[1]}×{shape[2]} with {shape[0]} channels"):
        models.build(name, 10, shape)


WRONG = {
    "mlp": {"hidden": [0, [16, 0], "16", 16.0, True]},
    "small-cnn": {"width": ["wide"]},
    "wide-resnet": {"depth": [12], "groups": [3, 5], "weight_standardization": ["yes"]},
    "nf-resnet-50": {"width": [0]},
    "vit-tiny": {
        "resolution": ["large", 8, 100],
        "patch_size": [0.5, 0],
        "trainable": ["none"],
        "pretrained": [3],
        "normalize_features": [1],
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_refused_by_name(name):
    for option, values in WRONG[name].items():
        for value in values:
            with pytest.raises(InputError, match=f"^{option} is "):
                models.build(name, 10, (3, 32, 32), **{option: value})


TINY = models.TransformerSize(width=16, layers=2, heads=2)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def batch_of(count: int, side: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, side, side, generator=generator, dtype=dtype), torch.arange(count) % 3


def small_nf_resnet() -> nn.Module:
    return NormalizerFreeResNet((2, 1), 1, 3)


FAMILIES = {
    # name: model, side of its images
    "wide-resnet": (lambda: models.wide_resnet(10, 1, 3), 8),
    "nf-resnet": (small_nf_resnet, 32),
    "vit": (lambda: models.vit(TINY, 3, resolution=16, patch_size=8), 16),
    "vit, resized": (lambda: models.vit(TINY, 3, resolution=24, patch_size=8), 16),
    "vit, head only": (lambda: models.vit(TINY, 3, resolution=16, patch_size=8, trainable="head"), 16),
}


def assert_clipped_exactly(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    _, norms = clipped_sum(model, loss, batch, max_grad_norm=1.0)
    bound = sorted(norms)[len(norms) // 2] * 0.999  # some examples are clipped, some are not
    expected, _ = clipped_sum(model, loss, batch, max_grad_norm=bound)
    engine = ClippedGradients(model, loss, max_grad_norm=bound)
    found = engine.accumulate(batch)
    torch.testing.assert_close(found, torch.tensor(norms, dtype=found.dtype), rtol=1e-9, atol=0)
    assert engine.sums.keys() == expected.keys()
    for name, total in expected.items():
        torch.testing.assert_close(engine.sums[name], total, rtol=1e-7, atol=1e-9 * bound)


@pytest.mark.parametrize("family", FAMILIES)
def test_clipped_sums_are_those_of_one_example_at_a_time(family):
    torch.manual_seed(0)
    build, side = FAMILIES[family]
    assert_clipped_exactly(build().double(), batch_of(4, side))


# The others have no kind of parameter that these lack.
