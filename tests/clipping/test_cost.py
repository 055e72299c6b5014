"""The cost model: what it chooses on each type of device, and that the choice changes speed and memory only."""

from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples
from torch import nn

from dp_microadam import ClippedGradients
from dp_microadam.clipping.cost import CPU, CUDA, KEEP_LIMIT, Shapes, choose, costs_of, costs_on, forms_by_patches
from dp_microadam.clipping.rules import convolution, rule
from dp_microadam.clipping.rules.convolution import ConvolutionFactors, Geometry, convolution_shapes, gradients_from_patches
from dp_microadam.clipping.rules.linear import LinearFactors, LinearRule

from .conftest import flat, random_loss, randomize


def conv_shapes(n_in: int, n_out: int, side: int, kernel: int, stride: int = 1) -> Shapes:
    margin = kernel // 2
    geometry = Geometry((n_out, n_in, kernel, kernel), (stride, stride), (margin, margin), (1, 1), 1)
    return convolution_shapes(geometry, torch.Size((n_in, side, side)), 4)


def linear_shapes(positions: int, n_in: int, n_out: int) -> Shapes:
    factors = LinearFactors(torch.empty(1, positions, n_in), torch.empty(1, positions, n_out))
    return LinearRule("", nn.Linear(1, 1), ("weight",)).shapes(factors)


@given(
    weights=st.integers(1, 10**8),
    activations=st.integers(1, 10**7),
    multiplications=st.floats(1, 1e11),
    gram=st.floats(0, 1e12),
    passes=st.floats(0, 1e10),
    patches=st.floats(0, 1e8),
)
def test_the_cpu_chooses_by_the_formula_it_was_measured_with(weights, activations, multiplications, gram, passes, patches):
    by_hand = {
        "ghost": multiplications + gram + 16 * passes,
        "keep": 1.15 * multiplications + 12 * weights,
        "drop": 2.15 * multiplications + 6 * weights,
    }
    if weights > KEEP_LIMIT * activations:
        del by_hand["keep"]
    found = choose(Shapes(weights, activations, multiplications, gram, passes, patches=patches))
    assert by_hand[found.strategy] == pytest.approx(min(by_hand.values()), rel=1e-12)
    assert found.cost == pytest.approx(by_hand[found.strategy], rel=1e-12)


@pytest.mark.parametrize(
    ("layer", "on_cpu", "on_cuda"),
    [
        ((3, 16, 32, 3), "keep", "keep"),  # hardly any weights
        ((64, 64, 32, 3), "keep", "keep"),  # few weights, many positions
        ((128, 128, 16, 3), "keep", "keep"),
        ((256, 256, 8, 3), "ghost", "ghost"),  # many weights, few positions
        ((512, 512, 4, 3), "ghost", "ghost"),
        ((64, 256, 56, 1), "keep", "keep"),
    ],
)
def test_convolutions(layer, on_cpu, on_cuda):
    shapes = conv_shapes(*layer)
    assert (choose(shapes).strategy, choose(shapes, costs=CUDA).strategy) == (on_cpu, on_cuda)


@pytest.mark.parametrize(
    ("layer", "on_cpu", "on_cuda"),
    [
        ((1, 784, 256), "ghost", "ghost"),  # one position: norms of two vectors
        ((197, 192, 768), "keep", "keep"),  # ViT-Tiny: kept gradients take less memory than what they replace
        ((16, 768, 3072), "ghost", "ghost"),
        ((2048, 64, 64), "keep", "keep"),
        ((600, 512, 512), "keep", "keep"),
    ],
)
def test_linear_layers(layer, on_cpu, on_cuda):
    shapes = linear_shapes(*layer)
    assert (choose(shapes).strategy, choose(shapes, costs=CUDA).strategy) == (on_cpu, on_cuda)


def test_one_group_per_example_is_taken_for_slow_on_cuda_only():
    wide = conv_shapes(64, 64, 32, 3)
    assert forms_by_patches(wide, CUDA)
    assert not forms_by_patches(wide, CPU)
    assert not forms_by_patches(conv_shapes(64, 4, 32, 3), CUDA)  # four outputs: copying costs more than multiplying
    assert costs_of(wide, CUDA)["keep"] < CUDA.grouped * wide.product
    assert not forms_by_patches(Shapes(10, 10, 1e9, 1.0, 1.0), CUDA)  # a linear layer has no patches


