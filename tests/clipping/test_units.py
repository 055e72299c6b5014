"""Users of several examples are clipped as a whole: exact against examples one at a time, and checked before the first step."""

import copy
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import THOROUGH, examples
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dp_microadam.clipping.engine import ClippedGradients, ClippedRowNorms
from dp_microadam.clipping.per_example import clipped_sum
from dp_microadam.clipping.rules import convolution, linear, normalization
from dp_microadam.clipping.rules.convolution import ConvolutionFactors, Geometry
from dp_microadam.clipping.rules.families import register_rule
from dp_microadam.clipping.rules.rule import LayerRule
from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d

from .conftest import flat, random_loss, randomize, square_loss


def means_over(counts: list[int], width: int) -> Tensor:
    """Weights of users with so many examples, filled up to ``width``."""
    present = torch.tensor(counts).unsqueeze(1)
    return (torch.arange(width) < present).double() / present


def of_users(batch: object, counts: list[int], width: int) -> object:
    """Rows for these users from the examples of ``batch``, all different; those that fill up are copies of the first."""
    own = torch.arange(len(counts)).repeat_interleave(width) * width
    column = torch.arange(width).repeat(len(counts))
    rows = own + torch.where(column < torch.tensor(counts).repeat_interleave(width), column, 0)

    def chosen(leaf: Tensor) -> Tensor:
        found = leaf[rows % len(leaf)]
        return found * (1 + 0.1 * rows.view(-1, *[1] * (leaf.dim() - 1))) if leaf.is_floating_point() else found

    return tree_map(chosen, batch)


COUNTS = [3, 1, 2, 3]


@pytest.fixture(scope="session")
def assert_agrees():
    """As the fixture of this name for examples: the engine's sums and norms of users are the twin's."""

    def check(model, batch, *, strategies=(None, "ghost", "keep", "drop"), loss=random_loss, then=lambda: None) -> None:
        randomize(model)
        then()
        weights = means_over(COUNTS, 3)
        # Some models compute a softmax in float32 whatever they are in: a third of a rounded number is another one.
        for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 1e-5)):
            model.to(dtype)
            rows = tree_map(
                lambda leaf, dtype=dtype: leaf.to(dtype) if leaf.is_floating_point() else leaf, of_users(batch, COUNTS, 3)
            )
            _, norms = clipped_sum(model, loss, rows, max_grad_norm=1.0, weights=weights)
            bound = sorted(norms)[len(norms) // 2] * 0.999 + 1e-6  # some users are clipped, some are not
            expected, norms = clipped_sum(model, loss, rows, max_grad_norm=bound, weights=weights)
            for strategy in strategies if THOROUGH else (None,):
                engine = ClippedGradients(model, loss, max_grad_norm=bound, strategy=strategy)
                found = engine.accumulate(rows, weights)
                assert found.shape == (len(COUNTS),)
                scale = max(norms) + 1e-30
                assert (found.double() - torch.tensor(norms, dtype=torch.float64)).abs().max() <= tolerance * scale
                error = (flat(engine.sums) - flat(expected)).norm()
                assert error <= tolerance * max(float(flat(expected).norm()), bound), (strategy, dtype)
            if not THOROUGH:
                break

    return check


# Every test that compares a layer family or a model with examples one at a time, of users instead of examples.
for _file in ("test_families", "test_sequences", "test_shared_parameters", "test_transformers"):
    _spec = importlib.util.spec_from_file_location(f"{__package__}.of_users", Path(__file__).with_name(f"{_file}.py"))
    _module = importlib.util.module_from_spec(_spec)  # a copy: the mark must not reach the tests of examples
    _spec.loader.exec_module(_module)
    for _name, _test in vars(_module).items():
        if _name.startswith("test_") and "assert_agrees" in inspect.signature(_test).parameters:
            globals()[_name.replace("test_", "test_users_", 1)] = pytest.mark.slow(_test)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


CNN = nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))


