"""Gradients scaled or masked before the clip, and norms of their rows: the sensitivity holds for what is published."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor, nn

from dp_microadam import ClippedGradients, InputError
from dp_microadam.clipping import passes
from dp_microadam.clipping.engine import ClippedRowNorms
from dp_microadam.clipping.per_example import clipped, clipped_sum, per_example_gradients
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d

from .conftest import square_loss


class Mixed(nn.Module):
    """One layer of every family that scaling treats differently."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.token = nn.Parameter(torch.randn(1, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.standardized = WeightStandardizedConv2d(1, 2, 3, padding=1)
        self.convolution = nn.Conv2d(2, 2, 3)
        self.up = nn.ConvTranspose2d(2, 3, 2)
        self.head = nn.Linear(3, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.token
        x = self.norm(self.attention(x, x, x)[0])
        x = self.up(torch.tanh(self.convolution(self.standardized(x.unsqueeze(1)))))
        return self.head(self.head(x.flatten(2).mean(2)).tanh())


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(3 * model(batch), torch.ones(len(batch), dtype=torch.long), reduction="none")


def random_scale(model: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.1 + 3 * torch.rand(p.shape, generator=generator).to(p) for name, p in model.named_parameters()}


def assert_same(engine: ClippedGradients, expected: dict[str, Tensor]) -> None:
    for name, part in engine.sums.items():
        torch.testing.assert_close(part, expected[name], rtol=1e-9, atol=1e-11)


@settings(examples(5, quick=3), derandomize=True)
@given(seed=st.integers(0, 100), some=st.booleans(), batch=st.integers(1, 4))
def test_gradients_scaled_before_the_clip_agree_with_the_loop(seed, some, batch):
    torch.manual_seed(seed)
    model = Mixed().double()
    scale = random_scale(model, seed)
    if some:
        scale = {name: part for index, (name, part) in enumerate(scale.items()) if index % 3}
    ids = torch.randint(6, (batch, 5))
    _, norms = clipped_sum(model, loss, ids, max_grad_norm=1.0, scale=scale)
    bound = sorted(norms)[len(norms) // 2] * 0.999
    expected, norms = clipped_sum(model, loss, ids, max_grad_norm=bound, scale=scale)
    engine = ClippedGradients(model, loss, max_grad_norm=bound, scale=scale)
    assert engine.accumulate(ids).tolist() == pytest.approx(norms, rel=1e-9)
    assert_same(engine, expected)


def test_the_sensitivity_holds_in_the_scaled_space():
    torch.manual_seed(0)
    model = Mixed()
    scale = {name: 100 * part for name, part in random_scale(model, 0).items()}
    engine = ClippedGradients(model, loss, max_grad_norm=0.2, scale=scale)
    for row in range(4):
        engine.reset()
        engine.accumulate(torch.randint(6, (1, 5), generator=torch.Generator().manual_seed(row)))
        size = torch.cat([part.flatten().double() for part in engine.sums.values()]).norm()
        assert 0.2 * (1 - 1e-4) <= float(size) <= engine.sensitivity * (1 + 1e-5)


def test_gradients_too_large_to_be_kept_are_formed_again(monkeypatch):
    torch.manual_seed(0)
    model, ids = Mixed().double(), torch.randint(6, (4, 5))
    scale = random_scale(model, 1)
    expected, _ = clipped_sum(model, loss, ids, max_grad_norm=0.5, scale=scale)
    monkeypatch.setattr(passes, "KEPT_ELEMENTS", 0)
    monkeypatch.setattr(passes, "piece_elements", lambda device: 1)
    engine = ClippedGradients(model, loss, max_grad_norm=0.5, scale=scale)
    engine.accumulate(ids)
    assert_same(engine, expected)


@pytest.mark.parametrize("strategy", [None, "ghost", "keep", "drop"])
def test_row_masks_agree_with_the_loop(strategy):
    torch.manual_seed(0)
    model = Mixed().double()
    engine = ClippedGradients(model, loss, max_grad_norm=0.3, strategy=strategy)
    for seed in range(8):
        torch.manual_seed(seed)
        ids = torch.randint(6, (4, 5))
        chosen = [name for name, p in model.named_parameters() if p.dim() and torch.rand(()) < 0.6]
        masks = {name: torch.rand(len(model.get_parameter(name))) < 0.5 for name in chosen}
        scale = random_scale(model, seed) if seed % 2 else {}
        factors = dict(scale)
        for name, mask in masks.items():
            parameter = model.get_parameter(name)
            rows = mask.to(parameter).view(-1, *[1] * (parameter.dim() - 1)).expand_as(parameter)
            factors[name] = rows * factors.get(name, 1.0)
        expected, norms = clipped_sum(model, loss, ids, max_grad_norm=0.3, scale=factors)
        engine.reset()
        engine.row_masks, engine.scale = masks, scale
        assert engine.accumulate(ids).tolist() == pytest.approx(norms, rel=1e-9)
        assert_same(engine, expected)
        for name, mask in masks.items():
            assert not engine.sums[name][~mask].any()


def test_scale_and_masks_may_change_between_steps_and_not_within_one():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    engine = ClippedGradients(model, lambda m, b: m(b).sin().sum(1), max_grad_norm=1e6)
    engine.accumulate(x)
    plain = engine.sums["weight"].clone()
    with pytest.raises(InputError, match="scale was set in the middle of a step"):
        engine.scale = {"weight": torch.full((2, 3), 2.0)}
    engine.reset()
    engine.scale = {"weight": torch.full((2, 3), 2.0)}
    engine.accumulate(x)
    torch.testing.assert_close(engine.sums["weight"], 2 * plain)
    engine.reset()
    engine.scale, engine.row_masks = None, {"weight": torch.tensor([True, False])}
    engine.accumulate(x)
    torch.testing.assert_close(engine.sums["weight"], plain * torch.tensor([[1.0], [0.0]]))
    engine.reset()
    engine.row_masks = None
    engine.accumulate(x)
    torch.testing.assert_close(engine.sums["weight"], plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": {"wait": torch.ones(2, 3)}}, "scale names 'wait'"),
        ({"scale": {"weight": torch.ones(3, 2)}}, r"shape \(3, 2\); it must have shape \(2, 3\)"),
        ({"scale": {"weight": torch.full((2, 3), torch.nan)}}, "not finite"),
        ({"row_masks": {"weight": torch.ones(3)}}, r"row_masks\['weight'\] has shape \(3,\)"),
    ],
)
def test_scales_and_masks_that_do_not_fit_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        ClippedGradients(nn.Linear(3, 2), loss, max_grad_norm=1.0, **options)


def test_numbers_without_rows_are_refused():
    model = nn.Linear(2, 2)
    model.factor = nn.Parameter(torch.ones(()))
    with pytest.raises(InputError, match="'factor' is a single number and has no rows"):
        ClippedRowNorms(model, loss, max_grad_norm=1.0)


def test_autocast_covers_the_model_and_not_the_norms():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))
    x, seen = torch.randn(5, 4), set()

    def watched(model: nn.Module, x: Tensor) -> Tensor:
        output = model(x)
        seen.add(output.dtype)
        return output.float().sin().sum(1)

    # float16, because products in bfloat16 are not available on every CPU.
    engine = ClippedGradients(model, watched, max_grad_norm=1e-3, autocast=torch.float16)
    engine.check_independence(x)  # which looks at a copy in double precision too
    seen.clear()
    norms = engine.accumulate(x)
    assert seen == {torch.float16}
    assert not torch.is_autocast_enabled("cpu")
    assert norms.dtype == torch.float32
    assert all(part.dtype == torch.float32 for part in engine.sums.values())
    _, expected = clipped_sum(model, watched, x, max_grad_norm=1e-3)
    assert norms.tolist() == pytest.approx(expected, rel=1e-2)
    for row in range(5):
        engine.reset()
        engine.accumulate(x[row : row + 1])
        size = torch.cat([part.flatten().double() for part in engine.sums.values()]).norm()
        assert float(size) <= 1e-3 * (1 + 1e-5)


