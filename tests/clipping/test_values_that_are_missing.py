"""Numbers that are NaN, infinite or zero, seeds that code sets, and tensors that a model keeps of the last batch."""

import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from thoroughness import THOROUGH
from torch import Tensor, nn

from dp_microadam import ClippedGradients, InputError
from dp_microadam.clipping.independence import check_independence_at_size
from dp_microadam.clipping.special_values import GuardedPasses, refuse_invalid, rows_needed, special_batches
from dp_microadam.clipping.synthetic_examples import SyntheticExamples
from dp_microadam.clipping.transform_check import check_transform

Batch = tuple[Tensor, Tensor]
Change = Callable[[Tensor], Tensor]


def features(count: int = 8) -> Batch:
    return torch.randn(count, 6), torch.randint(3, (count,))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def check_model(change: Change, batch: Batch | None = None) -> None:
    engine = ClippedGradients(classifier(), lambda m, b: cross_entropy(m, (change(b[0]), b[1])), max_grad_norm=1.0)
    engine.check_independence(features() if batch is None else batch)


def check_change(change: Change) -> None:
    check_transform(lambda b: (change(b[0]), b[1]), features(), nn.Linear(1, 1), what="prepare")


def largest_finite(x: Tensor) -> Tensor:
    return x.masked_fill(x.isinf(), -1e9).amax(0)


def filled_forwards(x: Tensor) -> Tensor:
    rows = list(x)
    for i in range(1, len(rows)):
        rows[i] = torch.where(rows[i].isnan(), rows[i - 1], rows[i])
    return torch.stack(rows)


FROM_THE_BATCH: dict[str, Change] = {
    "NaN by the mean": lambda x: torch.where(x.isnan(), x.nanmean(0).expand_as(x), x),
    "NaN by the median": lambda x: torch.where(x.isnan(), x.nanmedian(0).values.expand_as(x), x),
    "NaN by the mean or 0": lambda x: torch.where(x.isnan(), x.nanmean(0).nan_to_num().expand_as(x), x),
    "NaN by the example before": filled_forwards,
    "all zero if one is NaN": lambda x: x * 0 if x.isnan().any() else x,
    "scaled by the number of NaN": lambda x: x.nan_to_num() * (1 + x.isnan().sum()),
    "infinity by the largest": lambda x: torch.where(x.isinf(), largest_finite(x).expand_as(x), x),
    "minus infinity by the smallest": lambda x: torch.where(x == -torch.inf, x.nan_to_num(neginf=9).amin(0).expand_as(x), x),
    "clamped if one is infinite": lambda x: x.nan_to_num(0, 0, 0).clamp(max=0.1) if x.isinf().any() else x,
    "columns that are not all zero": lambda x: x + 10 * (x != 0).any(0),
    "columns without a zero": lambda x: x * (x != 0).all(0),
    "by the number of examples that are not zero": lambda x: x / x.any(1).sum().clamp(min=1),
}

APART: dict[str, Change] = {
    "as they are": lambda x: x,
    "filled with the example's mean": lambda x: torch.where(x.isnan(), x.nanmean(1, keepdim=True), x),
    "filled with a constant": lambda x: torch.where(x.isfinite(), x, torch.tensor(0.5)),
    "nan_to_num": torch.nan_to_num,
    "bounded": lambda x: x.nan_to_num().clamp(-3, 3),
    "with a flag": lambda x: torch.where(x.isnan().any(1, keepdim=True), -x.nan_to_num(), x),
    "by the largest of each": lambda x: x / x.abs().amax(1, keepdim=True),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout after filling": lambda x: F.dropout(x.nan_to_num(0, 1, -1), 0.3),
}


@pytest.mark.parametrize("kind", FROM_THE_BATCH)
@pytest.mark.parametrize("check", [check_model, check_change])
def test_missing_values_filled_in_from_the_batch_are_refused(check, kind):
    for _ in range(3):
        with pytest.raises(InputError, match="mixes examples") as refusal:
            check(FROM_THE_BATCH[kind])
        assert type(refusal.value) is InputError


