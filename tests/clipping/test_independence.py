"""Models in which examples meet are refused before the first step; models in which they do not are accepted."""

import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from thoroughness import THOROUGH
from torch import Tensor, nn

from dp_microadam import ClippedGradients, InputError
from dp_microadam.clipping.checks.examples import SyntheticExamples
from dp_microadam.clipping.checks.randomness import EqualDraws
from dp_microadam.clipping.precision import full_precision
from dp_microadam.errors import PrivacyWarning

from .conftest import cross_entropy

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


def on_inputs(change: Callable[[Tensor], Tensor]) -> Loss:
    return lambda model, batch: cross_entropy(model, (change(batch[0]), batch[1]))


def features(count: int = 5, classes: int = 4) -> Batch:
    return torch.randn(count, 5), torch.randint(classes, (count,))


def images(count: int = 5) -> Batch:
    return torch.randint(256, (count, 3, 8, 8), dtype=torch.uint8), torch.randint(10, (count,))


def texts(count: int = 4) -> Batch:
    return torch.randint(50, (count, 7)), torch.randint(4, (count,))


def classifier_of(batch: Batch) -> nn.Module:
    if batch[0].dtype == torch.uint8:
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
    if batch[0].dtype == torch.long:
        return nn.Sequential(nn.Embedding(50, 3), nn.Flatten(), nn.Linear(21, 4))
    return nn.Linear(5, 4)


def assert_refused(model: nn.Module, loss: Callable, batch: object, match: str = "mixes examples", **options: object) -> None:
    engine = ClippedGradients(model, loss, max_grad_norm=1.0, **options)
    with pytest.raises(InputError, match=match) as refusal:
        engine.accumulate(batch)
    assert type(refusal.value) is InputError
    assert all(not total.any() for total in engine.sums.values())


def assert_accepted(model: nn.Module, loss: Callable, batch: object, checks: int = 2) -> None:
    """By every check that is made, with other seeds each time."""
    for _ in range(checks):
        assert ClippedGradients(model, loss, max_grad_norm=1.0).accumulate(batch).isfinite().all()


