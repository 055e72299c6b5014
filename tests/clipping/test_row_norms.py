"""Sums of the norms of clipped gradients' rows: exact, and of the same sensitivity as the sums of the gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from torch import nn

from dp_microadam import ClippedGradients, InputError
from dp_microadam.clipping.engine import ClippedRowNorms
from dp_microadam.clipping.per_example import clipped, per_example_gradients


def network():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.GroupNorm(3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 2)
    )


def loss(model, batch):
    return model(batch).square().sum(1)


def rows(gradient):
    return gradient.reshape(len(gradient), -1).norm(dim=1)


@settings(examples(8, quick=4), derandomize=True)
@given(seed=st.integers(0, 1000), count=st.integers(1, 6), bound=st.floats(0.01, 10.0), masked=st.booleans())
def test_row_norms_agree_with_the_loop(seed, count, bound, masked):
    torch.manual_seed(seed)
    model, batch = network().double(), torch.randn(count, 1, 4, 4).double()
    masks = {"4.weight": torch.tensor([True, False, True, True, False])} if masked else {}
    engine = ClippedRowNorms(model, loss, max_grad_norm=bound, row_masks=masks)
    engine.accumulate(batch)
    gradients = per_example_gradients(model, loss, batch)
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
    model = network().double()
    engine = ClippedRowNorms(model, loss, max_grad_norm=0.5)
    engine.accumulate(torch.randn(3, 1, 4, 4).double())
    before = {name: total.clone() for name, total in engine.sums.items()}
    norm = float(engine.accumulate(size * torch.randn(1, 1, 4, 4).double()))
    moved = torch.cat([total - before[name] for name, total in engine.sums.items()]).norm()
    assert float(moved) <= engine.sensitivity * (1 + 1e-5)
    # The bound is reached: it is the size of the clipped gradient itself.
    assert float(moved) == pytest.approx(min(norm, 0.5), rel=1e-9)


def test_a_non_finite_example_contributes_no_row_norms():
    torch.manual_seed(0)
    model, batch = network(), torch.randn(3, 1, 4, 4)
    batch[1] = torch.nan
    engine = ClippedRowNorms(model, loss, max_grad_norm=0.5)
    engine.accumulate(batch)
    spoiled = {name: total.clone() for name, total in engine.sums.items()}
    engine.reset()
    engine.accumulate(batch[[0, 2]])
    for name, total in engine.sums.items():
        torch.testing.assert_close(total, spoiled[name])


def test_numbers_without_rows_are_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.factor * self.layer(x)

    with pytest.raises(InputError, match="'factor' is a single number and has no rows"):
        ClippedRowNorms(Scaled(), loss, max_grad_norm=1.0)


def test_the_gradients_themselves_are_as_before():
    torch.manual_seed(0)
    model, batch = network().double(), torch.randn(4, 1, 4, 4).double()
    norms = ClippedRowNorms(model, loss, max_grad_norm=0.5).accumulate(batch)
    torch.testing.assert_close(norms, ClippedGradients(model, loss, max_grad_norm=0.5).accumulate(batch))
