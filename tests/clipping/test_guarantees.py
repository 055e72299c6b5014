"""What privacy rests on: no example moves the sums by more than the sensitivity."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor, nn

from dp_microadam import ClippedGradients
from dp_microadam.clipping import outer_product
from dp_microadam.clipping.per_example import clipped_sum
from dp_microadam.clipping.rules.linear import LinearFactors
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d

from .conftest import STRATEGIES, cross_entropy, linear_loss, size


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
    assert engine.accumulate((x[:0], y[:0])).shape == (0,)
    assert size(engine.sums) == 0


class Tokens(nn.Module):
    """A class token, positions, a layer scale, a tied head and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 6, 4))
        self.scale, self.layer = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return F.linear(self.layer(x + self.scale * self.layer(x)), self.layer.weight)


class Last(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


MODELS = {
    "tokens": Tokens,
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "lstm": lambda: Last(nn.LSTM(4, 3, batch_first=True)),
    "gru": lambda: Last(nn.GRU(4, 3, batch_first=True)),
    "transposed": lambda: nn.ConvTranspose1d(5, 3, 2),
    "embedding": lambda: nn.Embedding(6, 3),
}


def weighted_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs = (batch[0][..., 0].abs() % 6).long() if isinstance(model, nn.Embedding) else batch[0]
    return model(inputs).flatten(1).sum(1) * batch[1]


@pytest.mark.parametrize("name", MODELS)
def test_no_contribution_exceeds_the_clipping_norm_whatever_a_parameter_is_used_for(name):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 4)
    kinds = {"large": 1e4 * x, "tiny": 1e-12 * x, "constant": 1e3 + 1e-3 * x, "mixed": 10.0 ** (3 * x)}
    model = MODELS[name]()
    for bound in (1e-4, 1.0):
        engine = ClippedGradients(model, weighted_loss, max_grad_norm=bound)
        for kind, rows in kinds.items():
            for row in rows:
                engine.reset()
                engine.accumulate((row.expand(7, 5, 4), torch.full((7,), 100.0)))
                assert size(engine.sums) <= 7 * bound * (1 + 1e-5), (kind, bound)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_non_finite_example_contributes_nothing_whatever_a_parameter_is_used_for(name, poison):
    torch.manual_seed(0)
    x, weights = torch.randn(4, 5, 4), torch.ones(4)
    good = torch.tensor([True, False, True, True])
    engine = ClippedGradients(MODELS[name](), weighted_loss, max_grad_norm=0.5)
    engine.accumulate((x[good], weights[good]))
    expected = dict(engine.sums)
    engine.reset()
    weights[1] = poison
    assert torch.isfinite(engine.accumulate((x, weights))).tolist() == good.tolist()
    for key, part in engine.sums.items():
        torch.testing.assert_close(part, expected[key], rtol=1e-4, atol=1e-6)
    engine.reset()
    assert not torch.isfinite(engine.accumulate((x[1:2], weights[1:2]))).any()
    assert size(engine.sums) == 0


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


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e-25, 1e-44])
def test_saturated_examples_of_a_linear_layer_need_not_be_formed_one_by_one(scale):
    # A model that diverges is sure of most examples, so that their output gradients are next to nothing.
    torch.manual_seed(0)
    inputs, deltas = 1e3 * torch.randn(20, 1, 30), scale * torch.randn(20, 1, 10)
    measured = LinearFactors(inputs, deltas).ghost()
    assert measured.least is None
    squares = inputs.double().square().sum((1, 2)) * deltas.double().square().sum((1, 2))
    torch.testing.assert_close(measured.norms.double(), squares, rtol=1e-6, atol=torch.finfo(torch.float32).tiny)