class Averaged(torch.autograd.Function):
    """Mixes examples in the backward pass only."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.abs().max()


def filled_forwards(x: Tensor) -> Tensor:
    rows = list(x)
    for i in range(1, len(rows)):
        rows[i] = torch.where(rows[i].isnan(), rows[i - 1], rows[i])
    return torch.stack(rows)


MIXING: dict[str, Loss] = {
    "minus the first": on_inputs(lambda x: x - x[:1]),
    "minus the last": on_inputs(lambda x: x - x[-1:]),
    "minus the mean": on_inputs(lambda x: x - x.mean(0)),
    "the neighbour": on_inputs(lambda x: x.roll(1, 0)),
    "a running sum": on_inputs(lambda x: x.cumsum(0)),
    "a running sum from the end": on_inputs(lambda x: x.flip(0).cumsum(0).flip(0)),
    "batch statistics": on_inputs(lambda x: F.batch_norm(x, None, None, training=True)),
    "mask of the first": on_inputs(lambda x: x * (x[0] > 100).to(x.dtype)),
    "divided by the size": lambda m, b: cross_entropy(m, b) / len(b[0]),
    "the mean of the losses": lambda m, b: cross_entropy(m, b).mean().expand(len(b[0])),
    "centred outputs": lambda m, b: (m(b[0]) - m(b[0]).detach().mean(0)).square().sum(1),
    "contrastive": lambda m, b: F.cross_entropy(m(b[0]) @ b[0][:, :4].T, torch.arange(len(b[0])), reduction="none"),
    "normalized if large": on_inputs(lambda x: x / x.abs().max().clamp(min=1)),
    **{f"rescaled above {t:g}": on_inputs(lambda x, t=t: x / x.norm() if x.norm() > t else x) for t in (1.0, 1e3, 1e5)},
    "weak": lambda m, b: cross_entropy(m, b) * (1 + 1e-6 * b[0].square().mean()),
    "weak at all scales": lambda m, b: cross_entropy(m, b) * (1 + 1e-7 * torch.tanh(b[0].square().mean())),
    "the last by the first": on_inputs(lambda x: torch.cat([x[:-1], x[-1:] + x[:1]])),
    "pairs only": on_inputs(lambda x: x - x.mean(0) if len(x) == 2 else x),
    "all but single ones": on_inputs(lambda x: x - x.mean(0) if len(x) > 1 else x),
    "in the backward pass only": lambda m, b: F.cross_entropy(Averaged.apply(m(b[0])), b[1], reduction="none"),
    "class weights counted in the batch": lambda m, b: cross_entropy(m, b) / torch.bincount(b[1], minlength=4)[b[1]],
    "NaN by the mean": on_inputs(lambda x: torch.where(x.isnan(), x.nanmean(0).expand_as(x), x)),
    "NaN by the example before": on_inputs(filled_forwards),
    "all zero if one is NaN": on_inputs(lambda x: x * 0 if x.isnan().any() else x),
}


@pytest.mark.parametrize("kind", MIXING)
@pytest.mark.parametrize("count", [1, 9])
def test_a_loss_that_mixes_examples_is_refused(kind, count):
    assert_refused(nn.Linear(5, 4), MIXING[kind], features(count))


OF_PIXELS = {
    "divided by the largest of the batch": (lambda x: x.float() / x.max(), True),
    "divided by the mean of the batch, if bright": (lambda x: x.float() / x.float().mean().clamp(min=20), True),
    "divided by 255": (lambda x: x.float() / 255, False),
    "divided by the largest of the image": (lambda x: x.float() / x.amax((1, 2, 3), keepdim=True).clamp(min=1), False),
    "as they are": (lambda x: x.float(), False),
}


@pytest.mark.parametrize("kind", OF_PIXELS)
def test_pixels_are_tried_in_their_full_range(kind):
    change, mixes = OF_PIXELS[kind]
    (assert_refused if mixes else assert_accepted)(classifier_of(images()), on_inputs(change), images())


def distances(x: Tensor) -> Tensor:
    return (x.flatten(1).double()[:, None] - x.flatten(1).double()).abs().amax(2)


def near(x: Tensor) -> Tensor:
    """Pairs of examples that are no copies of each other."""
    return (distances(x) > 0) & (distances(x) < 1e-4)


def one_token_apart(x: Tensor, labels: Tensor) -> Tensor:
    return ((x.flatten(1)[:, None] != x.flatten(1)).sum(2) == 1).any(1)


LEFT_OUT = {
    "copies of another label": (lambda x, y: ((distances(x) == 0) & (y[:, None] != y)).any(1), features),
    "an earlier copy of another label": (lambda x, y: ((distances(x) == 0) & (y[:, None] != y)).tril(-1).any(1), features),
    "a later near copy of another label": (lambda x, y: (near(x) & (y[:, None] != y)).triu(1).any(1), features),
    "near copies": (lambda x, y: near(x).any(1), features),
    "an earlier near copy of its label": (lambda x, y: (near(x) & (y[:, None] == y)).tril(-1).any(1), features),
    "images of another label": (lambda x, y: ((distances(x) == 0) & (y[:, None] != y)).any(1), images),
    "images a shade apart": (lambda x, y: (distances(x) == 1).any(1), images),
    "texts a token apart": (one_token_apart, texts),
}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_leaving_out_examples_that_resemble_others_is_refused(kind):
    """Such an example would move the sum by the gradients of all those that are left out because of it."""
    torch.manual_seed(0)  # with the seeds of the check fixed, too, nothing is left to chance
    left_out, batch = LEFT_OUT[kind]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch[0].float() if batch[0].dtype == torch.uint8 else batch[0]
        return cross_entropy(model, (x, batch[1])) * ~left_out(*batch)

    engine, examples = ClippedGradients(classifier_of(batch()), loss, max_grad_norm=1.0), batch()
    assert all(mixing_is_found(engine, examples, seed=seed) for seed in range(3))


def mixing_is_found(engine: ClippedGradients, batch: Batch, seed: int) -> bool:
    try:
        engine.check_independence(batch, seed=seed)
    except InputError as refusal:
        return "mixes examples" in str(refusal)
    return False


class Experts(nn.Module):
    """Each example goes to one of eight experts, which take ``room`` times their even share of the batch and at least some."""

    def __init__(self, room: float | None, least: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(5, 8).requires_grad_(False)
        self.experts = nn.Linear(5, 8 * 4)
        self.room, self.least = room, least

    def forward(self, x: Tensor) -> Tensor:
        share = F.one_hot(self.router(20 * (x - 0.5)).argmax(1), 8).to(x.dtype)
        if self.room is not None:
            share = share * (share.cumsum(0) <= max(self.least, int(self.room * len(x) / 8)))
        return (share.unsqueeze(2) * self.experts(x).unflatten(1, (8, 4))).sum(1)


class TokenExperts(nn.Module):
    """The tokens of all examples go to eight experts: as many as have ``room``, or the likeliest ones of each expert."""

    def __init__(self, room: float | None, chosen_by_experts: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 5)
        self.experts = Experts(room)
        self.experts.router.requires_grad_(True)
        self.chosen_by_experts = chosen_by_experts

    def forward(self, texts: Tensor) -> Tensor:
        tokens = self.table(texts).flatten(0, 1)
        values = self.experts(tokens)
        if self.chosen_by_experts:
            scores = self.experts.router(tokens).softmax(1)
            taken = scores >= scores.topk(max(1, len(scores) // 8), dim=0).values[-1]
            values = values * (taken * scores).sum(1, keepdim=True)
        else:
            values = values * self.experts.router(20 * (tokens - 0.5)).softmax(1).amax(1, keepdim=True)
        return values.view(len(texts), -1, 4).mean(1)


def balanced(model: nn.Module, batch: Batch) -> Tensor:
    """With a term that spreads the tokens of the batch over all experts."""
    shares = model.experts.router(model.table(batch[0]).flatten(0, 1)).softmax(1).mean(0)
    return cross_entropy(model, batch) + 0.1 * shares.square().sum()


@pytest.mark.parametrize("count", [8, 64])
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (lambda: TokenExperts(room=1.25), cross_entropy),
        (lambda: TokenExperts(room=2.0), cross_entropy),
        (lambda: TokenExperts(room=None, chosen_by_experts=True), cross_entropy),
        (lambda: TokenExperts(room=None), balanced),
    ],
    ids=["capacity", "larger capacity", "chosen by experts", "balanced"],
)
def test_tokens_of_several_examples_that_compete_for_experts_are_refused(make, loss, count):
    torch.manual_seed(count)
    assert_refused(make(), loss, texts(count))
    assert_accepted(TokenExperts(room=None), cross_entropy, texts(count), checks=1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [8, 20, 64])
def test_experts_with_a_capacity_are_refused_and_those_without_are_not(seed, count):
    # A check misses the capacity with some seeds, if all that is replaced goes to one expert. The seeds are fixed, so that only
    # a change of the check draws again.
    torch.manual_seed(seed)
    engine = ClippedGradients(Experts(room=1.25), cross_entropy, max_grad_norm=1.0)
    assert any(mixing_is_found(engine, features(count), seed=check) for check in range(10))
    assert all(not total.any() for total in engine.sums.values())
    assert_accepted(Experts(room=None), cross_entropy, features(count), checks=1)


def test_mixing_of_large_batches_only_is_refused_after_small_ones_were_accepted():
    engine = ClippedGradients(nn.Linear(5, 4), on_inputs(lambda x: x - x.mean(0) if len(x) > 16 else x), max_grad_norm=1.0)
    engine.accumulate(features(8))
    before = {name: total.clone() for name, total in engine.sums.items()}
    for _ in range(2):
        with pytest.raises(InputError, match="mixes examples"):
            engine.accumulate(features(17))
    assert all(torch.equal(total, before[name]) for name, total in engine.sums.items())


@pytest.mark.parametrize("smallest", [2, 17])
def test_under_autocast_mixing_is_refused_at_small_and_at_large_sizes(smallest):
    mixing = on_inputs(lambda x: x - x.mean(0) if len(x) >= smallest else x)
    assert_refused(nn.Linear(5, 4), mixing, features(17), autocast=torch.float16)


def check_anew(engine: ClippedGradients, times: int) -> None:
    for _ in range(times):
        engine._checks.clear()
        engine.accumulate(features())


def mixup(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


SOMETIMES = {
    "by Python": on_inputs(lambda x: mixup(x) if random.random() < 0.5 else x),
    "by NumPy": on_inputs(lambda x: mixup(x) if np.random.rand() < 0.5 else x),  # noqa: NPY002
    "by torch": on_inputs(lambda x: mixup(x) if torch.rand(()) < 0.5 else x),
}


@pytest.mark.parametrize("kind", SOMETIMES)
def test_mixing_at_random_is_refused_when_the_check_is_made(kind):
    # Of 6 seeds each misses it with probability 1 - 1/2 · 5/6; all of five checks with 0.584³⁰ < 1e-6.
    engine = ClippedGradients(nn.Linear(5, 4), SOMETIMES[kind], max_grad_norm=1.0)
    with pytest.raises(InputError, match=r"mixes examples.*seed=\d+"):
        check_anew(engine, times=5)


def test_a_check_that_refused_can_be_repeated_by_its_seed():
    engine = ClippedGradients(nn.Linear(5, 4), SOMETIMES["by Python"], max_grad_norm=1.0)
    with pytest.raises(InputError) as refusal:
        check_anew(engine, times=5)
    seed = int(str(refusal.value).rpartition("seed=")[2].strip("()"))
    for _ in range(2):
        with pytest.raises(InputError) as again:
            engine.check_independence(features(), seed=seed)
        assert str(again.value) == str(refusal.value)


def test_mixing_is_refused_on_examples_that_were_given():
    given = (torch.arange(20.0).view(4, 5) + 100, torch.tensor([2, 2, 2, 0]))
    for kind in ("minus the first", "minus the last", "divided by the size"):
        assert_refused(nn.Linear(5, 4), MIXING[kind], features(9), synthetic_batch=given)
    engine = ClippedGradients(nn.Linear(5, 4), cross_entropy, max_grad_norm=1.0, synthetic_batch=given)
    engine.accumulate(features(9))
    with pytest.raises(InputError, match="synthetic_batch holds 3 examples; it must hold at least 4"):
        ClippedGradients(nn.Linear(5, 4), cross_entropy, max_grad_norm=1.0, synthetic_batch=torch.ones(3)).accumulate(
            features()
        )


class Centred(nn.Module):
    """Mixes before a frozen table, behind a gain and a head of zeros, or in a parameter that is added."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Embedding(5, 4).requires_grad_(False)
        self.layer, self.gain, self.head = nn.Linear(4, 4), nn.Parameter(torch.zeros(())), nn.Linear(4, 2)
        self.token = nn.Parameter(torch.ones(4))
        if how == "behind zeros":
            nn.init.zeros_(self.head.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) * 1.0
        if self.how == "before everything":
            x = x - x.mean(0)
        y = x + self.gain * self.layer(x - x.mean(0) if self.how == "behind zeros" else x)
        y = y + self.token - ((x * self.token).mean(0) if self.how == "in a parameter" else 0)
        if self.how == "rows in another order":
            return self.head(y.flip(0)).flip(0)
        return self.head(y)