@pytest.mark.parametrize("kind", APART)
@pytest.mark.parametrize("check", [check_model, check_change])
def test_missing_values_filled_in_from_the_example_itself_are_accepted(check, kind):
    for _ in range(3 if THOROUGH else 1):
        check(APART[kind])


def test_columns_of_booleans_and_complex_numbers_can_be_checked():
    batch = torch.rand(5, 4), torch.rand(5, 4) > 0.5, torch.rand(5, 2, dtype=torch.complex64)
    check_transform(lambda b: (b[0] * b[1], b[1], b[2].abs()), batch, nn.Linear(1, 1), what="prepare")
    with pytest.raises(InputError, match="prepare mixes examples"):
        check_transform(lambda b: (b[0] * b[1].any(0), b[1]), batch, nn.Linear(1, 1), what="prepare")


def finite(x: Tensor) -> Tensor:
    if not x.isfinite().all():
        raise ValueError("not finite")
    return x


@pytest.mark.parametrize("check", [check_model, check_change])
def test_code_that_raises_on_missing_values_is_accepted_but_not_if_zeros_mix(check):
    check(finite)
    with pytest.raises(InputError, match="numbers are exactly 0"):
        check(lambda x: finite(x) + 10 * (x != 0).any(0))


@pytest.mark.parametrize("check", [check_model, check_change])
def test_code_that_tries_until_a_value_is_there_does_not_stop_the_check(check):
    def until_not_empty(row: Tensor) -> Tensor:
        while not (row * torch.rand(row.shape)).abs().sum() > 0:
            pass
        return row

    check(lambda x: torch.stack([until_not_empty(row) for row in x]))


def test_a_target_that_is_missing_does_not_hide_an_input_that_is_filled_in():
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor], change: Change) -> Tensor:
        return (model(change(batch[0])) - batch[1]).square().mean(1)

    batch = torch.randn(5, 6), torch.randn(5, 3)
    for kind in ("NaN by the mean", "infinity by the largest", "columns that are not all zero"):
        engine = ClippedGradients(classifier(), lambda m, b, k=kind: loss(m, b, FROM_THE_BATCH[k]), max_grad_norm=1.0)
        with pytest.raises(InputError, match="mixes examples"):
            engine.check_independence(batch)
    ClippedGradients(classifier(), lambda m, b: loss(m, b, torch.nan_to_num), max_grad_norm=1.0).check_independence(batch)


def test_targets_that_are_missing_and_left_out_by_their_number_in_the_batch_are_refused():
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor], dimension: int | None) -> Tensor:
        known = ~batch[1].isnan()
        squares = torch.where(known, model(batch[0]) - batch[1], 0).square().sum(1)
        return squares / (known.sum() if dimension is None else known.sum(dimension)).clamp(min=1)

    batch = torch.randn(5, 6), torch.randn(5, 3)
    ClippedGradients(classifier(), lambda m, b: loss(m, b, 1), max_grad_norm=1.0).check_independence(batch)
    with pytest.raises(InputError, match="mixes examples"):
        ClippedGradients(classifier(), lambda m, b: loss(m, b, None), max_grad_norm=1.0).check_independence(batch)


def test_special_values_leave_integers_alone_and_ordinary_examples_ordinary():
    batch = {"ids": torch.ones(4, 5, dtype=torch.long), "pixels": torch.rand(4, 2, 3), "target": torch.rand(4)}
    assert rows_needed(batch) == 4
    assert rows_needed({"ids": batch["ids"]}) == 0
    ordinary = {key: value + 1 for key, value in batch.items()}
    kinds = set()
    for special in special_batches(batch, ordinary, seed=3):
        kinds.add(special.kind)
        assert torch.equal(special.several["ids"], batch["ids"])
        for key in ("pixels", "target"):
            assert torch.equal(special.one[key][[0, 3]], ordinary[key][[0, 3]])
            assert torch.equal(special.one[key][1:3].nan_to_num(), special.several[key][1:3].nan_to_num())
        touched = special.several["pixels"] != batch["pixels"]
        assert touched.flatten(1).any(1).tolist() == [True, True, special.kind == "exactly 0", True]
        assert not touched[1].all()
    assert kinds == {"NaN", "infinite", "minus infinity", "exactly 0"}