class Doubtful(nn.Module):
    """Two layers, in each of which other examples have terms that cancel to six digits."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Linear(8, 4, bias=False)
        self.images = WeightStandardizedConv2d(2, 4, 3)

    def forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.positions(batch[0]), self.images(batch[1])


def doubtful_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    first, second = model((batch["positions"], batch["images"]))
    return (first * batch["signs"]).flatten(1).sum(1) + (second * batch["weights"]).flatten(1).sum(1)


def doubtful_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    positions, images = normal(7, 6, 8), normal(7, 2, 6, 6)
    positions[2:4] = 1 + 1e-4 * positions[2:4]
    images[3:6] = 1 + 1e-4 * images[3:6]
    signs = torch.tensor([1.0, -1.0]).repeat(3).view(1, 6, 1) * normal(7, 1, 4).expand(7, 6, 4)
    return {"positions": positions, "images": images, "signs": signs, "weights": normal(7, 4, 1, 1).expand(7, 4, 4, 4)}


@pytest.mark.parametrize("strategy", ["ghost", "keep", "drop"])
def test_doubtful_norms_of_several_layers_are_those_of_single_examples(monkeypatch, strategy):
    monkeypatch.setattr(outer_product, "piece_length", lambda factors: 2)
    settled: Counter[int] = Counter()
    plain = outer_product.OuterProductSum.recompute

    def counted(self: outer_product.OuterProductSum, rows: Tensor) -> None:
        settled[len(rows)] += 1
        plain(self, rows)

    torch.manual_seed(0)
    model, batch = Doubtful(), doubtful_batch()
    exact = Doubtful().double()
    exact.load_state_dict(model.state_dict())
    expected, norms = clipped_sum(exact, doubtful_loss, {key: part.double() for key, part in batch.items()}, max_grad_norm=1e-2)
    engine = ClippedGradients(model, doubtful_loss, max_grad_norm=1e-2, strategy=strategy)
    engine.check_independence(batch)
    monkeypatch.setattr(outer_product.OuterProductSum, "recompute", counted)
    found = engine.accumulate(batch)
    assert settled, "the batch is not doubtful, so that nothing is tested"
    # Single examples have their own rounding: what cancels is a thousand times what is left of it.
    torch.testing.assert_close(found.double(), torch.tensor(norms, dtype=torch.float64), rtol=1e-3, atol=0)
    for name, total in engine.sums.items():
        assert (total.double() - expected[name]).norm() <= 2e-3 * expected[name].norm() + 1e-5


def test_an_example_whose_norm_overflows_when_it_is_taken_again_contributes_nothing():
    """Its squares vanish in the product of norms, but a position of it overflows."""
    x, d = torch.randn(3, 2, 4), torch.randn(3, 2, 5)
    x[1], d[1] = 1e-25, 1e38
    x[1, 1], d[1, 1] = 1e3, 1e-38
    model = nn.Linear(4, 5, bias=False)
    engine = ClippedGradients(model, linear_loss, max_grad_norm=1.0, strategy="ghost")
    engine.check_independence((x, d))
    engine.accumulate((x, d))
    assert all(total.isfinite().all() for total in engine.sums.values())


@pytest.mark.parametrize("clipping", ["flat", "per-layer"])
@pytest.mark.parametrize("strategy", [None, "ghost", "keep", "drop"])
@pytest.mark.parametrize("kind", ["linear", "1x1 convolution"])
def test_an_example_whose_squared_norm_rounds_below_zero_is_measured_again_and_contributes(kind, strategy, clipping):
    """One position takes back what the other adds, so that the Gram norm of every third of these examples is below zero."""
    torch.manual_seed(0)
    x = 1000 * torch.randn(320, 1, 64) + 0.01 * torch.randn(320, 2, 64)
    model, batch = nn.Linear(64, 64, bias=False), (x, torch.tensor([1.0, -1.0]).view(1, 2, 1).repeat(320, 1, 64))
    if kind == "1x1 convolution":
        model, batch = nn.Conv1d(64, 64, 1, bias=False), tuple(one.transpose(1, 2).contiguous() for one in batch)
    engine = ClippedGradients(model, linear_loss, max_grad_norm=0.5, strategy=strategy, clipping=clipping)
    found = engine.accumulate(batch)
    gradients = (x[:, 0].double() - x[:, 1].double()).unsqueeze(1).expand(320, 64, 64)
    norms = gradients.flatten(1).norm(dim=1)
    torch.testing.assert_close(found.double(), norms, rtol=1e-5, atol=0)
    expected = (gradients * (0.5 / norms).clamp(max=1).view(-1, 1, 1)).sum(0)
    assert (engine.sums["weight"].squeeze(-1) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("strategy", ["ghost", "keep", "drop"])
@pytest.mark.parametrize("clipping", ["flat", "per-layer"])
def test_an_example_that_is_not_finite_changes_nothing_of_what_others_add_by_the_same_random_numbers(strategy, clipping):
    """Were the others taken once more with new random numbers, those that overflow by chance would overflow more often."""

    class OverflowsByChance(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.rare = nn.Linear(4, 6), nn.Linear(6, 1), False

        def forward(self, x):
            y = self.last(torch.tanh(self.first(x)))
            draws = torch.rand(len(x), 1, dtype=x.dtype)
            return y / (draws >= 0.3) if self.rare else y + 0 * draws

    torch.manual_seed(0)
    model, x, lost = OverflowsByChance(), torch.randn(6, 4), torch.full((1, 4), math.nan)
    engine = ClippedGradients(
        model, lambda model, batch: 1e3 * model(batch)[:, 0], max_grad_norm=1.0, clipping=clipping, strategy=strategy
    )
    engine.check_independence(torch.cat([x, x[:1]]))
    model.rare = True
    for seed in range(8):
        sums = []
        for batch in (x, torch.cat([x, lost])):
            torch.manual_seed(seed)
            engine.reset()
            engine.accumulate(batch)
            sums.append({name: total.clone() for name, total in engine.sums.items()})
        for name, total in sums[0].items():
            torch.testing.assert_close(sums[1][name], total, rtol=1e-4, atol=1e-5)
