"""What privacy rests on: no example moves the sums by more than the sensitivity."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor, nn

from dp_microadam import ClippedGradients
from dp_microadam.clipping.per_example import clipped_sum
from dp_microadam.clipping.rules.linear import LinearFactors
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d
from dp_microadam.workbench import models

STRATEGIES = (None, "ghost", "keep", "drop")


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def linear_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The output gradient is the second tensor, whatever the model computes."""
    return (model(batch[0]) * batch[1]).flatten(1).sum(1)


def size(sums: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in sums.values()))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        WeightStandardizedConv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


LAYERS = {
    "linear": (lambda: nn.Linear(5, 4, bias=False), (5,), (4,)),
    "linear on sequences": (lambda: nn.Linear(5, 4, bias=False), (6, 5), (6, 4)),
    "pointwise": (lambda: nn.Conv1d(3, 2, 1, bias=False), (3, 6), (2, 6)),
    "convolution": (lambda: nn.Conv2d(2, 3, 3, padding=1, bias=False), (2, 6, 6), (3, 6, 6)),
    "strided": (lambda: nn.Conv2d(2, 3, 3, stride=2), (2, 7, 7), (3, 3, 3)),
    "norm form": (lambda: WeightStandardizedConv2d(2, 3, 3), (2, 8, 8), (3, 6, 6)),
    "variance form": (lambda: WeightStandardizedConv2d(2, 3, 3, form="variance"), (2, 8, 8), (3, 6, 6)),
    "group norm": (lambda: nn.GroupNorm(1, 3), (3, 5), (3, 5)),
}

# "keep" and "drop" form per-example gradients, which is done in one way for each of these; "ghost" has arithmetic of its own
# for every layer.
FORMED = ("linear on sequences", "convolution", "norm form")

KINDS = ("huge", "tiny", "tiny input, huge gradient", "one tiny position", "constant image", "cancelling", "mixed")


