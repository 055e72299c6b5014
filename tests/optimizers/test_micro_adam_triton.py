"""The Triton kernels, run by Triton's interpreter, update parameters and states as the CPU kernel does, to the bit."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from thoroughness import THOROUGH, examples

from dp_microadam import InputError, MicroAdam
from dp_microadam.optimizers import micro_adam_triton, selection

pytest.importorskip("triton")

options = st.fixed_dictionaries(
    {
        "density": st.sampled_from([0.01, 0.1, 0.5, 1.0]),
        "window": st.sampled_from([1, 2, 3, 10]),
        "quantize": st.sampled_from([True, True, False]),
        "error_feedback": st.sampled_from([True, True, True, False]),
        "block_size": st.sampled_from([256, 1024, 32_768]),
        "bucket_size": st.sampled_from([64, 128]),
        "window_dtype": st.sampled_from([torch.bfloat16, torch.float32]),
        "second_moment": st.sampled_from(["tensor", "coordinate"]),
        "bias_correction": st.sampled_from(["paper", "steady", "window"]),
        "rounding": st.sampled_from(["nearest", "stochastic"]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.0), (0.5, 0.9)]),
        "eps": st.sampled_from([1e-8, 1e-2]),
        "lr": st.sampled_from([1e-3, 1.0]),
    }
).map(lambda chosen: chosen if chosen["second_moment"] == "coordinate" else {**chosen, "bias_correction": "steady"})

SHAPES = [(), (1,), (3,), (63,), (65,), (127, 3), (16, 3, 3, 3)]
shapes = st.sampled_from([*SHAPES, (1025,), (700, 5)] if THOROUGH else SHAPES)
dtypes = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64])


def turned(tensor):
    """The same values in another order in memory."""
    if tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.t().contiguous().t() if tensor.dim() == 2 else torch.stack([tensor, tensor], dim=-1)[..., 0]


def on_kernels(step):
    """Call ``step`` with the kernels in charge of CPU tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_adam_triton, "DEVICE_TYPES", frozenset({"cpu"}))
        return step()


def copies(params):
    return [torch.nn.Parameter(param.detach().clone(memory_format=torch.preserve_format)) for param in params]


def give(gradients, *lists):
    for params in lists:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = None if gradient is None else gradient.clone(memory_format=torch.preserve_format)


def assert_same(ours, theirs, optimizer, reference):
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        assert optimizer.state[one].keys() == reference.state[other].keys()
        for name, value in optimizer.state[one].items():
            assert torch.equal(value, reference.state[other][name]), name


@examples(40, quick=6)
@given(
    shape=shapes,
    chosen=options,
    dtype=dtypes,
    strided=st.sampled_from([(False, False), (False, False), (True, True), (False, True)]),
    seed=st.integers(0, 2**20),
    scale=st.sampled_from([1e-6, 1.0, 1e3]),
)
def test_steps_equal_those_of_the_cpu_kernel_to_the_bit(shape, chosen, dtype, strided, seed, scale):
    torch.manual_seed(seed)
    first = torch.randn(shape).to(dtype)
    ours = [torch.nn.Parameter(turned(first) if strided[0] else first)]
    theirs = copies(ours)
    optimizer, reference = (MicroAdam(params, **chosen, seed=7, fused=True) for params in (ours, theirs))
    for number in range(3 if not THOROUGH else 5):
        gradient = torch.randn(shape) * scale
        gradient = (gradient.round() if number == 1 else gradient).to(dtype)
        give([gradient], theirs)
        give([turned(gradient) if strided[1] else gradient], ours)
        on_kernels(optimizer.step)
        reference.step()
    assert_same(ours, theirs, optimizer, reference)


