"""Products in split bfloat16: how exact they are, on this machine and with sums as tensor cores take them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples
from torch import Tensor, nn

from dp_microadam import ClippedGradients
from dp_microadam.clipping import linear, split_bf16
from dp_microadam.clipping.linear import LinearFactors, LinearRule
from dp_microadam.clipping.outer_product import OuterProductSum
from dp_microadam.clipping.precision import float32_sums
from dp_microadam.clipping.split_bf16 import product, split

floats = st.floats(2.0**-100, 2.0**126, width=32)


@examples(500)
@given(value=floats, negative=st.booleans())
def test_two_and_three_terms_of_a_number(value, negative):
    x = torch.tensor(-value if negative else value)
    for terms, bound in ((1, 2.0**-8), (2, 2.0**-16), (3, 0.0)):
        parts = split(x, terms)
        assert {part.dtype for part in parts} == {torch.bfloat16}
        assert abs(sum(part.double() for part in parts) - x.double()) <= bound * value
    assert torch.equal(split(x.bfloat16().float(), 1)[0].float(), x.bfloat16().float())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.finfo(torch.float32).max])
def test_what_is_not_finite_is_not_hidden(value):
    found = product(torch.tensor([[1.0, value]]), torch.ones(2, 1), (3, 3))
    assert not torch.isfinite(found).any()


sizes = st.integers(1, 40)


@examples(100)
@given(
    batch=st.none() | st.integers(1, 3),
    m=sizes,
    k=sizes | st.integers(2000, 5000),
    n=sizes,
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    terms=st.sampled_from([(2, 2), (3, 1), (1, 3), (3, 3)]),
)
def test_products_are_within_their_bounds_of_the_exact_ones(batch, m, k, n, seed, scale, terms):
    generator = torch.Generator().manual_seed(seed)
    first = scale * torch.randn(*([] if batch is None else [batch]), m, k, generator=generator)
    second = torch.randn(*([] if batch is None else [batch]), k, n, generator=generator)
    first, second = (x if t > 1 else x.bfloat16().float() for x, t in ((first, terms[0]), (second, terms[1])))
    exact = first.double() @ second.double()
    sizes_of_sums = first.double().abs() @ second.double().abs()
    error = (product(first, second, terms).double() - exact).abs()
    lost = {(2, 2): 3 * 2.0**-16, (3, 3): 2.1 * 2.0**-24}.get(terms, 0.0)
    assert (error <= (lost + 1e-6) * sizes_of_sums).all()


def test_three_terms_are_as_exact_as_float32_and_two_are_not():
    torch.manual_seed(0)
    first, second = torch.randn(64, 500), torch.randn(500, 64)
    exact = first.double() @ second.double()

    def error(found: Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    assert error(product(first, second, (3, 3))) <= 1.5 * error(first @ second)
    assert 1e-6 < error(product(first, second, (2, 2))) < 1e-5
    assert error(product(first, second, (1, 1))) > 1e-3


def cut(values: Tensor) -> Tensor:
    """float64 to float32, rounded toward zero."""
    near = values.float()
    return torch.where(near.double().abs() > values.abs(), torch.nextafter(near, torch.zeros_like(near)), near)


def as_tensor_cores_add(left: Tensor, right: Tensor) -> Tensor:
    """Exact products, sixteen of which are added to the accumulator at a time; what does not fit in float32 is cut off."""
    total = torch.zeros(*left.shape[:-1], right.shape[-1])
    for columns, rows in zip(left.double().split(16, dim=-1), right.double().split(16, dim=-2), strict=True):
        total = cut(total.double() + columns @ rows)
    return total


@pytest.mark.parametrize("kind", ["random", "of one sign", "nearly parallel"])
@pytest.mark.parametrize("terms", [(1, 1), (3, 3)])
def test_norms_and_sums_keep_the_promise_with_the_sums_of_tensor_cores(monkeypatch, kind, terms):
    """Norms to 1e-5, and never too small by more; each example's share of the sum to 1e-5 of its norm."""
    monkeypatch.setattr(split_bf16, "exact_products", as_tensor_cores_add)
    torch.manual_seed(0)
    inputs, deltas = torch.randn(2, 20, 5000), torch.randn(2, 20, 12)
    if kind == "of one sign":
        inputs, deltas = inputs.abs(), deltas.abs()
    if kind == "nearly parallel":
        inputs, deltas = (1 + 0.01 * x for x in (inputs, deltas))
    if terms == (1, 1):
        inputs, deltas = (x.bfloat16().float() for x in (inputs, deltas))
    formed = deltas.double().transpose(1, 2) @ inputs.double()
    exact = formed.flatten(1).norm(dim=1)
    for strategy in ("ghost", "drop", "keep"):
        part = OuterProductSum(LinearFactors(inputs, deltas, terms), strategy)
        norms = part.squared_norms().double().sqrt()
        assert ((norms / exact - 1).abs() <= 1e-5).all(), (strategy, norms / exact - 1)
        for example in range(2):
            coefficients = torch.zeros(2)
            coefficients[example] = 1 / float(norms[example])
            share = part.weighted_sum(coefficients).double()
            assert share.norm() <= 1 + 1e-5
            assert (share - formed[example] / norms[example]).norm() <= 1e-5


