"""Tests of the Triton kernel for norms in Triton's interpreter; ``test_norms_triton.py`` runs them in a process of their own.

The interpreter must be switched on before Triton is first imported.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor, nn

from dp_microadam.clipping import linear, norms_triton
from dp_microadam.clipping.cost import LAUNCHES, Estimate
from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.clipping.linear import LinearFactors, LinearRule
from dp_microadam.clipping.norms_triton import tile_norms
from dp_microadam.clipping.outer_product import OuterProductSum

from .launches import Launches

sizes = st.integers(1, 70) | st.sampled_from([31, 32, 33, 63, 64, 65, 127, 129, 140])


def squares(rows: Tensor) -> Tensor:
    return rows.double().flatten(1).square().sum(1)


@examples(100, quick=6)
@example(count=2, positions=17, n_in=130, n_out=129, kind=torch.float32, turned=False, exponent=0, seed=0)  # several tiles
@given(
    count=st.integers(1, 3),
    positions=sizes,
    n_in=sizes,
    n_out=sizes,
    kind=st.sampled_from([torch.float32, torch.bfloat16]),
    turned=st.booleans(),
    exponent=st.integers(-12, 12),
    seed=st.integers(0, 1000),
)
def test_norms_are_those_of_the_formed_gradients(count, positions, n_in, n_out, kind, turned, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, positions, n_in, generator=generator).to(kind)
    deltas = 2.0**exponent * torch.randn(count, positions, n_out, generator=generator)
    deltas = deltas.to(kind)
    if turned:  # other strides, as those of a channels-last image
        inputs, deltas = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (inputs, deltas))
    norms, input_squares, delta_squares = tile_norms(inputs, deltas)
    formed = squares(deltas.double().transpose(1, 2) @ inputs.double())
    for found, expected in ((norms, formed), (input_squares, squares(inputs)), (delta_squares, squares(deltas))):
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    twin = OuterProductSum(LinearFactors(inputs.float(), deltas.float()), "drop").squared_norms()
    torch.testing.assert_close(norms, twin, rtol=2e-6, atol=0)


def test_norms_and_sums_of_the_strategy_are_those_of_its_twin():
    torch.manual_seed(0)
    inputs, deltas = torch.randn(4, 9, 5), torch.randn(4, 9, 7)
    inputs[1, 1:], deltas[1, 1:] = inputs[1, :1], -deltas[1, :1] / 8  # the terms of this example's gradient cancel
    deltas[2] = 0
    coefficients = torch.rand(4)
    found, twin = (OuterProductSum(LinearFactors(inputs, deltas), strategy) for strategy in ("tile", "drop"))
    for part in (found, twin):
        norms = part.squared_norms()
        doubt = part.doubt()
        assert doubt is not None
        assert (norms < doubt.least).tolist() == [False, True, True, False]
        part.settle(norms < doubt.least, 2)
    torch.testing.assert_close(found.squared_norms(), twin.squared_norms(), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.weighted_sum(coefficients), twin.weighted_sum(coefficients))


def test_the_table_of_launches_is_what_is_launched(monkeypatch):
    inputs, deltas = torch.randn(4, 9, 5), torch.randn(4, 9, 7)
    known = tile_norms(inputs, deltas)
    monkeypatch.setattr(norms_triton, "tile_norms", lambda *_: known)  # the interpreter has operations of its own
    with Launches() as counted:
        part = OuterProductSum(LinearFactors(inputs, deltas), "tile")
        part.squared_norms()
        part.weighted_sum(torch.rand(4))
    assert abs(3 + counted.total() - LAUNCHES["tile"]) <= 3  # the kernel, the sum over tiles, a copy


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_an_example_that_is_not_finite_spoils_no_other(value):
    torch.manual_seed(0)
    inputs, deltas = torch.randn(3, 40, 5), torch.randn(3, 40, 70)
    expected = tile_norms(inputs, deltas)[0]
    inputs[1, 37, 2] = value
    found = tile_norms(inputs, deltas)[0]
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert not torch.isfinite(found[1])


@pytest.mark.slow
def test_an_engine_that_takes_the_kernel_for_every_linear_layer(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    x = torch.randn(6, 7, 5)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sin().flatten(1).sum(1)

    plain = ClippedGradients(model, loss, max_grad_norm=1.0, strategy="drop")
    norms = plain.accumulate(x)

    def choose_tile(rule: LinearRule, factors: LinearFactors) -> str:
        rule.estimate = Estimate("tile", 1.0, 1.0, 1.0)
        return "tile" if factors.inputs.dtype == torch.float32 else "drop"

    monkeypatch.setattr(linear.LinearRule, "choose", choose_tile)
    engine = ClippedGradients(model, loss, max_grad_norm=1.0)
    torch.testing.assert_close(engine.accumulate(x), norms, rtol=1e-5, atol=0)
    for name, part in engine.sums.items():
        torch.testing.assert_close(part, plain.sums[name], rtol=1e-5, atol=1e-6)