def of_kind(kind, length):
    values = torch.randn(length, generator=torch.Generator().manual_seed(length))
    if kind == "one exponent":
        return 1.0 + values.abs() % 1e-4
    changed = {"ties": values.round(), "zeros": torch.zeros(length), "signed zeros": values * 0.0}
    return changed.get(kind, values * {"tiny": 1e-40, "huge": 1e14}.get(kind, 1.0))


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "signed zeros", "tiny", "huge", "one exponent"])
def test_the_kernels_select_the_largest_magnitudes_the_first_of_those_that_tie(kind):
    # The blocks of 700 coordinates and the rest of 50 differ in how many are kept.
    param = torch.nn.Parameter(torch.zeros(750))
    optimizer = MicroAdam([param], density=0.07, block_size=700, bucket_size=100, window_dtype=torch.float32, fused=True)
    param.grad = of_kind(kind, 750)
    on_kernels(optimizer.step)
    state = optimizer.state[param]
    for begin, end, kept in ((0, 700, slice(0, 49)), (700, 750, slice(49, 53))):
        block = param.grad[begin:end]
        expected = block.abs().sort(descending=True, stable=True).indices[: kept.stop - kept.start].sort().values
        assert torch.equal(state["indices"][0, kept].long(), expected)
        assert torch.equal(state["values"][0, kept], block[expected])


def test_a_list_of_many_kinds_equals_the_cpu_kernel():
    # Groups, a parameter that skips steps, sizes and dtypes, new addresses, a loaded state: tables are made again where needed.
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(size)) for size in (40, 300, 7)]
    ours.append(torch.nn.Parameter(torch.randn(9).bfloat16()))
    theirs = copies(ours)

    def make(params):
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5, "weight_decay": 0.1, "betas": (0.5, 0.9)}]
        return MicroAdam(groups, block_size=256, bucket_size=64, density=0.1, fused=True)

    optimizer, reference = make(ours), make(theirs)
    for number in range(5):
        gradients = [torch.randn_like(param) for param in ours]
        gradients[2] = None if number in (1, 2) else gradients[2]
        give(gradients, ours, theirs)
        if number == 3:
            ours[0].data = ours[0].data.clone()
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.1 / (1 + number)
        on_kernels(optimizer.step)
        reference.step()
    assert int(optimizer.state[ours[2]]["step"]) == 3
    assert_same(ours, theirs, optimizer, reference)


def test_a_step_takes_three_launches_and_makes_its_tables_once(monkeypatch):
    from dp_microadam.optimizers import micro_adam_triton_blocks, micro_adam_triton_window

    launched, made = [], []
    kernels = (
        micro_adam_triton_blocks.find_thresholds,
        micro_adam_triton_blocks.store_blocks,
        micro_adam_triton_window.apply_window,
    )
    for kernel in kernels:
        monkeypatch.setattr(kernel, "pre_run_hooks", [lambda *_, name=kernel.__name__, **__: launched.append(name)])
    original = micro_adam_triton._ParameterList
    monkeypatch.setattr(micro_adam_triton, "_ParameterList", lambda *given: made.append(1) or original(*given))
    params = [torch.nn.Parameter(torch.randn(size)) for size in (3, 30, 5, 2, 1)]
    optimizer = MicroAdam([{"params": params[:3]}, {"params": params[3:], "lr": 0.1, "weight_decay": 0.5}])
    for _ in range(2):
        give([torch.randn_like(param) for param in params], params)
        on_kernels(optimizer.step)
    assert launched == ["find_thresholds", "store_blocks", "apply_window"] * 2
    assert len(made) == 1


@pytest.mark.parametrize(("poison", "steps", "row"), [(math.nan, 0, 3), (math.nan, 1, 3), (-math.inf, 1, 20), (1e31, 1, 20)])
def test_a_non_finite_gradient_changes_nothing(poison, steps, row):
    # Rows 3 and 20 are in the first and in the second half of a bucket.
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(30)), torch.nn.Parameter(torch.randn(40, 5))]
    optimizer = MicroAdam(params, weight_decay=0.1)
    for _ in range(steps):
        give([torch.randn_like(param) for param in params], params)
        on_kernels(optimizer.step)
    before = copies(params)
    states = {param: {name: value.clone() for name, value in state.items()} for param, state in optimizer.state.items()}
    give([torch.randn_like(param) for param in params], params)
    params[1].grad[row, 2] = poison
    with pytest.raises(InputError, match=r"parameter 1 of group 0 \(shape \(40, 5\)\) has a gradient of magnitude"):
        on_kernels(optimizer.step)
    assert len(optimizer.state) == 2 * steps
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param, old)
        for name, value in states.get(param, {}).items():
            assert torch.equal(optimizer.state[param][name], value)
    params[1].grad[row, 2] = 1.0
    on_kernels(optimizer.step)
    assert int(optimizer.state[params[1]]["step"]) == steps + 1