def adversarial(kind: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Examples built to make float32 arithmetic lie about a norm."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, *inputs, generator=generator)
    d = torch.randn(4, *outputs, generator=generator)
    signs = torch.ones(math.prod(outputs)).view(outputs)
    signs.view(-1)[::2] = -1
    if kind == "huge":
        return x * 1e12, d * 1e4
    if kind == "tiny":
        return x * 1e-20, d * 1e-18
    if kind == "tiny input, huge gradient":  # squares of the input vanish in float32, the product does not
        return x * 1e-23, d * 1e17
    if kind == "one tiny position":  # the same, beside a position that hides it in every sum
        x[..., 0] *= 1e-23
        d[..., 1:] *= 1e-30
        d[..., 0] *= 1e17
        return x, d
    if kind == "constant image":  # gradients along the filter of ones, which standardization projects out
        return 1e3 * torch.ones_like(x) + 1e-4 * x, torch.ones_like(d) + 1e-4 * d
    if kind == "cancelling":  # Σₜ δₜaₜ is a small difference of large terms
        return 1e3 * torch.ones_like(x) + 1e-3 * x, signs + 1e-4 * d
    return 10.0 ** (3 * x), d * 10.0 ** (3 * d)  # mixed magnitudes


@pytest.mark.parametrize(
    ("layer", "strategy"),
    [
        pytest.param(layer, strategy, marks=[pytest.mark.slow] if strategy in ("keep", "drop") and layer not in FORMED else [])
        for layer in LAYERS
        for strategy in STRATEGIES
    ],
)
def test_no_contribution_exceeds_the_clipping_norm(layer, strategy):
    torch.manual_seed(0)
    build, inputs, outputs = LAYERS[layer]
    for bound in (1e-8, 1.0):
        engine = ClippedGradients(build(), linear_loss, max_grad_norm=bound, strategy=strategy)
        for kind in KINDS:
            x, d = adversarial(kind, inputs, outputs)
            for row in range(len(x)):
                # Seven copies go through the same kernels as seven examples do.
                engine.reset()
                engine.accumulate((x[row].expand(7, *inputs), d[row].expand(7, *outputs)))
                assert size(engine.sums) <= 7 * bound * (1 + 1e-5), (kind, bound, row)


def opposite_positions(positions: int, width: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Terms of alternating sign that cancel by anything from nothing to six digits."""
    spread = torch.logspace(-2.2, -0.2, 14).view(-1, 1, 1)
    x = torch.randn(14, 1, width) + spread * torch.randn(14, positions, width)
    signs = torch.ones(positions, 1)
    signs[::2] = -1
    return nn.Linear(width, width, bias=False), x, signs * torch.randn(14, 1, width)


def nearly_constant_images(form: str, mean: float) -> tuple[nn.Module, Tensor, Tensor]:
    """Most of G lies along the filter of ones, and is projected out; ``mean`` is that of the filters before it is removed."""
    layer = WeightStandardizedConv2d(4, 4, 3, bias=False, form=form)
    with torch.no_grad():
        layer.weight += mean
    spread = torch.logspace(-2.2, -0.2, 14).view(-1, 1, 1, 1)
    return layer, 1 + spread * torch.randn(14, 4, 6, 6), torch.randn(14, 4, 1, 1).expand(14, 4, 4, 4)


PARTLY_CANCELLING = {
    "two positions": lambda: opposite_positions(2, 64),
    "sixteen positions": lambda: opposite_positions(16, 16),
    "norm form": lambda: nearly_constant_images("norm", 0.0),
    "variance form": lambda: nearly_constant_images("variance", 0.0),
    "norm form, filters of mean 10000": lambda: nearly_constant_images("norm", 1e4),
    "variance form, filters of mean 1000": lambda: nearly_constant_images("variance", 1e3),
}


@pytest.mark.parametrize("case", PARTLY_CANCELLING)
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_no_contribution_exceeds_the_clipping_norm_however_much_of_it_cancels(case, strategy):
    torch.manual_seed(0)
    layer, x, d = PARTLY_CANCELLING[case]()
    engine = ClippedGradients(layer, linear_loss, max_grad_norm=1e-6, strategy=strategy)
    engine.check_independence((x[:3], d[:3]))
    for row in range(len(x)):
        engine.reset()
        engine.accumulate((x[row].expand(3, *x.shape[1:]), d[row].expand(3, *d.shape[1:])))
        assert size(engine.sums) <= 3e-6 * (1 + 1e-5)


@settings(examples(15, quick=8), derandomize=True)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([1e-3, 1.0, 1e3]), strategy=st.sampled_from(STRATEGIES))
def test_removing_one_example_changes_the_sum_by_at_most_the_sensitivity(seed, scale, strategy):
    model = network().double()
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(5, 2, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (5,), generator=generator)
    engine = ClippedGradients(model, cross_entropy, max_grad_norm=0.5, strategy=strategy)
    engine.accumulate((x, y))
    whole = dict(engine.sums)
    for row in range(5):
        rest = torch.arange(5) != row
        engine.reset()
        engine.accumulate((x[rest], y[rest]))
        change = {name: whole[name] - engine.sums[name] for name in whole}
        assert size(change) <= engine.sensitivity * (1 + 1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_chunks_accumulate_to_the_sum_of_the_whole_batch(strategy):
    model = network().double()
    x, y = torch.randn(9, 2, 8, 8, dtype=torch.float64), torch.randint(3, (9,))
    expected, norms = clipped_sum(model, cross_entropy, (x, y), max_grad_norm=0.7)
    engine = ClippedGradients(model, cross_entropy, max_grad_norm=0.7, strategy=strategy)
    assert all(float(part.abs().max()) == 0 for part in engine.sums.values())
    found = [engine.accumulate((x[a:b], y[a:b])) for a, b in ((0, 4), (4, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(found), torch.tensor(norms, dtype=torch.float64))
    for name, part in engine.sums.items():
        torch.testing.assert_close(part, expected[name], rtol=1e-9, atol=1e-12)
    engine.reset()
    assert all(float(part.abs().max()) == 0 for part in engine.sums.values())


def test_an_empty_batch_is_a_sum_of_zeros():
    engine = ClippedGradients(network(), cross_entropy, max_grad_norm=1.0)
    assert engine.accumulate((torch.empty(0, 2, 8, 8), torch.empty(0, dtype=torch.long))).shape == (0,)
    assert set(engine.sums) == {name for name, _ in network().named_parameters()}
    assert size(engine.sums) == 0


@pytest.mark.parametrize("batch_type", ["tensor", "tuple", "dict"])
def test_batches_may_be_tensors_tuples_or_dicts(batch_type):
    x = torch.randn(3, 4)
    batch = {"tensor": x, "tuple": (x, "name"), "dict": {"x": x, "nested": [x]}}[batch_type]

    def loss(model: nn.Module, batch: object) -> Tensor:
        inputs = {"tensor": lambda b: b, "tuple": lambda b: b[0], "dict": lambda b: b["nested"][0]}[batch_type](batch)
        return model(inputs).sum(1)

    engine = ClippedGradients(nn.Linear(4, 2), loss, max_grad_norm=1.0)
    assert engine.accumulate(batch).shape == (3,)


@pytest.mark.parametrize("clipping", ["flat", "per-layer"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, 3e38])
def test_a_non_finite_example_contributes_nothing_and_poisons_no_other(strategy, poison, clipping):
    model = network()
    x, y = torch.randn(6, 2, 8, 8), torch.randint(3, (6,))
    good = torch.tensor([True, False, True, True, False, True])
    engine = ClippedGradients(model, cross_entropy, max_grad_norm=0.5, strategy=strategy, clipping=clipping)
    engine.accumulate((x[good], y[good]))
    expected = dict(engine.sums)
    engine.reset()
    x[~good] = poison
    norms = engine.accumulate((x, y))
    assert torch.isfinite(norms).tolist() == good.tolist()
    for name, part in engine.sums.items():
        torch.testing.assert_close(part, expected[name], rtol=1e-4, atol=1e-6)


def test_a_non_finite_token_row_of_an_embedding_contributes_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(12, 2))
    with torch.no_grad():
        model[0].weight[5] = math.nan
    ids = torch.tensor([[0, 1, 1, 2], [0, 5, 1, 2], [3, 3, 3, 3]])
    engine = ClippedGradients(model, lambda m, b: m(b).square().sum(1), max_grad_norm=1.0)
    assert torch.isfinite(engine.accumulate(ids)).tolist() == [True, False, True]
    assert all(bool(torch.isfinite(part).all()) for part in engine.sums.values())
    assert 0 < size(engine.sums) <= 2


def test_per_layer_bounds_add_up_to_the_sensitivity():
    model = network().double()
    x, y = 5 * torch.randn(4, 2, 8, 8, dtype=torch.float64), torch.randint(3, (4,))
    engine = ClippedGradients(model, cross_entropy, max_grad_norm=0.2, clipping="per-layer")
    assert math.isclose(math.hypot(*engine.layer_bounds.values()), engine.sensitivity)
    for row in range(4):
        engine.reset()
        engine.accumulate((x[row : row + 1], y[row : row + 1]))
        for layer, bound in engine.layer_bounds.items():
            own = {name: part for name, part in engine.sums.items() if name.rpartition(".")[0] == layer}
            gradient, _ = clipped_sum(model, cross_entropy, (x[row : row + 1], y[row : row + 1]), max_grad_norm=1e9)
            unclipped = {name: gradient[name] for name in own}
            assert math.isclose(size(own), min(bound, size(unclipped)), rel_tol=1e-9)


def test_low_precision_parameters_are_summed_in_float32():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4)).to(torch.bfloat16)  # no matrix products
    engine = ClippedGradients(model, lambda m, b: m(b).square().flatten(1).sum(1), max_grad_norm=0.1)
    norms = engine.accumulate(torch.randint(10, (5, 3)))
    assert norms.dtype == torch.float32
    assert all(part.dtype == torch.float32 for part in engine.sums.values())
    assert size(engine.sums) <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize("strategy", ["ghost", "keep", "drop"])
def test_an_exact_gradient_of_zero_is_no_trouble(strategy):
    engine = ClippedGradients(nn.Conv2d(1, 2, 3), linear_loss, max_grad_norm=1.0, strategy=strategy)
    norms = engine.accumulate((torch.zeros(2, 1, 5, 5), torch.zeros(2, 2, 3, 3)))
    assert norms.tolist() == [0.0, 0.0]
    assert size(engine.sums) == 0


def test_wide_resnet_on_one_example_is_bounded():
    torch.manual_seed(0)
    engine = ClippedGradients(models.wide_resnet(10, 1), cross_entropy, max_grad_norm=0.01)
    engine.accumulate((100 * torch.randn(1, 3, 8, 8), torch.tensor([3])))
    assert size(engine.sums) <= 0.01 * (1 + 1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e-25, 1e-44])
def test_saturated_examples_of_a_linear_layer_need_not_be_formed_one_by_one(scale):
    # A model that diverges is sure of most examples, so that their output gradients are next to nothing.
    torch.manual_seed(0)
    inputs, deltas = 1e3 * torch.randn(20, 1, 30), scale * torch.randn(20, 1, 10)
    measured = LinearFactors(inputs, deltas).ghost()
    assert measured.least is None
    squares = inputs.double().square().sum((1, 2)) * deltas.double().square().sum((1, 2))
    torch.testing.assert_close(measured.norms.double(), squares, rtol=1e-6, atol=torch.finfo(torch.float32).tiny)
