"""Q, Q⁻¹ and packing keep what Algorithm 2 and the paper's appendix promise."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from thoroughness import examples

from dp_microadam.optimizers.quantization import (
    LEVELS,
    bucket_bounds,
    dequantize,
    derive_key,
    pack,
    quantize,
    rounding_offsets,
    unpack,
)

SUBNORMAL = 2.0**-149

magnitudes = st.sampled_from([1e-45, 1e-38, 1e-30, 1e-8, 1.0, 1e8, 1e30, 1e38])


@st.composite
def bucket_matrices(draw):
    rows = draw(st.integers(1, 4))
    length = draw(st.integers(1, 130))
    scale = draw(magnitudes)
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    values = (torch.rand(rows, length, generator=generator) * 2 - 1) * scale
    shape = draw(st.sampled_from(["spread", "one outlier", "constant", "shifted", "zeros"]))
    if shape == "one outlier":
        values *= 1e-6
        values[:, 0] = scale
    elif shape == "constant":
        values[:] = values[:, :1]
    elif shape == "shifted":
        values = values * 1e-3 + scale * 0.9
    elif shape == "zeros":
        values.zero_()
    return values


def step_of(lower, upper):
    return ((upper.double() - lower.double()) / LEVELS).unsqueeze(1)


def tolerance(values):
    """What float32 rounding may add: a few units in the last place of the largest value, or of the smallest float."""
    return 8 * 2.0**-24 * values.abs().amax(dim=1, keepdim=True).double() + 20 * SUBNORMAL


@examples(150)
@given(bucket_matrices())
def test_codes_lie_between_0_and_15(values):
    codes = quantize(values, *bucket_bounds(values))
    assert codes.dtype == torch.uint8
    assert int(codes.max()) <= LEVELS


@examples(150)
@given(bucket_matrices())
def test_rounding_to_nearest_errs_by_at_most_half_a_step(values):
    lower, upper = bucket_bounds(values)
    decoded = dequantize(quantize(values, lower, upper), lower, upper)
    error = (decoded.double() - values.double()).abs()
    assert (error <= step_of(lower, upper) / 2 + tolerance(values)).all()


@examples(150)
@given(bucket_matrices(), st.integers(0, 2**62))
def test_stochastic_rounding_errs_by_at_most_one_step(values, key):
    lower, upper = bucket_bounds(values)
    offsets = rounding_offsets(key, 0, values.numel()).view_as(values)
    decoded = dequantize(quantize(values, lower, upper, offsets), lower, upper)
    error = (decoded.double() - values.double()).abs()
    assert (error <= step_of(lower, upper) + tolerance(values)).all()


@examples(150)
@given(bucket_matrices(), st.integers(0, 2**62))
def test_the_appendix_bounds_the_error_by_the_norm(values, key):
    # ‖x̂ − x‖ ≤ √(d−2)/(2ᵇ−1) · (Δ−δ)/√(Δ²+δ²) · ‖x‖, minimum and maximum being exact.
    lower, upper = bucket_bounds(values)
    offsets = rounding_offsets(key, 0, values.numel()).view_as(values)
    decoded = dequantize(quantize(values, lower, upper, offsets), lower, upper)
    error = (decoded.double() - values.double()).norm(dim=1)
    dimension = max(values.shape[1] - 2, 0)
    low, high = lower.double(), upper.double()
    ends = torch.hypot(low, high).clamp_min(SUBNORMAL)
    bound = math.sqrt(dimension) / LEVELS * (high - low) / ends * values.double().norm(dim=1)
    slack = tolerance(values).squeeze(1) * math.sqrt(values.shape[1])
    assert (error <= bound + slack).all()


def test_stochastic_rounding_is_unbiased():
    # Each decoded value is x plus a step u times a centred variable in (−1, 1); by Hoeffding the mean of N of them leaves
    # ±t·u with probability at most 2·exp(−N t²/2). With N = 40,000 and t = 0.03 that is 3e-8 a value, 4e-7 for all 13.
    draws, allowed = 40_000, 0.03
    values = torch.linspace(-1.0, 2.0, 13).unsqueeze(0)
    lower, upper = bucket_bounds(values)
    step = float(upper - lower) / LEVELS
    offsets = rounding_offsets(11, 0, draws * 13).view(draws, 13)
    many = values.expand(draws, 13)
    decoded = dequantize(quantize(many, lower.expand(draws), upper.expand(draws), offsets), lower, upper)
    assert ((decoded.double().mean(0) - values.squeeze(0).double()).abs() <= allowed * step).all()


def test_rounding_to_nearest_is_not_unbiased():
    # The test above can fail: rounding to nearest fails it.
    values = torch.tensor([[0.0, 0.3, 15.0]])
    decoded = dequantize(quantize(values, *bucket_bounds(values)), *bucket_bounds(values))
    assert abs(float(decoded[0, 1]) - 0.3) > 0.03


@examples(100)
@given(st.integers(1, 5), st.integers(1, 131), st.integers(0, 2**32))
def test_unpacking_inverts_packing(rows, length, seed):
    codes = torch.randint(0, 16, (rows, length), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack(codes)
    assert packed.shape == (rows, (length + 1) // 2)
    assert torch.equal(unpack(packed, length), codes)


def test_a_constant_bucket_decodes_exactly():
    values = torch.full((2, 7), 0.3)
    codes = quantize(values, *bucket_bounds(values))
    assert torch.equal(codes, torch.zeros_like(codes))
    assert torch.equal(dequantize(codes, *bucket_bounds(values)), values)


def test_minimum_and_maximum_decode_to_themselves():
    values = torch.tensor([[-2.0, 0.7, 13.0]])
    decoded = dequantize(quantize(values, *bucket_bounds(values)), *bucket_bounds(values))
    assert decoded[0, 0] == -2.0
    assert decoded[0, 2] == pytest.approx(13.0, rel=1e-6)


def test_rounding_offsets_are_uniform():
    # Dvoretzky–Kiefer–Wolfowitz: the empirical distribution of N = 1e6 uniforms leaves the true one by more than 0.0029 with
    # probability at most 2·exp(−2·N·0.0029²) = 1e-7. A float32 of 24 bits on the edge of a bin may fall to either side.
    offsets = rounding_offsets(5, 0, 1_000_000)
    assert float(offsets.min()) >= 0.0
    assert float(offsets.max()) < 1.0
    counts = torch.histc(offsets, bins=1000, min=0, max=1).double().cumsum(0) / 1e6
    expected = torch.arange(1, 1001, dtype=torch.float64) / 1000
    assert float((counts - expected).abs().max()) <= 0.0029 + 2.0**-24


def test_rounding_offsets_of_different_steps_and_neighbours_are_uncorrelated():
    # A mean of N = 1e6 independent products in [−1/4, 1/4] leaves ±0.0014 with probability at most 2·exp(−8·N·0.0014²) = 3e-7
    # by Hoeffding. Products of neighbours are independent at every other place: two means of N/2, each within 0.002 with the
    # same probability.
    first = rounding_offsets(derive_key(9, 1), 0, 1_000_001) - 0.5
    second = rounding_offsets(derive_key(9, 2), 0, 1_000_001) - 0.5
    assert abs(float((first * second).double().mean())) < 0.0014
    neighbours = (first[1:] * first[:-1]).double()
    assert abs(float(neighbours[::2].mean())) < 0.002
    assert abs(float(neighbours[1::2].mean())) < 0.002


def test_splitmix64_gives_the_published_sequence():
    # The first outputs of the public-domain reference implementation for state 1234567 (Vigna, splitmix64.c).
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    expected = [(word >> 40) * 2.0**-24 for word in published]
    assert rounding_offsets(1234567, 0, 5).tolist() == expected
