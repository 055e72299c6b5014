"""Norms that are in doubt are taken again after one look at the device, and nothing else in a chunk waits for it."""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dp_microadam import ClippedGradients
from dp_microadam.clipping import outer_product, passes
from dp_microadam.clipping.outer_product import OuterProductSum
from dp_microadam.clipping.passes import ParameterShare
from dp_microadam.clipping.per_example import clipped_sum
from dp_microadam.clipping.rules.linear import LinearFactors
from dp_microadam.clipping.rules.rule import PartsCall
from dp_microadam.layers.weight_standardization import WeightStandardizedConv2d


def linear_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) * batch[1]).flatten(1).sum(1)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


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
@pytest.mark.parametrize("piece", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_doubtful_norms_of_several_layers_are_those_of_single_examples(monkeypatch, strategy, piece):
    monkeypatch.setattr(outer_product, "piece_length", lambda factors: piece)
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


class Waits(TorchDispatchMode):
    """Counts, by file of the project, the operations for which a GPU has to catch up with the host."""

    _aten = torch.ops.aten
    OPERATIONS = (_aten._local_scalar_dense, _aten.nonzero, _aten._unique2, _aten.equal, _aten.masked_select, _aten.isin)

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        mask = func.overloadpacket in (self._aten.index, self._aten.index_put_, self._aten.index_put) and any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1])
        )
        if mask or func.overloadpacket in self.OPERATIONS:
            frame: Any = sys._getframe(1)
            while frame is not None and "dp_microadam/clipping" not in frame.f_code.co_filename:
                frame = frame.f_back
            where = "the model" if frame is None else f"{frame.f_code.co_filename.split('/')[-1]}:{frame.f_lineno}"
            self.found[f"{func.overloadpacket} in {where}"] += 1
        return func(*args, **(kwargs or {}))


class Everything(nn.Module):
    """A layer of every kind: a shared table, positions, several rows per example, attention, recurrence and images."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(1, 6, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.images = nn.Sequential(WeightStandardizedConv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 8, 3))
        self.head = nn.Linear(8, 11)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.recurrent(self.encoder(self.table(x) + self.positions))[0]
        views = hidden.reshape(len(x) * 2, 1, 3, 8)
        return self.head(hidden[:, -1] + self.images(views).mean((2, 3)).view(len(x), 2, 8).sum(1))


OF_A_CHUNK = [
    (None, "per-layer"),
    ("ghost", "flat"),
    *(pytest.param(one, "flat", marks=pytest.mark.slow) for one in ("keep", "drop")),
]


@pytest.mark.parametrize(("strategy", "clipping"), OF_A_CHUNK)
def test_nothing_in_a_chunk_waits_for_the_device(strategy, clipping):
    torch.manual_seed(0)
    engine = ClippedGradients(Everything(), cross_entropy, max_grad_norm=1.0, strategy=strategy, clipping=clipping)
    batch = torch.randint(1, 11, (5, 6)), torch.randint(11, (5,))
    engine.check_independence(batch)
    with Waits() as waits:
        engine.accumulate(batch)
    assert not waits.found, dict(waits.found)


class _TwoWeights(PartsCall):
    """A call of a layer with two weights, each with a gradient that is a sum of outer products."""

    def __init__(self, factors: Sequence[LinearFactors]) -> None:
        super().__init__()
        self.parts = {str(number): OuterProductSum(one, "ghost") for number, one in enumerate(factors)}

    def squared_norms(self, output_gradient: Tensor) -> Tensor:
        return self.norms_of_parts()

    def per_example(self, output_gradient: Tensor, examples: slice) -> dict[str, Tensor]:
        raise AssertionError("not used here")


@pytest.mark.parametrize("cancelling", [0, 1])
def test_a_doubt_about_any_weight_of_a_layer_is_settled(cancelling):
    """One position takes back what the other adds, up to 1e-4: Gram matrices alone would lose that in rounding."""
    torch.manual_seed(0)
    inputs, deltas = torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 5)
    inputs[cancelling, 3, 1] = inputs[cancelling, 3, 0] * (1 + 1e-4)
    deltas[cancelling, 3, 1] = -deltas[cancelling, 3, 0]
    call = _TwoWeights([LinearFactors(*pair) for pair in zip(inputs, deltas, strict=True)])
    part = ParameterShare(call, {"0": "0", "1": "1"}, call.norms_of_parts())
    settled = passes.recompute_uncertain([part])
    exact = (deltas.double().transpose(2, 3) @ inputs.double()).square().sum((0, 2, 3)).sqrt()
    torch.testing.assert_close(settled.of_examples.double(), exact, rtol=1e-6, atol=0)
    assert [len(weight._exceptions) > 0 for weight in call.parts.values()][cancelling]


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
