"""Models in which examples meet, or which remember examples, are refused; models in which they do not are accepted."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam import ClippedGradients, InputError
from dp_microadam.clipping.identical_random_rows import identical_random_rows
from dp_microadam.workbench import models

Batch = tuple[Tensor, Tensor]


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def on_inputs(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Batch], Tensor]:
    return lambda model, batch: cross_entropy(model, (change(batch[0]), batch[1]))


def batch_of(count: int) -> Batch:
    return torch.randn(count, 5), torch.randint(3, (count,))


MIXING = {
    "minus the first": on_inputs(lambda x: x - x[:1]),
    "minus the last": on_inputs(lambda x: x - x[-1:]),
    "mask of the first": on_inputs(lambda x: x * (x[0] > 100).to(x.dtype)),
    "divided by the size": lambda model, batch: cross_entropy(model, batch) / len(batch[0]),
    "normalized if large": on_inputs(lambda x: x / x.abs().max().clamp(min=1)),
    "weak": lambda m, b: cross_entropy(m, b) * (1 + 1e-6 * b[0].square().mean()),
    "weak at all scales": lambda m, b: cross_entropy(m, b) * (1 + 1e-7 * torch.tanh(b[0].square().mean())),
    "the last by the first": on_inputs(lambda x: torch.cat([x[:-1], x[-1:] + x[:1]])),
    "pairs only": on_inputs(lambda x: x - x.mean(0) if len(x) == 2 else x),
    "all but single ones": on_inputs(lambda x: x - x.mean(0) if len(x) > 1 else x),
}


@pytest.mark.parametrize("kind", MIXING)
@pytest.mark.parametrize("count", [1, 9])
def test_mixing_by_place_size_or_value_is_refused(kind, count):
    engine = ClippedGradients(nn.Linear(5, 3), MIXING[kind], max_grad_norm=1.0)
    with pytest.raises(InputError, match="mixes examples"):
        engine.accumulate(batch_of(count))


@pytest.mark.parametrize("count", range(4, 12))
def test_balancing_classes_within_the_batch_is_refused_at_every_size(count):
    def balanced(model: nn.Module, batch: Batch) -> Tensor:
        counts = torch.bincount(batch[1], minlength=2)
        return model(batch[0]).squeeze(1) / counts[batch[1]]

    engine = ClippedGradients(nn.Linear(1, 1, bias=False), balanced, max_grad_norm=1.0)
    with pytest.raises(InputError, match="mixes examples"):
        engine.accumulate((torch.randn(count, 1), torch.zeros(count, dtype=torch.long)))


def test_mixing_of_large_batches_only_is_refused_after_small_ones_were_accepted():
    engine = ClippedGradients(nn.Linear(5, 3), on_inputs(lambda x: x - x.mean(0) if len(x) > 16 else x), max_grad_norm=1.0)
    engine.accumulate(batch_of(8))
    before = {name: total.clone() for name, total in engine.sums.items()}
    for _ in range(2):
        with pytest.raises(InputError, match="mixes examples"):
            engine.accumulate(batch_of(17))
    assert all(torch.equal(total, before[name]) for name, total in engine.sums.items())


def test_under_autocast_mixing_is_refused_at_small_and_at_large_sizes():
    for smallest in (2, 17):

        def mixes(x: Tensor, smallest: int = smallest) -> Tensor:
            return x - x.mean(0) if len(x) >= smallest else x

        engine = ClippedGradients(nn.Linear(5, 3), on_inputs(mixes), max_grad_norm=1.0, autocast=torch.float16)
        with pytest.raises(InputError, match="mixes examples"):
            engine.accumulate(batch_of(17))


def test_rounding_by_batch_size_under_autocast_is_not_mistaken_for_mixing():
    class KernelBySize(nn.Module):
        """Adds up in another order for large batches, as the libraries of accelerators do."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 64), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            if len(x) <= 16:
                return F.linear(x, self.weight)
            return F.linear(x[:, :32], self.weight[:, :32]) + F.linear(x[:, 32:], self.weight[:, 32:])

    torch.manual_seed(0)
    model = nn.Sequential(KernelBySize(), nn.Tanh(), nn.Linear(8, 3))
    engine = ClippedGradients(model, cross_entropy, max_grad_norm=1.0, autocast=torch.float16)
    assert engine.accumulate((torch.randn(17, 64), torch.randint(3, (17,)))).shape == (17,)