def images_network():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.GroupNorm(3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 2)
    )


def rows(gradient):
    return gradient.reshape(len(gradient), -1).norm(dim=1)


@settings(examples(8, quick=4), derandomize=True)
@given(seed=st.integers(0, 1000), count=st.integers(1, 6), bound=st.floats(0.01, 10.0), masked=st.booleans())
def test_row_norms_agree_with_the_loop(seed, count, bound, masked):
    torch.manual_seed(seed)
    model, batch = images_network().double(), torch.randn(count, 1, 4, 4).double()
    masks = {"4.weight": torch.tensor([True, False, True, True, False])} if masked else {}
    engine = ClippedRowNorms(model, square_loss, max_grad_norm=bound, row_masks=masks)
    engine.accumulate(batch)
    gradients = per_example_gradients(model, square_loss, batch)
    for gradient in gradients:
        for name, mask in masks.items():
            gradient[name][~mask] = 0.0
    expected = [clipped(gradient, bound) for gradient in gradients]
    for name, total in engine.sums.items():
        torch.testing.assert_close(total, sum(rows(gradient[name]) for gradient in expected), rtol=1e-9, atol=1e-12)


@settings(examples(8, quick=4), derandomize=True)
@given(seed=st.integers(0, 1000), size=st.sampled_from([1e-3, 1.0, 1e6]))
def test_one_example_moves_the_row_norms_by_at_most_the_bound(seed, size):
    torch.manual_seed(seed)
    model = images_network().double()
    engine = ClippedRowNorms(model, square_loss, max_grad_norm=0.5)
    engine.accumulate(torch.randn(3, 1, 4, 4).double())
    before = {name: total.clone() for name, total in engine.sums.items()}
    norm = float(engine.accumulate(size * torch.randn(1, 1, 4, 4).double()))
    moved = torch.cat([total - before[name] for name, total in engine.sums.items()]).norm()
    assert float(moved) <= engine.sensitivity * (1 + 1e-5)
    # The bound is reached: it is the size of the clipped gradient itself.
    assert float(moved) == pytest.approx(min(norm, 0.5), rel=1e-9)