def test_indices_and_probabilities_that_would_end_a_gpu_process_are_refused_first():
    table, rows = torch.rand(5, 2), torch.tensor([0, 4])
    aten = torch.ops.aten
    refuse_invalid(aten.embedding, (table, rows))
    refuse_invalid(aten.binary_cross_entropy, (torch.rand(3), torch.rand(3)))
    with pytest.raises(IndexError):
        refuse_invalid(aten.embedding, (table, torch.tensor([5])))
    with pytest.raises(IndexError):
        refuse_invalid(aten.index, (table, [torch.tensor([torch.nan]).long()]))
    with pytest.raises(ValueError, match="probability"):
        refuse_invalid(aten.binary_cross_entropy, (torch.tensor([torch.nan]), torch.rand(1)))


def test_a_pass_is_given_up_after_many_times_the_operations_of_the_first():
    passes = GuardedPasses()
    assert passes.try_pass(lambda: torch.ones(2).sum()) == 2

    def forever() -> None:
        while True:
            torch.ones(2).sum()

    assert passes.try_pass(forever) is None


SEEDERS = {
    "torch.manual_seed": lambda: torch.manual_seed(0),
    "torch.random.manual_seed": lambda: torch.random.manual_seed(7),
    "random.seed": lambda: random.seed(0),
    "numpy.random.seed": lambda: np.random.seed(0),  # noqa: NPY002
}


@pytest.mark.parametrize("kind", SEEDERS)
@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("check", [check_model, check_change])
def test_code_that_sets_a_random_seed_is_refused(check, draws, kind):
    def seeding(x: Tensor) -> Tensor:
        SEEDERS[kind]()
        return F.dropout(x, 0.5) * (1 + random.random()) if draws else x  # a factor for the whole batch

    with pytest.raises(InputError, match=rf"sets .*\({kind.replace('random.manual', 'manual')}\).*remove it"):
        check(seeding)


@pytest.mark.parametrize("check", [check_model, check_change])
def test_code_that_draws_from_every_global_stream_is_accepted(check):
    check(lambda x: F.dropout(x, 0.5) * (1 + random.random()) * (1 + np.random.rand()))  # noqa: NPY002