def test_a_state_of_plain_torch_whose_rows_are_not_sorted_is_continued():
    torch.manual_seed(0)
    plain = [torch.nn.Parameter(torch.randn(500))]
    start = MicroAdam(plain, density=0.2, fused=False)
    for _ in range(4):
        give([torch.randn(500)], plain)
        start.step()
    rows = start.state[plain[0]]["indices"]
    rows.copy_(rows.flip(1))
    start.state[plain[0]]["values"].copy_(start.state[plain[0]]["values"].flip(1))
    ours, theirs = copies(plain), copies(plain)
    optimizer, reference = (MicroAdam(params, density=0.2, fused=True) for params in (ours, theirs))
    for other in (optimizer, reference):
        other.load_state_dict({**start.state_dict(), "param_groups": other.state_dict()["param_groups"]})
    give([torch.randn(500)], ours, theirs)
    on_kernels(optimizer.step)
    reference.step()
    assert_same(ours, theirs, optimizer, reference)


def test_without_triton_plain_torch_runs_and_insisting_says_why(monkeypatch):
    monkeypatch.setattr(micro_adam_triton, "find_spec", lambda name: None)
    micro_adam_triton._missing.cache_clear()
    try:
        param, other = (torch.nn.Parameter(torch.ones(50)) for _ in range(2))
        give([torch.arange(50.0)], [param], [other])
        with pytest.raises(
            InputError, match=r"fused is True, but Triton is not installed \(pip install 'dp-microadam\[gpu\]'\)"
        ):
            on_kernels(MicroAdam([param], fused=True).step)
        on_kernels(MicroAdam([param]).step)
        MicroAdam([other], fused=False).step()
        assert torch.equal(param, other)
    finally:
        micro_adam_triton._missing.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"rounding": "stochastic", "weight_decay": 0.1},
        {"density": 1.0, "window": 2},
        {"bucket_size": 2, "block_size": 4096},
    ],
    ids=str,
)
def test_large_blocks_equal_the_cpu_kernel(chosen):
    # At full density the counts of a block of 32,768 reach the last bit of their word.
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in [(100_003,), (7,), (64, 3, 3, 3), (1,)]]
    theirs = copies(ours)
    optimizer, reference = (MicroAdam(params, seed=3, fused=True, **chosen) for params in (ours, theirs))
    for _ in range(3):
        give([torch.randn_like(param) for param in ours], ours, theirs)
        on_kernels(optimizer.step)
        reference.step()
    assert_same(ours, theirs, optimizer, reference)


@pytest.mark.slow
def test_the_kernels_compile_for_three_generations_without_spills_and_with_exact_arithmetic(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "kernel_resources.py"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(script), "--traffic", "--json", str(tmp_path / "report.json")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    report = json.loads((tmp_path / "report.json").read_text())
    names = {"find_thresholds", "store_blocks", "apply_window"}
    assert {(row["target"], row["kernel"]) for row in report["kernels"]} == {
        (target, name) for target in ("sm_80", "sm_90", "sm_100") for name in names
    }
    for row in report["kernels"]:
        assert row["spills"] == row["stack"] == 0, row
        assert row["inexact"] == 0, row
    # By hand: the gradient, a code and two bounds per bucket are read twice and all but the gradient are written; ten rows of a
    # hundredth of the coordinates are read, one is written, and at most a tenth of the weights is read and written.
    residual, row = 1 / 2 + 8 / 128, 4 * 0.01
    distinct = report["bytes per parameter"]["distinct"]
    assert distinct["find_thresholds"]["read bytes"] == pytest.approx(4 + residual, abs=0.01)
    assert distinct["store_blocks"]["read bytes"] == pytest.approx(4 + residual, abs=0.01)
    assert distinct["store_blocks"]["written bytes"] == pytest.approx(residual + row, abs=0.01)
    assert 10 * row < distinct["apply_window"]["read bytes"] < 10 * row + 0.41
    assert 0 < distinct["apply_window"]["written bytes"] < 0.41


def test_long_rows_on_other_devices_than_the_cpu_are_selected_there():
    rows = torch.empty(1, (1 << 20) + 1, device="meta")
    assert selection.largest_magnitudes(rows, 3).device.type == "meta"
