"""The model is left as it was found, and behaves in between as if there were no engine."""

import copy
import gc
import io
import pickle
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import handle_torch_function, has_torch_function

from dp_microadam import ClippedGradients, InputError
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d

from .conftest import square_loss as loss


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        WeightStandardizedConv2d(2, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 4, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


def state(model: nn.Module) -> list[object]:
    """What a step must leave as it was: hooks, flags, gradients and values."""
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), "forward" in vars(m))
        for m in model.modules()
    ]
    parameters = [(name, p.requires_grad, None if p.grad is None else p.grad.tolist()) for name, p in model.named_parameters()]
    return [*hooks, *parameters, *(p.tolist() for p in model.parameters())]


def test_a_step_leaves_flags_gradients_values_and_hooks_as_they_were():
    model = network()
    model[3].bias.requires_grad_(False)
    model[6].weight.grad = torch.ones_like(model[6].weight)
    before = state(model)
    engine = ClippedGradients(model, loss, max_grad_norm=1.0)
    engine.accumulate(torch.randn(3, 2, 6, 6))
    assert state(model) == before
    handed_out = {name: part.clone() for name, part in engine.sums.items()}
    sums = engine.sums
    engine.reset()
    assert all(torch.equal(part, handed_out[name]) for name, part in sums.items())
    engine.close()
    assert state(model) == before
    with pytest.raises(InputError, match="closed"):
        engine.accumulate(torch.randn(3, 2, 6, 6))


@pytest.mark.parametrize("where", ["forward", "loss", "backward", "rule"])
def test_hooks_are_removed_and_flags_restored_when_something_fails(where):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("on purpose")

    armed = False

    def failing(model: nn.Module, batch: Tensor) -> Tensor:
        output = model(batch if not (armed and where == "forward") else batch[:, :1])
        if armed and where == "loss":
            raise KeyError("on purpose")
        if armed and where == "backward":
            output = Fails.apply(output)
        return output.square().sum(1)

    model = network()
    before = state(model)
    engine = ClippedGradients(model, failing, max_grad_norm=1.0)
    engine.accumulate(torch.randn(3, 2, 6, 6))
    sums = {name: part.clone() for name, part in engine.sums.items()}
    armed = True
    if where == "rule":
        model[6].register_forward_pre_hook(lambda module, args: (args[0].repeat(2, 1),))
    with pytest.raises((KeyError, RuntimeError, InputError)):
        engine.accumulate(torch.randn(3, 2, 6, 6))
    model[6]._forward_pre_hooks.clear()
    assert state(model) == before
    assert all(torch.equal(part, sums[name]) for name, part in engine.sums.items())
    armed = False
    engine.accumulate(torch.randn(3, 2, 6, 6))


def test_the_model_can_be_saved_copied_and_evaluated_in_between():
    model = network()
    x = torch.randn(3, 2, 6, 6)
    expected = model(x)
    engine = ClippedGradients(model, loss, max_grad_norm=1.0)
    engine.accumulate(x)
    assert torch.equal(model(x), expected)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    torch.save(model.state_dict(), io.BytesIO())
    first = {name: part.clone() for name, part in engine.sums.items()}
    engine.reset()
    engine.accumulate(x)
    assert all(torch.equal(part, first[name]) for name, part in engine.sums.items())
    model(x).sum().backward()  # ordinary training still works
    assert all(p.grad is not None for p in model.parameters())


class Draws(nn.Module):
    """Draws from every global stream, and skips a block for the whole batch or for single examples."""

    def __init__(self, per_example: bool) -> None:
        super().__init__()
        self.block, self.per_example = nn.Linear(4, 4), per_example

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1 + random.random()) * (1 + np.random.random())  # noqa: NPY002
        if self.per_example:
            return x + self.block(x) * (torch.rand(len(x), 1) < 0.5)
        return x + self.block(x) if torch.rand(()) < 0.5 else x


@pytest.mark.parametrize("per_example", [True, False])
def test_random_numbers_are_those_of_ordinary_training_and_the_check_draws_none(per_example):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Draws(per_example), nn.Dropout(0.5), nn.Linear(4, 2)), torch.randn(6, 4)

    def seed(number: int) -> None:
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002

    def draw() -> list[float]:
        return [*torch.rand(3).tolist(), random.random(), np.random.random()]  # noqa: NPY002

    engine = ClippedGradients(model, loss, max_grad_norm=1e6)  # nothing is clipped: the sum is the ordinary gradient
    for number in range(6):
        seed(number)
        engine.reset()
        engine.accumulate(x)  # the first checks independence
        after = draw()
        seed(number)
        model.zero_grad()
        loss(model, x).sum().backward()
        assert draw() == after
        for name, p in model.named_parameters():
            torch.testing.assert_close(engine.sums[name], torch.zeros_like(p) if p.grad is None else p.grad)


