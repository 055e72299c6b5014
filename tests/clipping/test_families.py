"""Every layer family agrees with the loop that takes examples one at a time, whatever its shapes and strategy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import THOROUGH, examples
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dp_microadam import ClippedGradients
from dp_microadam.clipping.rules.families import rule_class
from dp_microadam.clipping.rules.linear import TransposedFactors, TransposedLinearRule
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d
from dp_microadam.workbench import models

quick = settings(examples(12, quick=5), derandomize=True)
OF_WHOLE_NETWORKS = (None, "ghost", "keep", "drop") if THOROUGH else (None, "ghost")
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@st.composite
def convolution_options(draw: st.DrawFn, dimensions: int) -> tuple[dict, tuple[int, ...]]:
    """Options of a convolution, and an image at least as large as its kernel."""
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    each = st.tuples(*[st.integers(1, 3)] * dimensions)
    kernel, dilation = draw(each), draw(st.tuples(*[st.integers(1, 2)] * dimensions))
    stride = draw(st.one_of(st.just((1,) * dimensions), each))
    padding = draw(st.one_of(st.tuples(*[st.integers(0, 3)] * dimensions), st.sampled_from(["same", "valid"])))
    if padding == "same":
        stride = (1,) * dimensions
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    # Reflection and wrapping need an image larger than the padding.
    image = tuple(max(n, 4 if mode != "zeros" else 1) + draw(st.integers(0, 4)) for n in reach)
    options = {
        "in_channels": groups * draw(st.integers(1, 3)),
        "out_channels": groups * draw(st.integers(1, 3)),
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "padding_mode": mode,
        "bias": draw(st.booleans()),
    }
    return options, image


@quick
@given(data=st.data(), dimensions=st.sampled_from([1, 2, 2, 3]), batch=st.integers(1, 4))
def test_convolutions_agree_with_the_loop(assert_agrees, data, dimensions, batch):
    options, image = data.draw(convolution_options(dimensions))
    torch.manual_seed(0)
    model = CONVOLUTIONS[dimensions](**options)
    assert_agrees(model, torch.randn(batch, options["in_channels"], *image))


@quick
@given(data=st.data(), form=st.sampled_from(["norm", "variance"]), gain=st.booleans(), batch=st.integers(1, 4))
def test_weight_standardized_convolutions_agree_with_the_loop(assert_agrees, data, form, gain, batch):
    options, image = data.draw(convolution_options(2))
    torch.manual_seed(0)
    model = WeightStandardizedConv2d(**options, form=form, gain=gain)
    if model.fan_in <= 2:
        return  # standardizing leaves no freedom: the gradient is nothing but rounding
    assert_agrees(model, torch.randn(batch, options["in_channels"], *image))


@pytest.mark.parametrize("form", ["norm", "variance"])
@pytest.mark.parametrize("special", ["gain at zero", "under the floor", "constant filter"])
def test_weight_standardization_agrees_at_its_special_points(assert_agrees, form, special):
    torch.manual_seed(0)
    layer = WeightStandardizedConv2d(3, 4, 3, padding=1, form=form, gain=True)

    def in_some_channels() -> None:
        with torch.no_grad():
            if special == "gain at zero":
                layer.gain[:2] = 0
            elif special == "under the floor":
                layer.weight[:2] *= 1e-4 / layer.weight[:2].abs().max()
            else:
                layer.weight[:2] = 0.5

    assert_agrees(layer, torch.randn(3, 3, 6, 5), then=in_some_channels)


@quick
@given(
    middle=st.lists(st.integers(1, 5), max_size=3),
    features=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    bias=st.booleans(),
    batch=st.integers(1, 4),
)
def test_linear_layers_agree_with_the_loop_on_any_rank(assert_agrees, middle, features, bias, batch):
    torch.manual_seed(0)
    assert_agrees(nn.Linear(*features, bias=bias), torch.randn(batch, *middle, features[0]))


@quick
@given(
    middle=st.lists(st.integers(1, 5), max_size=3),
    features=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    batch=st.integers(1, 4),
)
def test_linear_layers_with_a_transposed_weight_agree_with_the_loop(assert_agrees, middle, features, batch):
    torch.manual_seed(0)
    assert_agrees(Conv1D(features[1], features[0]), torch.randn(batch, *middle, features[0]))


def test_layers_of_gpt_2_have_a_rule_of_their_own():
    assert rule_class(Conv1D(3, 2)) is TransposedLinearRule


class _Twice(nn.Module):
    """One transposed layer that is called twice, and one whose weight is that of a linear layer, too."""

    def __init__(self):
        super().__init__()
        self.own, self.shared, self.linear = Conv1D(3, 3), Conv1D(4, 3), nn.Linear(4, 3)
        self.linear.weight = self.shared.weight

    def forward(self, x):
        return self.linear(torch.tanh(self.shared(self.own(torch.tanh(self.own(x))))))


@pytest.mark.parametrize("frozen", [(), ("own.weight",), ("own.bias", "linear.bias")])
def test_transposed_layers_agree_with_the_loop_when_called_twice_shared_or_partly_frozen(assert_agrees, frozen):
    torch.manual_seed(0)
    model = _Twice()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    assert_agrees(model, torch.randn(4, 5, 3))


def test_texts_without_a_gradient_are_not_formed_one_by_one(monkeypatch):
    formed = []
    form = TransposedFactors.per_example
    monkeypatch.setattr(TransposedFactors, "per_example", lambda self, rows: (formed.append(rows), form(self, rows))[1])
    model, x = Conv1D(3, 2), torch.randn(6, 4, 2)

    def loss(model, batch):
        return model(batch[0]).square().sum((1, 2)) * batch[1]

    engine = ClippedGradients(model, loss, max_grad_norm=1.0, strategy="ghost")
    engine.accumulate((x, torch.ones(6)))
    formed.clear()
    engine.accumulate((x, torch.tensor([1.0, 0, 0, 0, 0, 1])))
    assert not formed


def fixed(norm: nn.Module) -> nn.Module:
    """A batch normalization with statistics of its own, which no example changes."""
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm.eval()


NORMS = {
    "group": (lambda: nn.GroupNorm(2, 6), (6, 4, 3)),
    "layer": (lambda: nn.LayerNorm(5), (3, 5)),
    "layer on images": (lambda: nn.LayerNorm((3, 4), bias=False), (2, 3, 4)),
    "instance 2d": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 5)),
    "instance 3d": (lambda: nn.InstanceNorm3d(3, affine=True), (3, 2, 4, 3)),
    "instance with fixed statistics": (
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True).eval(),
        (3, 4, 5),
    ),
    "batch norm of features with fixed statistics": (lambda: fixed(nn.BatchNorm1d(3)), (3,)),
    "batch norm 2d with fixed statistics": (lambda: fixed(nn.BatchNorm2d(3)), (3, 4, 5)),
    "batch norm over processes with fixed statistics": (lambda: fixed(nn.SyncBatchNorm(3)), (3, 4, 5)),
    "rms with eps": (lambda: nn.RMSNorm((2, 5), eps=1e-3), (3, 2, 5)),
}


@pytest.mark.parametrize("name", NORMS)
def test_normalizations_agree_with_the_loop(assert_agrees, name):
    build, shape = NORMS[name]
    torch.manual_seed(0)
    assert_agrees(build(), 0.5 + torch.randn(4, *shape), strategies=(None,))


@pytest.mark.parametrize("build", [lambda: nn.GroupNorm(3, 6, affine=False), lambda: nn.LayerNorm(6, elementwise_affine=False)])
def test_normalizations_without_affine_pass_gradients_through(assert_agrees, build):
    torch.manual_seed(0)
    assert_agrees(nn.Sequential(nn.Linear(4, 6), build(), nn.Linear(6, 2)), torch.randn(3, 4))


@pytest.mark.parametrize("shape", [(4,), (4, 7), (4, 2, 5)])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embeddings_agree_with_the_loop(assert_agrees, shape, padding_idx):
    torch.manual_seed(0)
    indices = torch.randint(5, shape)  # five entries: most repeat within an example
    assert_agrees(nn.Embedding(5, 3, padding_idx=padding_idx), indices, strategies=(None,))


class Quadratic(nn.Module):
    """A layer no family knows, with two parameters and an attribute that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.offset = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, power: float = 2.0) -> Tensor:
        return ((x @ self.matrix).abs() + 0.1) ** power + self.offset


