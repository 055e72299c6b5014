"""Shortcuts of MicroAdam's CPU kernel give what the long way gives, to the bit."""

import copy

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from thoroughness import examples

from dp_microadam import InputError, MicroAdam
from dp_microadam.optimizers.micro_adam_prepared import PreparedGroup
from dp_microadam.optimizers.quantization import bucket_bounds, pack, quantize, rounding_offsets

SHAPES = [(300, 517), (7,), (64, 64, 3, 3), (1,), (40_003,)]


@examples(60)
@given(
    st.sampled_from([2, 64, 128, 256, 384]),
    st.integers(1, 3000),
    st.sampled_from(["normal", "halves", "next to halves", "one sign", "constant", "tiny", "huge"]),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_codes_are_those_of_algorithm_2_also_where_rounding_decides(bucket_size, length, kind, stochastic, seed):
    from dp_microadam.optimizers.micro_adam_kernel import new_scratch
    from dp_microadam.optimizers.micro_adam_kernel_residual import quantize as kernel_quantize

    rng = np.random.default_rng(seed)
    values = rng.standard_normal(length).astype(np.float32)
    if kind in ("halves", "next to halves"):  # multiples of half a unit: each second one is on the border of two codes
        values = (rng.integers(-15, 16, length) / 2).astype(np.float32) * np.float32(rng.uniform(0.1, 1))
        if kind == "next to halves":
            values = np.nextafter(values, rng.choice([-np.inf, np.inf], length).astype(np.float32))
    elif kind == "one sign":
        values = np.abs(values) + 3
    elif kind == "constant":
        values[:] = 2.5
    elif kind == "tiny":
        values *= np.float32(1e-38)
    elif kind == "huge":
        values *= np.float32(1e30)
    scratch, key = new_scratch(), 12_345 if stochastic else 0
    scratch.offsets[:bucket_size] = 0.5
    buckets = -(-length // bucket_size)
    codes, bounds = np.zeros((length + 1) // 2, np.uint8), np.zeros((2, buckets), np.float32)
    kernel_quantize(values, codes, bounds, bucket_size, key, 1 << 20, values.ctypes.data, scratch)
    for bucket in range(buckets):
        begin, end = bucket * bucket_size, min(length, (bucket + 1) * bucket_size)
        part = torch.from_numpy(values[begin:end]).view(1, -1)
        lower, upper = bucket_bounds(part)
        offsets = rounding_offsets(key, (1 << 20) + begin, end - begin).view(1, -1) if stochastic else None
        assert bounds[:, bucket].tolist() == [float(lower), float(upper)]
        expected = pack(quantize(part, lower, upper, offsets)).view(-1).numpy()
        assert np.array_equal(codes[begin // 2 : begin // 2 + len(expected)], expected)


def model():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


@pytest.mark.parametrize("options", [{}, {"rounding": "stochastic", "seed": 3}, {"window_dtype": torch.float32}], ids=str)
def test_steps_from_a_kept_table_equal_steps_that_check_everything(options):
    kept, checked = model(), model()
    optimizers = [MicroAdam(params, weight_decay=0.1, **options) for params in (kept, checked)]
    for step in range(13):
        for one, other in zip(kept, checked, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        kept[1].grad = checked[1].grad = None if step == 5 else torch.full((7,), float(step))
        optimizers[1]._forget()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
            optimizer.step()
    assert isinstance(optimizers[0]._prepared[0], PreparedGroup)
    for one, other in zip(kept, checked, strict=True):
        assert torch.equal(one, other)
        ours, theirs = optimizers[0].state[one], optimizers[1].state[other]
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert int(optimizers[0].state[kept[1]]["step"]) == 12


@pytest.mark.parametrize("where", [0, 63, 300, 155_099])
@pytest.mark.parametrize("poison", [float("nan"), float("-inf"), -1e31])
def test_a_gradient_that_is_not_finite_is_noticed_wherever_it_is(where, poison):
    params = model()
    optimizer = MicroAdam(params)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    params[0].grad.view(-1)[where] = poison
    with pytest.raises(InputError, match=r"parameter 0 of group 0 .* has a gradient of magnitude"):
        optimizer.step()
    assert all(torch.equal(param, old) for param, old in zip(params, before[0], strict=True))
    state = optimizer.state_dict()["state"]
    assert all(torch.equal(state[i][name], value) for i, old in before[1].items() for name, value in old.items())