SIZES = st.integers(1, 3)


@examples(40)
@given(
    dimensions=SIZES,
    kernel=SIZES,
    stride=SIZES,
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    groups=st.integers(1, 2),
    channels=SIZES,
    extra=st.integers(0, 3),
    channels_last=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gradients_from_patches_are_those_of_one_group_per_example(
    dimensions, kernel, stride, padding, dilation, groups, channels, extra, channels_last, seed
):
    torch.manual_seed(seed)
    each = lambda value: (value,) * dimensions  # noqa: E731
    geometry = Geometry((2 * groups, channels, *each(kernel)), each(stride), each(padding), each(dilation), groups)
    side = max(1, dilation * (kernel - 1) + 1 + extra - 2 * padding)
    out = (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    inputs = torch.randn(3, channels * groups, *each(side), dtype=torch.float64)
    if channels_last and dimensions == 2:
        inputs = inputs.to(memory_format=torch.channels_last)
    deltas = torch.randn(3, 2 * groups, *each(out), dtype=torch.float64)
    expected = ConvolutionFactors(inputs, deltas, geometry).per_example(slice(0, 3))
    torch.testing.assert_close(gradients_from_patches(inputs, deltas, geometry), expected, rtol=1e-12, atol=1e-12)


def test_patches_are_copied_a_few_examples_at_a_time(monkeypatch):
    inputs, deltas = torch.randn(5, 2, 6, 6), torch.randn(5, 3, 6, 6)
    geometry = Geometry((3, 2, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    whole = gradients_from_patches(inputs, deltas, geometry)
    monkeypatch.setattr(convolution, "PIECE_GPU", 2 * 2 * 9 * 36)
    torch.testing.assert_close(gradients_from_patches(inputs, deltas, geometry), whole)


def test_the_choices_for_a_gpu_do_not_alter_the_sums(monkeypatch):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 24, 3, padding=1), nn.Tanh(), nn.Conv2d(24, 8, 3, stride=2, groups=2), nn.Tanh(), nn.Flatten()]
    model = randomize(nn.Sequential(*layers, nn.Linear(8 * 16, 5)))
    x = torch.randn(6, 3, 10, 10)
    engine = ClippedGradients(model, random_loss, max_grad_norm=1.0)
    norms, sums = engine.accumulate(x), flat(engine.sums)
    for module in (convolution, rule):
        monkeypatch.setattr(module, "costs_on", lambda device_type: CUDA)
    called = Counter()
    real = convolution.gradients_from_patches
    monkeypatch.setattr(convolution, "gradients_from_patches", lambda *args: called.update(["patches"]) or real(*args))
    for strategy in (None, "keep", "drop"):
        engine = ClippedGradients(model, random_loss, max_grad_norm=1.0, strategy=strategy)
        torch.testing.assert_close(engine.accumulate(x), norms, rtol=1e-5, atol=0)
        assert (flat(engine.sums) - sums).norm() <= 1e-5 * sums.norm()
    assert called["patches"] > 0


def test_the_choice_does_not_depend_on_the_size_of_the_batch():
    """Which is private: a table that shows strategies must not tell it."""
    engine = ClippedGradients(nn.Conv2d(3, 4, 3), random_loss, max_grad_norm=1.0)
    tables = set()
    for size in (1, 2, 50):
        engine.accumulate(torch.randn(size, 3, 6, 6))
        tables.add(engine.explain())
    assert len(tables) == 1


def test_explain_names_the_device():
    engine = ClippedGradients(nn.Linear(3, 2), random_loss, max_grad_norm=1.0)
    engine.accumulate(torch.randn(2, 3))
    assert "strategy on cpu" in engine.explain().splitlines()[0]


def test_every_strategy_that_can_be_forced_has_a_cost():
    for costs, strategy in product((CPU, CUDA), ("ghost", "keep", "drop")):
        assert choose(Shapes(10, 10, 1e3, 1e3, 1e3), strategy, costs).strategy == strategy
    assert costs_on("cpu") is CPU
    assert costs_on("cuda") is CUDA