class OddLinear(nn.Linear):
    """A subclass that computes something else must not be taken for its parent."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.weight.sum()


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: Quadratic(), (4,)),
        (lambda: Quadratic(), (3, 4)),
        (lambda: OddLinear(4, 2), (4,)),
        (lambda: nn.PReLU(4), (4, 3)),
        (lambda: nn.ConvTranspose2d(4, 2, 3), (4, 5, 5)),
    ],
    ids=["own layer", "own layer, rank 3", "subclass", "prelu", "transposed"],
)
def test_other_modules_agree_with_the_loop(assert_agrees, build, shape):
    torch.manual_seed(0)
    assert_agrees(build(), torch.randn(3, *shape), strategies=(None,))


@pytest.mark.parametrize("weight_standardization", [True, False])
def test_a_whole_wide_resnet_agrees_with_the_loop(assert_agrees, weight_standardization):
    torch.manual_seed(0)
    model = models.wide_resnet(10, 1, weight_standardization=weight_standardization)
    assert_agrees(model, torch.randn(3, 3, 8, 8), strategies=OF_WHOLE_NETWORKS)


@pytest.mark.parametrize(
    ("build", "shape"), [(models.tanh_cnn, (1, 28, 28)), pytest.param(models.small_cnn, (3, 32, 32), marks=pytest.mark.slow)]
)
def test_the_small_networks_agree_with_the_loop(assert_agrees, build, shape):
    torch.manual_seed(0)
    assert_agrees(build(), torch.randn(3, *shape), strategies=OF_WHOLE_NETWORKS)


def test_channels_last_images_agree_with_the_loop(assert_agrees):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.GroupNorm(2, 6)).to(memory_format=torch.channels_last)
    assert_agrees(model, torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last))


def test_in_place_activations_agree_with_the_loop(assert_agrees):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(inplace=True),
        WeightStandardizedConv2d(4, 4, 3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16, 3),
        nn.ReLU(inplace=True),
    )
    assert_agrees(model, torch.randn(3, 2, 6, 6))