@settings(examples(200, quick=40), derandomize=True)
@given(
    users=st.integers(1, 3),
    rows=st.integers(1, 4),
    groups=st.integers(1, 2),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
def test_gram_matrices_of_several_images_give_the_norms_of_formed_gradients(
    users, rows, groups, kernel, stride, padding, dilation
):
    geometry = Geometry((2 * groups, 3, *kernel), stride, padding, dilation, groups)
    torch.manual_seed(0)
    inputs = torch.randn(users * rows, 3 * groups, 6, 7, dtype=torch.float64)
    weight = torch.zeros(geometry.weight_shape, dtype=torch.float64)
    outputs = nn.functional.conv2d(inputs, weight, None, stride, padding, dilation, groups)
    factors = ConvolutionFactors(inputs, torch.randn_like(outputs), geometry, rows)
    formed = factors.per_example(slice(0, users))
    torch.testing.assert_close(factors.ghost().norms, formed.flatten(1).square().sum(1))


@pytest.mark.parametrize("strategy", ["ghost", pytest.param("keep", marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["norm", pytest.param("variance", marks=pytest.mark.slow)])
def test_weight_standardized_convolutions_of_users_agree_by_gram_matrices(form, strategy):
    torch.manual_seed(0)
    model = randomize(WeightStandardizedConv2d(2, 3, 3, padding=1, form=form, gain=True)).double()
    rows, weights = of_users(torch.randn(5, 2, 4, 4, dtype=torch.float64), COUNTS, 3), means_over(COUNTS, 3)
    expected, norms = clipped_sum(model, random_loss, rows, max_grad_norm=1.0, weights=weights)
    engine = ClippedGradients(model, random_loss, max_grad_norm=1.0, strategy=strategy)
    torch.testing.assert_close(engine.accumulate(rows, weights), torch.tensor(norms, dtype=torch.float64))
    torch.testing.assert_close(engine.sums, expected)


@pytest.fixture(scope="module")
def engine_of_cnn():
    """One engine, which checks the model once for each number of rows."""
    model = randomize(copy.deepcopy(CNN).double())
    return ClippedGradients(model, random_loss, max_grad_norm=0.7), model


@settings(examples(80, quick=6), derandomize=True)
@given(
    counts=st.lists(st.integers(1, 5 if THOROUGH else 3), min_size=1, max_size=6),
    room=st.integers(0, int(THOROUGH)),
    seed=st.integers(0, 99),
)
def test_users_of_any_sizes_agree_with_examples_one_at_a_time(engine_of_cnn, counts, room, seed):
    engine, model = engine_of_cnn
    torch.manual_seed(seed)
    width = max(counts) + room
    rows, weights = of_users(torch.randn(7, 1, 4, 4, dtype=torch.float64), counts, width), means_over(counts, width)
    expected, norms = clipped_sum(model, random_loss, rows, max_grad_norm=0.7, weights=weights)
    engine.reset()
    found = engine.accumulate(rows, weights)
    torch.testing.assert_close(found, torch.tensor(norms, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(engine.sums, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "strategy", [None, *(pytest.param(name, marks=pytest.mark.slow) for name in ("ghost", "keep", "drop"))]
)
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"clipping": "per-layer"}, marks=pytest.mark.slow)],
    ids=["flat", "per layer"],
)
def test_no_user_adds_more_than_the_bound_whatever_they_have(strategy, options):
    """One user with five huge examples that all pull the same way, beside users with little."""
    torch.manual_seed(1)
    model = randomize(copy.deepcopy(CNN))
    ordinary = torch.randn(10, 1, 4, 4)
    rows = torch.cat([ordinary[:5], 1e4 * ordinary[:1].expand(5, 1, 4, 4), ordinary[5:]])
    weights = means_over([2, 5, 5], 5)
    bound = 0.01
    engine = ClippedGradients(model, random_loss, max_grad_norm=bound, strategy=strategy, **options)
    engine.accumulate(rows, weights)
    whole = flat(engine.sums)
    for user in range(3):
        engine.reset()
        others = [other for other in range(3) if other != user]
        engine.accumulate(rows.view(3, 5, 1, 4, 4)[others].flatten(0, 1), weights[others])
        assert float((whole - flat(engine.sums)).norm()) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("kind", [ClippedGradients, ClippedRowNorms])
def test_scales_and_masks_apply_to_users(kind):
    model = mlp()
    scale = {"0.weight": 0.5 + torch.rand(6, 4, dtype=torch.float64), "2.bias": torch.tensor([2.0, 0.1, 1.0]).double()}
    mask = torch.arange(6) % 2 == 0
    rows, weights = of_users(torch.randn(5, 4, dtype=torch.float64), COUNTS, 4), means_over(COUNTS, 4)
    engine = kind(model, square_loss, max_grad_norm=0.3, scale=scale, row_masks={"0.weight": mask})
    found = engine.accumulate(rows, weights)
    factors = {**scale, "0.weight": scale["0.weight"] * mask.unsqueeze(1)}
    total, norms = {}, []
    for user in range(len(COUNTS)):
        own = rows.view(len(COUNTS), 4, 4)[user]
        one, (norm,) = clipped_sum(model, square_loss, own, max_grad_norm=0.3, scale=factors, weights=weights[user : user + 1])
        norms.append(norm)
        for name, part in one.items():
            part = part.flatten(1).norm(dim=1) if kind is ClippedRowNorms and part.dim() > 1 else part
            part = part.abs() if kind is ClippedRowNorms else part
            total[name] = total.get(name, 0) + part
    torch.testing.assert_close(found, torch.tensor(norms, dtype=torch.float64))
    torch.testing.assert_close(engine.sums, total)


def test_examples_that_fill_up_change_nothing():
    """Whatever they are, as long as they are finite: their weight is exactly zero. What is left is rounding."""
    model, rows, weights = mlp(), torch.randn(8, 4, dtype=torch.float64), means_over([2, 1], 4)
    engine = ClippedGradients(model, square_loss, max_grad_norm=0.5)
    found = []
    for filling in (0.0, 1.0, 1e8):
        rows[[2, 3, 5, 6, 7]] = filling
        engine.reset()
        found.append((engine.accumulate(rows, weights), {name: total.clone() for name, total in engine.sums.items()}))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [torch.nan, pytest.param(torch.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_user_with_an_example_that_is_not_finite_contributes_nothing(value, place):
    torch.manual_seed(0)
    model, counts = randomize(copy.deepcopy(CNN).double()), [3, 2, 1]
    clean = torch.randn(7, 1, 4, 4, dtype=torch.float64)
    rows, weights = of_users(clean, counts, 3), means_over(counts, 3)
    rows[3 + place] = value  # of the second user, whose first example also fills up
    rows[5] = rows[3]
    engine = ClippedGradients(model, random_loss, max_grad_norm=0.5)
    norms = engine.accumulate(rows, weights)
    assert not torch.isfinite(norms[1])
    expected, _ = clipped_sum(model, random_loss, rows[[0, 1, 2, 6, 7, 8]], max_grad_norm=0.5, weights=weights[[0, 2]])
    torch.testing.assert_close(engine.sums, expected)


@pytest.mark.parametrize("shape", [(8,), (3, 3), (0, 4), (8, 1, 1)])
def test_weights_that_do_not_fit_the_batch_are_refused(shape):
    engine = ClippedGradients(mlp(), square_loss, max_grad_norm=1.0)
    with pytest.raises(InputError, match="weights has shape"):
        engine.accumulate(torch.randn(8, 4, dtype=torch.float64), torch.ones(shape))
    assert len(engine.accumulate(torch.empty(0, 4, dtype=torch.float64), torch.empty(0, 4))) == 0


def test_a_loss_that_mixes_a_users_examples_is_refused_like_any_other():
    def centred(model: nn.Module, batch: Tensor) -> Tensor:
        outputs = model(batch)
        pairs = outputs.view(-1, 2, outputs.shape[1]) if len(outputs) % 2 == 0 else outputs.unsqueeze(1)
        return (pairs - 0.5 * pairs.mean(1, keepdim=True)).square().sum(2).flatten()

    engine = ClippedGradients(mlp(), centred, max_grad_norm=1.0)
    with pytest.raises(InputError, match=r"changed|mixes"):
        engine.check_independence(torch.randn(8, 4, dtype=torch.float64), rows_per_unit=[2])


def test_the_check_before_the_first_step_covers_every_size_of_users_and_asks_nothing_later(monkeypatch):
    engine = ClippedGradients(mlp(), square_loss, max_grad_norm=1.0)
    engine.check_independence(torch.randn(12, 4, dtype=torch.float64), rows_per_unit=[1, 2, 3, 4])
    monkeypatch.setattr("dp_microadam.clipping.engine.check_against_autograd", None)
    monkeypatch.setattr("dp_microadam.clipping.engine.IndependenceCheck", None)
    for width in (1, 2, 3, 4):
        engine.accumulate(torch.randn(2 * width, 4, dtype=torch.float64), means_over([1, width], width))


FAULTS = {
    "a layer that takes the first row of a user for all of them": (
        linear,
        "positions",
        lambda tensor, rows: tensor.reshape(-1, rows, *tensor.shape[1:])[:, :1].expand(-1, rows, *tensor.shape[1:]),
        mlp,
        (4,),
    ),
    "rows that are averaged where they are to be summed": (
        normalization,
        "folded",
        lambda rows, count: rows.unflatten(0, (-1, count)).mean(1),
        lambda: copy.deepcopy(CNN).double(),
        (1, 4, 4),
    ),
    "convolutions that drop all rows but the last": (
        convolution,
        "folded",
        lambda rows, count: rows.unflatten(0, (-1, count))[:, -1],
        lambda: copy.deepcopy(CNN).double(),
        (1, 4, 4),
    ),
}


@pytest.mark.parametrize(
    "fault", [next(iter(FAULTS)), *(pytest.param(name, marks=pytest.mark.slow) for name in list(FAULTS)[1:])]
)
def test_a_rule_that_adds_up_a_users_rows_wrongly_is_refused_before_the_first_step(monkeypatch, fault):
    where, name, wrong, build, shape = FAULTS[fault]
    model = randomize(build())
    monkeypatch.setattr(where, name, wrong)
    engine = ClippedGradients(model, random_loss, max_grad_norm=1.0)
    batch = torch.randn(9, *shape, dtype=torch.float64)
    engine.check_independence(batch)  # examples are clipped rightly
    with pytest.raises(InputError, match=r"by autograd|not observed"):
        engine.check_independence(batch, rows_per_unit=[3])


def test_coefficients_that_belong_to_another_user_are_refused_before_the_first_step(monkeypatch):
    right = ClippedGradients._coefficients
    engine = ClippedGradients(mlp(), square_loss, max_grad_norm=1.0)
    engine.check_independence(torch.randn(9, 4, dtype=torch.float64))
    swapped = staticmethod(lambda norms, bound: right(norms, bound).flip(0))
    monkeypatch.setattr(ClippedGradients, "_coefficients", swapped)
    with pytest.raises(PrivacyError, match="fault of the clipping engine"):
        engine.check_independence(torch.randn(9, 4, dtype=torch.float64), rows_per_unit=[3])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class RowByRow(LayerRule):
    """A rule of someone's own that knows of one row per example only."""

    def gradients(self, inputs, deltas, rows):
        return {"weight": deltas * inputs}


def test_a_rule_that_knows_one_row_per_example_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("dp_microadam.clipping.rules.families._REGISTERED", {})
    register_rule(Scaled, RowByRow)
    engine = ClippedGradients(nn.Sequential(Scaled()), square_loss, max_grad_norm=1.0)
    batch = torch.rand(6, 4, dtype=torch.float64)
    engine.accumulate(batch)
    with pytest.raises(InputError, match=r"rule of layer '0' .*rows_per_example"):
        engine.check_independence(batch, rows_per_unit=[2])
