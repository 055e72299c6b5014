"""A model that remembers examples, in its state, in plain attributes or by seeds, is refused or put back."""

import copy
import itertools
import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam import ClippedGradients, InputError
from dp_microadam.clipping.checks.state import StateSnapshot
from dp_microadam.clipping.checks.transform import check_transform

from .conftest import cross_entropy

Batch = tuple[Tensor, Tensor]


def features(count: int = 5) -> Batch:
    return torch.randn(count, 6), torch.randint(3, (count,))


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("missing", torch.tensor([float("nan"), -0.0, 1.0]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("bf16", torch.ones(5, dtype=torch.bfloat16))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("wave", torch.ones(2, dtype=torch.complex128))
        self.register_buffer("large", torch.zeros(300, 300))
        self.register_buffer("absent", None)


CHANGES: dict[str, Callable[[Keeper], object]] = {
    "missing": lambda keeper: keeper.missing.nan_to_num_(),
    "count": lambda keeper: keeper.count.add_(1),
    "mask": lambda keeper: keeper.mask.logical_not_(),
    "bf16": lambda keeper: keeper.bf16.mul_(2),
    "sparse": lambda keeper: setattr(keeper, "sparse", (torch.eye(3) * 2).to_sparse()),
    "wave": lambda keeper: keeper.wave.mul_(1j),
    "large": lambda keeper: keeper.large[299].neg_(),  # to -0, which only bits tell
    "absent": lambda keeper: setattr(keeper, "absent", torch.zeros(1)),
    "weight, exchanged for another": lambda keeper: setattr(keeper, "weight", nn.Parameter(torch.zeros(3, 2))),
    "count, exchanged for another type": lambda keeper: setattr(keeper, "count", torch.tensor(3.0)),
    "bf16, deleted": lambda keeper: delattr(keeper, "bf16"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_change_of_state_is_refused_by_name_and_undone(what):
    keeper = Keeper()
    snapshot = StateSnapshot(keeper)
    assert not snapshot.altered()
    with pytest.raises(InputError, match=repr(what.partition(",")[0])), snapshot.unchanged():
        CHANGES[what](keeper)
    assert not StateSnapshot(keeper).altered()
    for (name, found), (_, wanted) in zip(keeper.state_dict().items(), Keeper().state_dict().items(), strict=True):
        assert found.dtype == wanted.dtype, name
        assert torch.equal(found.to_dense().nan_to_num(), wanted.to_dense().nan_to_num()), name


def test_equal_values_in_another_buffer_are_no_change_and_a_parameter_that_is_written_is():
    keeper = Keeper()
    with StateSnapshot(keeper).unchanged():
        keeper.bf16 = keeper.bf16.clone()
    with pytest.raises(InputError, match="parameter 'weight' changes"), StateSnapshot(keeper).unchanged(), torch.no_grad():
        keeper.weight.add_(1)


class Remembers(nn.Module):
    """Writes into its state at every call, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("kept", torch.ones(()))
        self.frozen = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.extra = 0

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach()
        real = bool((seen == 7.25).any())
        match self.how:
            case "number of examples":
                self.kept += len(seen)
            case "only with gradients" if torch.is_grad_enabled():
                self.kept = 0.9 * self.kept + 0.1 * seen.mean()
            case "in the backward pass" if x.requires_grad:
                x.register_hook(lambda gradient: self.kept.add_(gradient.abs().sum()) and None)
            case "on real examples only" if real:
                self.kept.fill_(7.25)
            case "frozen parameter":
                self.frozen.data.lerp_(seen.mean(0).to(self.frozen.dtype), 0.1)
            case "parameter, on real examples only" if real:
                with torch.no_grad():
                    self.frozen.fill_(7.25)
            case "extra state":
                self.extra += 1
        return x


HOW = {
    "number of examples": "buffer '1.kept'",
    "only with gradients": "buffer '1.kept'",
    "in the backward pass": "buffer '1.kept'",
    "on real examples only": "buffer '1.kept'",
    "frozen parameter": "parameter '1.frozen'",
    "parameter, on real examples only": "parameter '1.frozen'",
    "extra state": "extra state of module '1'",
}


@pytest.mark.parametrize("how", HOW)
def test_a_model_that_remembers_examples_is_refused_by_name_and_left_as_it_was(how):
    model = nn.Sequential(nn.Linear(6, 6), Remembers(how), nn.Linear(6, 3))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(6))
        model[0].bias.zero_()
    engine = ClippedGradients(model, cross_entropy, max_grad_norm=1.0)
    before = copy.deepcopy(model.state_dict())
    buffer = model[1].kept
    inputs, labels = features(6)
    inputs[2] = 7.25
    with pytest.raises(InputError, match=HOW[how]):
        engine.accumulate((inputs, labels))
    for name, value in model.state_dict().items():
        same = torch.equal(value, before[name]) if isinstance(value, Tensor) else value == before[name]
        assert same or how == "parameter, on real examples only", name
    assert model[1].kept is buffer
    assert all(not total.any() for total in engine.sums.values())


class Keeps(nn.Module):
    """Keeps features of examples in one of several ways, and may use them in later batches."""

    def __init__(self, how: str, fails: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.how, self.fails = how, fails
        self.calls = 0
        self.total = 0.0
        self.last: object = None
        self.mean: Tensor | None = None
        self.table: dict[object, object] = {"public": torch.ones(2), "calls": 0}
        self.list: list[Tensor] = []
        self.queue: deque[Tensor] = deque(maxlen=1)
        self.long_queue: deque[Tensor] = deque(maxlen=64)
        self.memory = torch.zeros(64, 6)

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach()
        self.calls += 1
        output = self.layer(x)
        match self.how:
            case "tensor":
                self.last = seen
            case "new attribute":
                self.fresh = seen
            case "output":
                self.last = output
            case "dict":
                self.last = {"seen": seen}
            case "entry of a dict":
                self.table["last"] = seen
                self.table["calls"] = self.calls
            case "list cleared and filled":
                self.list.clear()
                self.list.append(seen)
            case "queue of one":
                self.queue.append(seen)
            case "written in place":
                self.memory.zero_()
                self.memory[: len(x)] = seen.to(self.memory.dtype)
            case "cache by size":
                self.table.setdefault(len(x), torch.arange(len(x)))
            case "growing list":
                self.list.append(seen)
            case "queue, used when full":
                self.long_queue.extend(seen)
                if len(self.long_queue) == 64:
                    output = output * torch.stack(list(self.long_queue)).mean()
            case "mean of earlier examples":
                self.mean = seen.mean() if self.mean is None else 0.9 * self.mean + 0.1 * seen.mean()
            case "running total":
                self.total += float(seen.sum())
            case "last batch, used in the next":
                output = output if self.last is None else output * (1 + self.last.mean())
                self.last = seen
        if self.fails and bool((x == 7).any()):
            raise ValueError("in the middle of a step")
        return output


PUT_BACK = (
    "tensor",
    "new attribute",
    "output",
    "dict",
    "entry of a dict",
    "list cleared and filled",
    "queue of one",
    "written in place",
)
REFUSED = {
    "growing list": "attribute '1.list'",
    "queue, used when full": "attribute '1.long_queue'",
    "mean of earlier examples": "attribute '1.mean'",
    "running total": "attribute '1.total'",
    "last batch, used in the next": "a loss",
}


@pytest.mark.parametrize("how", REFUSED)
def test_examples_kept_in_plain_attributes_are_refused_by_name(how):
    model = nn.Sequential(nn.Identity(), Keeps(how))
    with pytest.raises(InputError, match=f"{REFUSED[how]}.*depends on examples of an earlier batch"):
        ClippedGradients(model, cross_entropy, max_grad_norm=1.0).accumulate(features())


class Positions(nn.Module):
    """A cache of positions, and a number from outside of the model."""

    numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.longest = nn.Linear(6, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.stamp = next(Positions.numbers)
        if x.shape[1] > self.longest:
            self.longest, self.table = x.shape[1], torch.arange(x.shape[1]) / 10
        return self.layer(x + self.table[: x.shape[1]])


@pytest.mark.parametrize("build", [Positions, lambda: Keeps("counter"), lambda: Keeps("cache by size")])
def test_attributes_that_keep_nothing_of_earlier_examples_are_accepted(build):
    engine = ClippedGradients(build(), cross_entropy, max_grad_norm=1.0)
    for count in (5, 9, 5):
        engine.accumulate(features(count))


def numbers_in(value: object) -> list[float]:
    if isinstance(value, Tensor | np.ndarray):
        return torch.as_tensor(value).detach().flatten().tolist()
    if isinstance(value, dict):
        value = list(value.values())
    return [number for item in value for number in numbers_in(item)] if isinstance(value, list | tuple | deque) else []


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("how", PUT_BACK)
def test_a_model_keeps_no_tensor_of_real_examples_after_a_pass(how, fails):
    inner = Keeps(how, fails)
    engine = ClippedGradients(nn.Sequential(nn.Identity(), inner), cross_entropy, max_grad_norm=1.0)
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
    assert inner.calls == calls
    assert list(inner.table) == ["public", "calls"]


@pytest.mark.parametrize("how", PUT_BACK)
def test_the_size_of_a_batch_leaves_no_trace_in_the_model(how):
    def shapes(counts: tuple[int, ...]) -> list[object]:
        torch.manual_seed(0)
        model = Keeps(how)
        engine = ClippedGradients(model, cross_entropy, max_grad_norm=1.0)
        for count in counts:  # each is larger than those before, so that the check at this size is made too
            engine.accumulate(features(count))
        return [(key, len(numbers_in(value))) for key, value in vars(model).items() if not key.startswith("_")]

    assert shapes((6, 9)) == shapes((7, 8))


SEEDERS = {
    "torch.manual_seed": lambda: torch.manual_seed(0),
    "torch.random.manual_seed": lambda: torch.random.manual_seed(7),
    "random.seed": lambda: random.seed(0),
    "numpy.random.seed": lambda: np.random.seed(0),  # noqa: NPY002
}


def check_model(change: Callable[[Tensor], Tensor]) -> None:
    engine = ClippedGradients(nn.Linear(6, 3), lambda m, b: cross_entropy(m, (change(b[0]), b[1])), max_grad_norm=1.0)
    engine.check_independence(features())


def check_change(change: Callable[[Tensor], Tensor]) -> None:
    check_transform(lambda b: (change(b[0]), b[1]), features(), nn.Linear(1, 1), what="prepare")


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