class Keeps(nn.Module):
    """Keeps the last batch in one of several ways."""

    def __init__(self, how: str, fails: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.how = how
        self.fails = fails
        self.calls = 0
        self.last: object = None
        self.table: dict[str, object] = {"public": torch.ones(2), "calls": 0}
        self.features: list[Tensor] = []
        self.queue: deque[Tensor] = deque(maxlen=1)
        self.memory = torch.zeros(64, 6)

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach()
        self.calls += 1
        match self.how:
            case "tensor":
                self.last = seen
            case "new attribute":
                self.fresh = seen
            case "output":
                self.last = self.layer(x)
            case "list":
                self.last = [seen]
            case "tuple":
                self.last = (self.calls, seen)
            case "dict":
                self.last = {"seen": seen}
            case "array":
                self.last = seen.numpy()
            case "entry of a dict":
                self.table["last"] = seen
                self.table["calls"] = self.calls
            case "list cleared and filled":
                self.features.clear()
                self.features.append(seen)
            case "queue of one":
                self.queue.append(seen)
            case "written in place":
                self.memory.zero_()
                self.memory[: len(x)] = seen.to(self.memory.dtype)
        if self.fails and bool((x == 7).any()):
            raise ValueError("in the middle of a step")
        return self.layer(x)


WAYS = (
    "tensor",
    "new attribute",
    "output",
    "list",
    "tuple",
    "dict",
    "array",
    "entry of a dict",
    "list cleared and filled",
    "queue of one",
    "written in place",
)


def numbers_in(value: object) -> list[float]:
    if isinstance(value, Tensor | np.ndarray):
        return torch.as_tensor(value).detach().flatten().tolist()
    if isinstance(value, dict):
        value = list(value.values())
    return [number for item in value for number in numbers_in(item)] if isinstance(value, list | tuple | deque) else []


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_a_model_keeps_no_tensor_of_real_examples_after_a_pass(how, fails):
    inner = Keeps(how, fails)
    model = nn.Sequential(nn.Identity(), inner)
    engine = ClippedGradients(model, cross_entropy, max_grad_norm=1.0)
    batch = torch.full((5, 6), 7.0), torch.randint(3, (5,))
    engine.check_independence(batch)
    marker = 7.0 if how != "output" else float(inner.layer(batch[0])[0, 0].detach())
    calls = inner.calls
    for _ in range(2):
        if fails:
            with pytest.raises(ValueError, match="in the middle"):
                engine.accumulate(batch)
        else:
            engine.accumulate(batch)
    kept = [number for key, value in vars(inner).items() if not key.startswith("_") for number in numbers_in(value)]
    assert marker not in kept
    assert not any(len(t) == 5 for t in vars(inner).values() if isinstance(t, Tensor))
    assert inner.calls == calls + 2  # counters go on
    assert "public" in inner.table
    if how == "entry of a dict":
        assert inner.table["calls"] == inner.calls


@pytest.mark.parametrize("how", WAYS)
def test_the_size_of_a_batch_leaves_no_trace_in_the_model(how):
    def shapes(counts: tuple[int, ...]) -> list[object]:
        torch.manual_seed(0)
        model = Keeps(how)
        engine = ClippedGradients(model, cross_entropy, max_grad_norm=1.0)
        for count in counts:  # each is larger than those before, so that the check at this size is made too
            engine.accumulate(features(count))
        return [(key, len(numbers_in(value))) for key, value in vars(model).items() if not key.startswith("_")]

    assert shapes((6, 9)) == shapes((7, 8))


def test_a_cache_of_positions_stays():
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.longest = 0
            self.built = 0

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > self.longest:
                self.longest, self.built = x.shape[1], self.built + 1
                self.table = torch.arange(x.shape[1]) / 10
            return self.layer(x + self.table[: x.shape[1]])

    model = Positions()
    engine = ClippedGradients(model, cross_entropy, max_grad_norm=1.0)
    for count in (4, 9):
        engine.accumulate(features(count))
    assert model.built == 1
    model.longest = 0  # built again in a pass over real examples
    engine.accumulate(features(4))
    assert (model.built, len(model.table)) == (2, 6)
    engine.accumulate(features(4))


def test_a_list_that_grows_by_examples_is_refused():
    class Appends(nn.Linear):
        seen: list[Tensor]

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(x.detach())
            return super().forward(x)

    model = Appends(6, 3)
    model.seen = []
    with pytest.raises(InputError, match="attribute 'seen' of the model depends on examples of an earlier batch"):
        ClippedGradients(model, cross_entropy, max_grad_norm=1.0).accumulate(features())


class Experts(nn.Module):
    """Each example goes to one of eight experts, which take 1.25 times their even share of the batch and at least eight."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 8).requires_grad_(False)
        self.experts = nn.Linear(6, 8 * 3)

    def forward(self, x: Tensor) -> Tensor:
        share = F.one_hot(self.router(20 * (x - 0.5)).argmax(1), 8).to(x.dtype)
        share = share * (share.cumsum(0) <= max(8, int(1.25 * len(x) / 8)))
        return (share.unsqueeze(2) * self.experts(x).unflatten(1, (8, 3))).sum(1)


@pytest.mark.parametrize("count", [20, 64])
def test_a_capacity_is_found_in_large_batches_whatever_the_seed(count):
    model = Experts()
    engine = ClippedGradients(model, cross_entropy, max_grad_norm=1.0)
    observed = engine._checked_model(features(3), 3)  # no expert has more than it can take
    for seed in range(100):
        torch.manual_seed(seed)
        model.router.reset_parameters()
        with pytest.raises(InputError, match="mixes examples"):
            check_independence_at_size(model, cross_entropy, observed, features(count), source=SyntheticExamples(seed + 1))