def test_a_bfloat16_layer_of_an_engine_takes_one_product_and_a_float32_layer_six(monkeypatch):
    """As under bfloat16 autocast on a GPU: this CPU has no products of bfloat16 matrices, so they are widened."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 3), torch.randn(5, 4, 6)
    plain = ClippedGradients(model, _loss, max_grad_norm=0.5)
    norms = plain.accumulate(x)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(linear, "has_tensor_cores", lambda device: True)
    monkeypatch.setattr(linear, "product", lambda *args: seen.append(args[2]) or product(*args))
    with ClippedGradients(model, _loss, max_grad_norm=0.5, tensor_cores=True) as engine:
        torch.testing.assert_close(engine.accumulate(x), norms, rtol=1e-5, atol=0)
        for name, part in engine.sums.items():
            assert (part - plain.sums[name]).norm() <= 1e-5 * plain.sums[name].norm()
    assert set(seen) == {(3, 3)}
    rule = LinearRule("", nn.Linear(2, 2), ("weight",))
    narrow = torch.empty(0, dtype=torch.bfloat16)
    assert rule.terms(torch.bfloat16, narrow) is None  # not asked for
    rule.tensor_cores = True
    assert rule.terms(torch.bfloat16, narrow) == (1, 1)
    assert rule.terms(torch.float32, narrow) == (1, 3)
    assert rule.terms(torch.float64, narrow.double()) is None


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sin().flatten(1).sum(1)


def test_without_tensor_cores_nothing_changes():
    model, x = nn.Linear(6, 3), torch.randn(5, 4, 6)
    found = []
    for tensor_cores in (False, True):
        with ClippedGradients(model, _loss, max_grad_norm=0.5, tensor_cores=tensor_cores) as engine:
            engine.accumulate(x)
            found.append(engine.sums["weight"])
    assert torch.equal(*found)


@pytest.mark.parametrize("chosen", [(True, True), (False, True), (False, False)])
def test_long_bfloat16_sums_are_not_taken_in_bfloat16_and_the_users_setting_returns(chosen):
    settings, name = torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"
    split_k = hasattr(settings, f"{name}_split_k")

    def now() -> tuple[bool, bool]:
        return getattr(settings, name), getattr(settings, f"{name}_split_k", chosen[1])

    before = now()
    setattr(settings, name, chosen if split_k else chosen[0])
    try:
        with float32_sums():
            assert now() == (False, chosen[1])
        assert now() == chosen
    finally:
        setattr(settings, name, before if split_k else before[0])
