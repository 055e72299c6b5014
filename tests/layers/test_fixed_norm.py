"""Features of one norm: a function of one example, through which clipped gradients are exact."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dp_microadam import InputError
from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.clipping.per_example import clipped_sum
from dp_microadam.layers.fixed_norm import FixedNorm


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_every_row_gets_the_norm_whatever_the_others_are():
    rows = torch.tensor([[3.0, 4.0], [0.0, 1e-4], [0.0, 0.0]])
    found = FixedNorm(2.0)(rows)
    torch.testing.assert_close(found, torch.tensor([[1.2, 1.6], [0.0, 2.0], [0.0, 0.0]]))
    assert torch.equal(FixedNorm(2.0)(rows[:1]), found[:1])
    with pytest.raises(InputError, match="norm is 0"):
        FixedNorm(0.0)


def test_clipped_gradients_through_it_are_those_of_one_example_at_a_time():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), FixedNorm(4.0), nn.Linear(5, 3))
    batch = 30 * torch.randn(7, 6), torch.randint(3, (7,))
    engine = ClippedGradients(model, loss, max_grad_norm=1.0)
    engine.accumulate(batch)
    torch.testing.assert_close(engine.sums, clipped_sum(model, loss, batch, max_grad_norm=1.0)[0])