def test_mixing_that_begins_later_is_refused_when_the_check_is_repeated():
    class Late(nn.Module):
        mixes = False

        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0) if self.mixes else x

    model = nn.Sequential(Late(), nn.Linear(5, 3))
    engine = ClippedGradients(model, cross_entropy, max_grad_norm=1.0)
    for call in range(1, 32):
        model[0].mixes = call > 20
        engine.accumulate(batch_of(3))
    for _ in range(2):
        with pytest.raises(InputError, match="mixes examples"):
            engine.accumulate(batch_of(3))


def test_mixing_in_the_backward_pass_only_is_refused():
    class Averages(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient / gradient.abs().max()

    engine = ClippedGradients(
        nn.Linear(5, 3),
        lambda m, b: F.cross_entropy(Averages.apply(m(b[0])), b[1], reduction="none"),
        max_grad_norm=1.0,
    )
    with pytest.raises(InputError, match="mixes examples"):
        engine.accumulate(batch_of(4))


def test_mixing_is_refused_on_examples_that_were_given():
    given = (torch.arange(20.0).view(4, 5) + 100, torch.tensor([2, 2, 2, 0]))
    for kind in ("minus the first", "minus the last", "divided by the size"):
        engine = ClippedGradients(nn.Linear(5, 3), MIXING[kind], max_grad_norm=1.0, synthetic_batch=given)
        with pytest.raises(InputError, match="mixes examples"):
            engine.accumulate(batch_of(9))
    engine = ClippedGradients(nn.Linear(5, 3), cross_entropy, max_grad_norm=1.0, synthetic_batch=given)
    engine.accumulate(batch_of(9))


class Remembers(nn.Module):
    """Writes into its state at every call, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("kept", torch.ones(()))
        self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.extra = 0

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state

    def add_gradient(self, gradient: Tensor) -> None:
        self.kept.add_(gradient.abs().sum())

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach()
        if self.how == "number of examples":
            self.kept += len(seen)
        elif self.how == "number of chunks":
            self.kept += 1
        elif self.how == "largest value":
            self.kept.copy_(torch.maximum(self.kept, seen.abs().max()))
        elif self.how == "only with gradients" and torch.is_grad_enabled():
            self.kept = 0.9 * self.kept + 0.1 * seen.mean()
        elif self.how == "frozen parameter":
            self.frozen.data.lerp_(seen.mean(0).to(self.frozen.dtype), 0.1)
        elif self.how == "extra state":
            self.extra += 1
        elif self.how == "in the backward pass" and x.requires_grad:
            x.register_hook(self.add_gradient)
        elif self.how == "on real examples only" and bool((seen == 7.25).any()):
            self.kept.fill_(7.25)
            self.frozen.data.fill_(7.25)
        return x


HOW = {
    "number of examples": "buffer '1.kept'",
    "number of chunks": "buffer '1.kept'",
    "largest value": "buffer '1.kept'",
    "only with gradients": "buffer '1.kept'",
    "frozen parameter": "parameter '1.frozen'",
    "extra state": "extra state of module '1'",
    "in the backward pass": "buffer '1.kept'",
    "on real examples only": "(buffer|parameter) '1.(kept|frozen)'",
}


@pytest.mark.parametrize("how", HOW)
def test_a_model_that_remembers_examples_is_refused_by_name_and_left_as_it_was(how):
    model = nn.Sequential(nn.Linear(5, 5), Remembers(how), nn.Linear(5, 3))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(5))
        model[0].bias.zero_()
    engine = ClippedGradients(model, cross_entropy, max_grad_norm=1.0)
    before = {name: value.clone() if isinstance(value, Tensor) else value for name, value in model.state_dict().items()}
    buffer = model[1].kept
    inputs, labels = batch_of(6)
    inputs[2] = 7.25
    with pytest.raises(InputError, match=HOW[how]):
        engine.accumulate((inputs, labels))
    after = model.state_dict()
    for name, value in before.items():
        assert torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name], name
    assert model[1].kept is buffer
    assert all(not total.any() for total in engine.sums.values())


def test_a_large_frozen_parameter_that_stores_examples_on_real_data_only_is_refused_by_name():
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(70_000), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            if bool((x == 7.25).any()):
                with torch.no_grad():
                    self.table.add_(x.mean())
            return x

    engine = ClippedGradients(nn.Sequential(Large(), nn.Linear(5, 3)), cross_entropy, max_grad_norm=1.0)
    engine.accumulate(batch_of(3))
    with pytest.raises(InputError, match=r"parameter '0\.table'"):
        engine.accumulate((torch.full((3, 5), 7.25), torch.zeros(3, dtype=torch.long)))


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


class ConstantBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([1.0, float("nan"), float("-inf")]))
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Float32Inside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax((10 * x).float() @ torch.eye(8), 1).to(x.dtype)


ACCEPTED = {
    "dropout": lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
    "dropout of channels": lambda: nn.Sequential(
        nn.Unflatten(1, (5, 1)), nn.Conv1d(5, 6, 1), nn.Dropout1d(0.5), nn.Flatten(), nn.Linear(6, 3)
    ),
    "alpha dropout": lambda: nn.Sequential(nn.Linear(5, 8), nn.AlphaDropout(0.3), nn.Linear(8, 3)),
    "examples skip a block": lambda: nn.Sequential(nn.Linear(5, 8), SkipsExamples(), nn.Linear(8, 3)),
    "batches skip a block": lambda: nn.Sequential(nn.Linear(5, 8), SkipsBatches(), nn.Linear(8, 3)),
    "constant buffers": ConstantBuffer,
    "fixed statistics": lambda: nn.Sequential(nn.BatchNorm1d(5, affine=False).eval(), nn.Linear(5, 3)),
    "layer norm": lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)),
    "group norm": lambda: nn.Sequential(nn.Linear(5, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 3)),
    "saturated": lambda: nn.Sequential(nn.Linear(5, 8), nn.Sigmoid(), nn.Linear(8, 3)),
    "float32 inside": lambda: nn.Sequential(nn.Linear(5, 8), Float32Inside(), nn.Linear(8, 3)),
}


@pytest.mark.parametrize("kind", ACCEPTED)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_models_in_which_examples_do_not_meet_are_accepted(kind, seed):
    torch.manual_seed(seed)
    engine = ClippedGradients(ACCEPTED[kind](), cross_entropy, max_grad_norm=1.0)
    for count in (1, 9, 17):
        assert engine.accumulate(batch_of(count)).shape == (count,)


def weighted(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([1.0, 2.0, 3.0]), reduction="none")


def weighted_by_index(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model, batch) * torch.tensor([1.0, 2.0, 3.0])[batch[1]]


@pytest.mark.parametrize("loss", [weighted, weighted_by_index])
def test_weights_by_label_are_accepted(loss):
    ClippedGradients(nn.Linear(5, 3), loss, max_grad_norm=1.0).accumulate(batch_of(9))


def test_a_transformer_with_dropout_on_tokens_is_accepted():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).chunk(3, -1)
            return x + F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(7, 8)
            self.block = nn.Sequential(nn.LayerNorm(8), Attention(), nn.Dropout(0.1))
            self.head = nn.Linear(8, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.block(self.embedding(ids)).mean(1))

    engine = ClippedGradients(Tokens(), cross_entropy, max_grad_norm=1.0)
    engine.accumulate((torch.randint(7, (6, 4)), torch.randint(3, (6,))))


def test_the_wide_resnet_with_weight_standardization_is_accepted():
    torch.manual_seed(0)
    engine = ClippedGradients(models.wide_resnet(10, 1), cross_entropy, max_grad_norm=1.0)
    engine.check_independence((torch.randn(5, 3, 16, 16), torch.randint(10, (5,))))


def test_a_model_can_be_checked_before_the_first_step_and_nothing_is_checked_twice():
    passes = 0

    def counted(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal passes
        passes += 1
        return cross_entropy(model, batch)

    engine = ClippedGradients(nn.Linear(5, 3), counted, max_grad_norm=1.0)
    engine.check_independence(batch_of(8))
    assert passes == 46 + 5 + 3  # the independence check, the check of the clip, the check at this size
    assert all(not total.any() for total in engine.sums.values())
    engine.check_independence(batch_of(8))
    assert passes == 54
    for count in (8, 3, 1, 5):
        engine.accumulate(batch_of(count))
    assert passes == 54 + 4
    engine.accumulate(batch_of(9))
    assert passes == 58 + 3 + 1
    with pytest.raises(InputError, match="mixes examples"):
        ClippedGradients(nn.Linear(5, 3), MIXING["minus the last"], max_grad_norm=1.0).check_independence(batch_of(8))


def test_a_model_with_dropout_is_checked_with_the_stated_number_of_passes():
    passes = 0

    def counted(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal passes
        passes += 1
        return cross_entropy(model, batch)

    ClippedGradients(ACCEPTED["dropout"](), counted, max_grad_norm=1.0).check_independence(batch_of(8))
    assert passes == 51 + 32 + 4 + 4  # the independence check, the check of the clip, the check at this size


def test_the_check_leaves_the_model_and_all_random_streams_as_they_were():
    model = nn.Sequential(nn.Linear(5, 8), SkipsBatches(), nn.Dropout(0.5).eval(), nn.Linear(8, 3))
    model[3].bias.requires_grad_(False)
    model[0].weight.grad = torch.ones(8, 5)
    gradient = model[0].weight.grad
    values = {name: value.clone() for name, value in model.state_dict().items()}
    versions = {name: p._version for name, p in model.named_parameters()}
    batch = batch_of(8)
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
    "rand": lambda n: torch.rand(n, 3),
    "randn": lambda n: torch.randn((n, 20)),
    "randint": lambda n: torch.randint(5, (n, 30)),
    "rand_like": lambda n: torch.rand_like(torch.ones(n, 3)),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, 30), 0.5)),
    "normal_": lambda n: torch.empty(n, 20).normal_(),
    "exponential_": lambda n: torch.empty(n).exponential_(),
    "dropout": lambda n: F.dropout(torch.ones(n, 30), 0.5),
    "dropout2d": lambda n: F.dropout2d(torch.ones(n, 30, 2, 2), 0.5),
    "fused dropout": lambda n: torch.native_dropout(torch.ones(n, 30), 0.5, True)[0],
}


@pytest.mark.parametrize("kind", DRAWS)
def test_all_rows_have_the_same_random_numbers_whatever_their_number(kind):
    results = []
    for count in (1, 2, 5):
        torch.manual_seed(3)
        with identical_random_rows():
            rows = DRAWS[kind](count)
        assert len(rows) == count
        assert all(torch.equal(row, rows[0]) for row in rows)
        results.append((rows[0], torch.get_rng_state()))
    assert all(torch.equal(row, results[0][0]) and torch.equal(state, results[0][1]) for row, state in results)
    assert len(results[0][0].unique()) > 1 or kind == "exponential_"


def test_dropout_on_tensors_that_hold_examples_in_another_dimension_is_refused_by_name():
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.dropout = nn.MultiheadAttention(4, 2), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(0, 1)
            return self.dropout(self.attention(x, x, x)[0]).transpose(0, 1)

    engine = ClippedGradients(TimeFirst(), lambda model, x: model(x).square().sum((1, 2)), max_grad_norm=1.0)
    with pytest.raises(InputError, match="drop out only tensors whose first dimension is the batch"):
        engine.accumulate(torch.randn(5, 3, 4))


def test_a_branch_that_mixes_is_refused_even_behind_a_gain_and_a_head_of_zeros():
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gain, self.head = nn.Linear(4, 4), nn.Parameter(torch.zeros(())), nn.Linear(4, 2)
            nn.init.zeros_(self.head.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.gain * self.layer(x - x.mean(0)))

    engine = ClippedGradients(Branch(), lambda model, x: model(x).square().sum(1), max_grad_norm=1.0)
    with pytest.raises(InputError, match="mixes examples"):
        engine.accumulate(torch.randn(5, 4))
