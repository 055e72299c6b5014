"""What privacy rests on, for uses of parameters outside the plain layers: no example adds more than the bound."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dp_microadam import ClippedGradients


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
    "tokens": lambda: Tokens(),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "lstm": lambda: Last(nn.LSTM(4, 3, batch_first=True)),
    "gru": lambda: Last(nn.GRU(4, 3, batch_first=True)),
    "transposed": lambda: nn.ConvTranspose1d(5, 3, 2),
}


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0]).flatten(1).sum(1) * batch[1]


def size(sums: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in sums.values()))


@pytest.mark.parametrize("name", MODELS)
def test_no_contribution_exceeds_the_clipping_norm(name):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 4)
    kinds = {"large": 1e4 * x, "tiny": 1e-12 * x, "constant": 1e3 + 1e-3 * x, "mixed": 10.0 ** (3 * x)}
    model = MODELS[name]()
    for bound in (1e-4, 1.0):
        engine = ClippedGradients(model, loss, max_grad_norm=bound)
        for kind, rows in kinds.items():
            for row in rows:
                engine.reset()
                engine.accumulate((row.expand(7, 5, 4), torch.full((7,), 100.0)))
                assert size(engine.sums) <= 7 * bound * (1 + 1e-5), (kind, bound)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_non_finite_example_contributes_nothing_and_poisons_no_other(name, poison):
    torch.manual_seed(0)
    x, weights = torch.randn(4, 5, 4), torch.ones(4)
    good = torch.tensor([True, False, True, True])
    engine = ClippedGradients(MODELS[name](), loss, max_grad_norm=0.5)
    engine.accumulate((x[good], weights[good]))
    expected = dict(engine.sums)
    engine.reset()
    x[1, 2] = poison
    assert torch.isfinite(engine.accumulate((x, weights))).tolist() == good.tolist()
    for key, part in engine.sums.items():
        torch.testing.assert_close(part, expected[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_removing_one_example_changes_the_sum_by_at_most_the_sensitivity(name):
    torch.manual_seed(0)
    model, x, weights = MODELS[name]().double(), torch.randn(5, 5, 4).double(), torch.ones(5).double()
    engine = ClippedGradients(model, loss, max_grad_norm=0.5)
    engine.accumulate((x, weights))
    whole = dict(engine.sums)
    for row in range(5):
        rest = torch.arange(5) != row
        engine.reset()
        engine.accumulate((x[rest], weights[rest]))
        change = {key: whole[key] - engine.sums[key] for key in whole}
        assert 0 < size(change) <= engine.sensitivity * (1 + 1e-9)