@pytest.mark.parametrize("how", ["before everything", "behind zeros", "in a parameter", "rows in another order"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_model_that_mixes_examples_is_refused(how, count):
    assert_refused(Centred(how), lambda m, x: m(x).square().sum(1), torch.randint(5, (count,)))
    assert_accepted(Centred("nowhere"), lambda m, x: m(x).square().sum(1), torch.randint(5, (count,)), checks=1)


def test_a_layer_with_time_first_that_is_given_the_batch_first_is_refused():
    """It attends from one example to the next."""
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    assert_refused(model, lambda m, x: m(x).flatten(1).square().sum(1), torch.randn(3, 5, 4))


@pytest.mark.parametrize("views", [2, 3])
def test_view_major_augmentation_is_refused(views):
    def view_major(model: nn.Module, batch: Tensor) -> Tensor:
        rows = model(batch.transpose(0, 1).flatten(0, 1)).square().sum(1)
        return rows.view(views, len(batch)).mean(0)

    assert_refused(nn.Linear(4, 2), view_major, torch.randn(3, views, 4), "mixes examples.*next to each other")


class SkipsExamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x) * (torch.rand(len(x), 1) < 0.5)


class SkipsBatches(nn.Module):
    """Takes its random numbers from Python, and sometimes from NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x) if random.random() + np.random.rand() < 1 else x  # noqa: NPY002


class Float32Inside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax((10 * x).float() @ torch.eye(8), 1).to(x.dtype)


def around(middle: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(5, 8), middle(), nn.Linear(8, 4))


APART: dict[str, Callable[[], nn.Module]] = {
    "dropout": around(lambda: nn.Dropout(0.5)),
    "dropout of channels": around(lambda: nn.Sequential(nn.Unflatten(1, (8, 1)), nn.Dropout1d(0.5), nn.Flatten())),
    "alpha dropout": around(lambda: nn.AlphaDropout(0.3)),
    "examples skip a block": around(SkipsExamples),
    "batches skip a block": around(SkipsBatches),
    "layer norm": around(lambda: nn.Sequential(nn.LayerNorm(8), nn.GELU())),
    "saturated": around(nn.Sigmoid),
    "float32 inside": around(Float32Inside),
}


@pytest.mark.parametrize("kind", APART)
def test_models_in_which_examples_do_not_meet_are_accepted(kind):
    for seed in range(20 if THOROUGH else 1):
        torch.manual_seed(seed)
        engine = ClippedGradients(APART[kind](), cross_entropy, max_grad_norm=1.0)
        for count in (1, 9, 17):
            assert engine.accumulate(features(count)).shape == (count,)


def raising(x: Tensor) -> Tensor:
    if not x.isfinite().all():
        raise ValueError("not finite")
    return x


LOSSES_APART: dict[str, Loss] = {
    "weights by label": lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=torch.arange(4.0), reduction="none"),
    "filled with the example's mean": on_inputs(lambda x: torch.where(x.isnan(), x.nanmean(1, keepdim=True), x)),
    "dropout after filling": on_inputs(lambda x: F.dropout(x.nan_to_num(0, 1, -1), 0.3)),
    "with a flag": on_inputs(lambda x: torch.where(x.isnan().any(1, keepdim=True), -x.nan_to_num(), x)),
    "an error for missing numbers": on_inputs(raising),
}


@pytest.mark.parametrize("kind", LOSSES_APART)
def test_losses_in_which_examples_do_not_meet_are_accepted(kind):
    assert_accepted(nn.Linear(5, 4), LOSSES_APART[kind], features(9))


@pytest.mark.parametrize("targets", ["kept", "left out by their number in the batch", "left out by the example's own"])
def test_a_target_that_is_missing_does_not_hide_an_input_that_is_filled_in(targets):
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if targets == "kept":
            x = torch.where(batch[0].isnan(), batch[0].nanmean(0).expand_as(batch[0]), batch[0])
            return (model(x) - batch[1]).square().mean(1)
        known = ~batch[1].isnan()
        squares = torch.where(known, model(batch[0]) - batch[1], 0).square().sum(1)
        return squares / (known.sum(1) if "own" in targets else known.sum()).clamp(min=1)

    judged = assert_accepted if "own" in targets else assert_refused
    judged(nn.Linear(5, 3), loss, (torch.randn(5, 5), torch.randn(5, 3)))


def counted(sizes: list[int]) -> Loss:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        sizes.append(len(batch[0]))
        return cross_entropy(model, batch)

    return loss


def test_a_model_can_be_checked_before_the_first_step_and_nothing_is_checked_twice():
    sizes: list[int] = []
    engine = ClippedGradients(nn.Linear(5, 4), counted(sizes), max_grad_norm=1.0)
    engine.check_independence(features(8))
    assert all(not total.any() for total in engine.sums.values())
    made = len(sizes)
    assert sizes.count(8) == 2
    engine.check_independence(features(8))
    for count in (8, 3, 1, 5):
        engine.accumulate(features(count))
    assert sizes[made:] == [8, 3, 1, 5]
    engine.accumulate(features(9))
    assert sizes[made + 4 :] == [9, 9, 9]


def test_every_check_draws_examples_of_its_own_and_uses_no_value_of_the_batch():
    seen: set[float] = set()

    def watching(model: nn.Module, batch: Batch) -> Tensor:
        assert not (batch[0] == 7.25).any()
        seen.add(batch[0].detach().double().sum().item())
        return cross_entropy(model, batch)

    checks = []
    for _ in range(2):
        seen.clear()
        engine = ClippedGradients(nn.Linear(5, 4), watching, max_grad_norm=1.0)
        engine.check_independence((torch.full((5, 5), 7.25), torch.zeros(5, dtype=torch.long)))
        checks.append(set(seen))
    assert len(checks[0] ^ checks[1]) > 10


@pytest.mark.parametrize("dropout", [False, True])
def test_the_check_costs_as_much_as_passes_over_a_hundred_examples(dropout):
    """Twice that for a model that draws random numbers."""
    sizes: list[int] = []
    model = nn.Sequential(nn.Linear(5, 8), *([nn.Dropout(0.5)] if dropout else []), nn.Linear(8, 4))
    ClippedGradients(model, counted(sizes), max_grad_norm=1.0).check_independence(features(3))
    assert sum(sizes) <= (200 if dropout else 100)


def test_the_check_leaves_the_model_and_all_random_streams_as_they_were():
    model = nn.Sequential(nn.Linear(5, 8), SkipsBatches(), nn.Dropout(0.5).eval(), nn.Linear(8, 4))
    model[3].bias.requires_grad_(False)
    model[0].weight.grad = gradient = torch.ones(8, 5)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    versions = {name: p._version for name, p in model.named_parameters()}
    batch = features(8)
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    ClippedGradients(model, cross_entropy, max_grad_norm=1.0).check_independence(batch)
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert (np.random.get_state()[1] == streams[2]).all()  # noqa: NPY002
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert {name: p._version for name, p in model.named_parameters()} == versions
    assert [module.training for module in model] == [True, True, False, True]
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["3.bias"]
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(8, 5))


DRAWS = {
    "rand": lambda n: torch.rand(2, n),
    "randn": lambda n: torch.randn((n, 3)),
    "randint": lambda n: torch.randint(5, 50, (2, n)),
    "rand_like": lambda n: torch.rand_like(torch.ones(n, 3)),
    "bernoulli": lambda n: torch.bernoulli(torch.full((3, n), 0.5)),
    "bernoulli_": lambda n: torch.empty(3, n).bernoulli_(0.5),
    "uniform_": lambda n: torch.empty(10, n).uniform_(-1, 1),
    "normal_": lambda n: torch.empty(n).normal_(),
    "one by one": lambda n: torch.stack([torch.rand(()) for _ in range(n)]),
    "dropout": lambda n: F.dropout(torch.ones(3, n), 0.5),
    "attention": lambda n: F.scaled_dot_product_attention(*[torch.ones(n, 1, 4, 2)] * 3, dropout_p=0.5),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_one_number_is_drawn_for_all_whatever_their_number(kind):
    values = set()
    for seed in range(8):
        results = set()
        for count in (1, 2, 5):
            with EqualDraws(lambda seed=seed: torch.manual_seed(seed)):
                drawn = DRAWS[kind](count)
            assert drawn.numel() >= count
            results |= set(drawn.flatten().tolist())
        assert len(results) == 1
        values |= results
    assert len(values) > 1 or kind in ("dropout", "attention")


@pytest.mark.parametrize("bounds", [(), (256, 256, 4)])
def test_synthetic_numbers_stay_below_their_bound_and_others_differ_everywhere(bounds):
    batch = torch.zeros(3, 40, dtype=torch.uint8), torch.zeros(3, 40, dtype=torch.long), torch.zeros(3, dtype=torch.long)
    for seed in range(50):
        examples, others = SyntheticExamples(batch, seed=seed, bounds=bounds).draw(9)
        for one, other, bound in zip(examples, others, bounds or (2, 2, 2), strict=True):
            assert (one != other).all()
            assert all(0 <= int(value) < bound for value in (one.min(), other.min(), one.max(), other.max()))


def test_large_integers_are_drawn_only_where_the_largest_of_them_is_accepted():
    """Of two tokens both happen to be in a table of 200 more often than not; later draws of the check are not."""
    for seed in range(20):
        examples = SyntheticExamples(torch.zeros(3, 2, dtype=torch.long), seed=seed)
        assert examples.with_large_integers(lambda drawn: int(drawn.max()) < 200).bounds == [128]
        assert examples.with_large_integers(lambda drawn: int(drawn.max()) < 2).bounds == [2]
        assert examples.with_large_integers(lambda drawn: int(drawn.max()) < 256).bounds == [256]


def tf32(values: Tensor) -> Tensor:
    """Rounded to the ten bits of mantissa that TF32 keeps; the gradient passes through."""
    bits = values.detach().contiguous().view(torch.int32)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    return values + (rounded - values.detach())


def test_full_precision_on_a_gpu_rules_out_tf32():
    backends = torch.backends
    places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [place.fp32_precision for place in places]
    with full_precision(torch.device("cuda")):
        assert [place.fp32_precision for place in places] == ["ieee"] * 3
    assert [place.fp32_precision for place in places] == before


@pytest.mark.parametrize("obedient", [True, False])
def test_rounding_that_depends_on_the_batch_size_is_no_mixing(monkeypatch, obedient):
    """Convolutions of large batches round as cuDNN's may: where the setting allows TF32, as by default, or whatever it says."""
    allowed: list[bool] = []
    plain = nn.Conv2d._conv_forward

    def rounding(self: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        allowed.append(torch.backends.mkldnn.conv.fp32_precision != "ieee")
        rounds = len(x) >= 15 and x.dtype == torch.float32 and (allowed[-1] or not obedient)
        return plain(self, tf32(x) if rounds else x, weight, bias)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", rounding)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10))
    engine = ClippedGradients(model, cross_entropy, max_grad_norm=1.0)
    engine.check_independence((torch.randn(15, 3, 8, 8), torch.arange(15) % 10))
    assert allowed
    assert not any(allowed)
    with torch.no_grad():
        model(torch.randn(1, 3, 8, 8))
    assert allowed[-1], "the setting is back"


class Failing(nn.Module):
    """Raises the given error in double precision, or on numbers that are larger than 100."""

    def __init__(self, error: Exception | None = None, large: Exception | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.error, self.large = error, large

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None and x.dtype == torch.float64:
            raise self.error
        if self.large is not None and bool(x.detach().abs().max() > 100):
            raise self.large
        return self.layer(x.float() if self.error is self.large is None else x)


FAILURES = {
    "not enough memory": [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    "LookupError": [LookupError("table")],
}


@pytest.mark.parametrize(("what", "error"), [(what, error) for what, errors in FAILURES.items() for error in errors])
def test_a_check_that_fails_in_double_precision_says_that_it_is_weaker(what, error):
    engine = ClippedGradients(Failing(error), cross_entropy, max_grad_norm=1.0)
    with pytest.warns(PrivacyWarning, match=what):
        engine.check_independence(features())


def test_a_model_without_double_precision_is_checked_as_it_is():
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        ClippedGradients(Failing(), cross_entropy, max_grad_norm=1.0).check_independence(features())


def test_running_out_of_memory_later_in_the_check_is_no_reason_to_leave_something_out():
    """On large numbers, say: a model may refuse those, but memory says nothing about the model."""
    engine = ClippedGradients(Failing(large=FAILURES["not enough memory"][0]), cross_entropy, max_grad_norm=1.0)
    with pytest.raises(torch.OutOfMemoryError):
        engine.check_independence(features())


def test_an_error_of_the_model_on_made_up_examples_says_that_they_are():
    def last(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        rows, lengths = batch
        return model(rows).gather(1, lengths.unsqueeze(1) - 1).squeeze(1)  # a length of 0 is none

    engine = ClippedGradients(nn.Linear(5, 4), last, max_grad_norm=1.0)
    with pytest.raises(RuntimeError) as error:
        engine.accumulate((torch.rand(3, 5), torch.tensor([1, 2, 4])))
    assert "synthetic_batch" in error.value.__notes__[0]
