"""The cost model: what it chooses, and that the choice tells nothing of the batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dp_microadam import ClippedGradients
from dp_microadam.clipping.cost import KEEP_LIMIT, Shapes, choose
from dp_microadam.clipping.rules.convolution import Geometry, convolution_shapes
from dp_microadam.clipping.rules.linear import LinearFactors, LinearRule

from .conftest import random_loss


@given(
    weights=st.integers(1, 10**8),
    activations=st.integers(1, 10**7),
    multiplications=st.floats(1, 1e11),
    gram=st.floats(0, 1e12),
    passes=st.floats(0, 1e10),
)
def test_the_strategy_is_the_cheapest_by_the_formula_that_was_measured(weights, activations, multiplications, gram, passes):
    by_hand = {
        "ghost": multiplications + gram + 16 * passes,
        "keep": 1.15 * multiplications + 12 * weights,
        "drop": 2.15 * multiplications + 6 * weights,
    }
    shapes = Shapes(weights, activations, multiplications, gram, passes)
    assert all(choose(shapes, name).cost == pytest.approx(cost, rel=1e-12) for name, cost in by_hand.items())
    if weights > KEEP_LIMIT * activations:
        del by_hand["keep"]
    assert by_hand[choose(shapes).strategy] == pytest.approx(min(by_hand.values()), rel=1e-12)


@pytest.mark.parametrize(
    ("layer", "strategy"),
    [
        ((3, 16, 32, 3), "keep"),  # hardly any weights
        ((64, 64, 32, 3), "keep"),  # few weights, many positions
        ((256, 256, 8, 3), "ghost"),  # many weights, few positions
        ((64, 256, 56, 1), "keep"),
        ((1, 784, 256), "ghost"),  # one position: norms of two vectors
        ((197, 192, 768), "keep"),  # ViT-Tiny: kept gradients take less memory than what they replace
        ((16, 768, 3072), "ghost"),
        ((2048, 64, 64), "keep"),
    ],
)
def test_layers_of_known_networks(layer, strategy):
    """Convolutions as channels in and out, image side and kernel; linear layers as positions, features in and out."""
    if len(layer) == 4:
        n_in, n_out, side, kernel = layer
        geometry = Geometry((n_out, n_in, kernel, kernel), (1, 1), (kernel // 2,) * 2, (1, 1), 1)
        shapes = convolution_shapes(geometry, torch.Size((n_in, side, side)), 4)
    else:
        positions, n_in, n_out = layer
        factors = LinearFactors(torch.empty(1, positions, n_in), torch.empty(1, positions, n_out))
        shapes = LinearRule("", nn.Linear(1, 1), ("weight",)).shapes(factors)
    assert choose(shapes).strategy == strategy


def test_the_choice_does_not_depend_on_the_size_of_the_batch():
    """Which is private: a table that shows strategies must not tell it."""
    engine = ClippedGradients(nn.Conv2d(3, 4, 3), random_loss, max_grad_norm=1.0)
    tables = set()
    for size in (1, 2, 50):
        engine.accumulate(torch.randn(size, 3, 6, 6))
        tables.add(engine.explain())
    assert len(tables) == 1