def bytes_of_live_tensors() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch keeps deprecated names among its objects
        # Traced programs of other tests hold tensors without memory.
        real = [tensor for tensor in gc.get_objects() if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor)]
        storages = [tensor.untyped_storage() for tensor in real]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_nothing_of_a_check_or_a_step_waits_for_the_collection_of_cycles():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(72, 30)

        def forward(self, images: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.encode(images.flatten(1))), self.encode.weight.t())

    model, examples = Tied(), torch.randn(5, 2, 6, 6)
    engine = ClippedGradients(model, loss, max_grad_norm=1.0)
    gc.collect()
    gc.disable()
    try:
        before = bytes_of_live_tensors()
        for _ in range(2):  # the first checks independence
            engine.accumulate(examples)
            assert bytes_of_live_tensors() - before <= 64  # the anchors of recordings, four bytes each
    finally:
        gc.enable()


def test_a_layer_whose_weight_is_frozen_keeps_no_activation():
    alive = {}

    class Watch(nn.Module):
        """Remembers, weakly, the tensor that the next layer takes as its input."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            y = x * 1.0
            alive[self.name] = StorageWeakRef(y.untyped_storage())
            return y

    def survivors(trainable: set[str]) -> set[str]:
        torch.manual_seed(0)
        # The loss multiplies the output by a constant: nothing but the engine needs the activations later.
        model = nn.Sequential(Watch("first"), nn.Linear(4, 4), Watch("second"), nn.Linear(4, 2))
        for name, p in model.named_parameters():
            p.requires_grad_(name in trainable)
        found: set[str] = set()

        def watching(model: nn.Module, batch: Tensor) -> Tensor:
            output = model(batch)
            found.clear()
            found.update(name for name, reference in alive.items() if not reference.expired())
            return output.sum(1)

        ClippedGradients(model, watching, max_grad_norm=1.0).accumulate(torch.randn(3, 4))
        return found

    assert survivors({"1.weight", "3.weight"}) == {"first", "second"}
    assert survivors({"3.weight"}) == {"second"}
    assert survivors({"1.bias", "3.bias"}) == set()


def test_frozen_layers_before_the_first_trainable_one_are_not_backpropagated():
    class Reports(torch.autograd.Function):
        reached = False

        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            Reports.reached = True
            return gradient

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Reports.apply(x)

    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), Watched(), nn.Linear(4, 2))
    ClippedGradients(model, loss, max_grad_norm=1.0).accumulate(torch.randn(3, 4))
    assert not Reports.reached


def test_works_inside_no_grad_and_with_inputs_that_require_gradients():
    model = network()
    x = torch.randn(3, 2, 6, 6, requires_grad=True)
    engine = ClippedGradients(model, loss, max_grad_norm=1.0)
    with torch.no_grad():
        inside = engine.accumulate(x)
    assert torch.equal(inside, engine.accumulate(x))
    assert x.grad is None
    assert not any(part.requires_grad for part in engine.sums.values())


def test_norms_are_taken_in_full_precision_and_the_settings_come_back():
    seen = []

    def spied(x: Tensor, weight: Tensor) -> Tensor:
        """An operation nothing is known about: it is repeated where norms are taken."""
        if has_torch_function((x, weight)):
            return handle_torch_function(spied, (x, weight), x, weight)
        seen.append((torch.backends.mkldnn.matmul.fp32_precision, torch.is_autocast_enabled("cpu")))
        return x * weight

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return spied(x, self.weight)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        engine = ClippedGradients(Spy(), loss, max_grad_norm=1.0)
        with torch.autocast("cpu", dtype=torch.float16):  # no products in this model
            engine.accumulate(torch.randn(3, 4))
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert ("tf32", True) in seen  # the user's own forward
    assert seen[-1] == ("ieee", False)  # the repetition for norms


def test_a_tensor_of_the_model_that_requires_gradients_keeps_none():
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.prompt = nn.Linear(3, 2), torch.ones(3, requires_grad=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * self.prompt)

    model = Prompted()
    engine = ClippedGradients(model, lambda model, x: model(x).square().sum(1), max_grad_norm=1.0)
    engine.accumulate(torch.randn(4, 3))
    assert model.prompt.grad is None
    model.prompt.grad = torch.ones(3)
    engine.accumulate(torch.randn(4, 3))
    assert model.prompt.grad.tolist() == [1.0, 1.0, 1.0]


def test_explain_lists_every_layer_with_its_strategy(capsys):
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.AvgPool2d(10), nn.Conv2d(16, 64, 1), nn.Flatten())
    engine = ClippedGradients(model, loss, max_grad_norm=1.0)
    engine.accumulate(torch.randn(2, 3, 20, 20))
    table = engine.explain()
    assert capsys.readouterr().out.strip() == table.strip()
    strategies = {line.split()[0]: line.split()[2] for line in table.splitlines()[1:]}
    assert strategies == {"0": "keep", "3": "ghost"}  # few weights and many positions, many weights and few
    for strategy in ("ghost", "keep", "drop"):
        engine = ClippedGradients(nn.Conv2d(2, 3, 3), loss, max_grad_norm=1.0, strategy=strategy)
        engine.accumulate(torch.randn(2, 2, 5, 5))
        assert strategy in engine.explain().splitlines()[1].split()
    with pytest.raises(InputError, match="'ghost', 'keep', 'drop'"):
        ClippedGradients(nn.Conv2d(2, 3, 3), loss, max_grad_norm=1.0, strategy="forget")
