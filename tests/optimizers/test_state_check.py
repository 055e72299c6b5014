"""A state that does not fit its parameter and its group is refused before anything has moved, and never reaches the kernel."""

import copy
import io
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from thoroughness import THOROUGH

from dp_microadam import InputError, MicroAdam
from dp_microadam.optimizers import micro_adam_fused

GUARDED = Path(__file__).with_name("guarded_worker.py")
BOTH_PATHS = pytest.mark.parametrize("fused", [False, None], ids=["plain", "fused"])


def trained(size=1000, steps=3, **options):
    """A parameter and an optimizer with weight decay that has taken a few steps; a gradient for the next is there."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(size))
    optimizer = MicroAdam([param], **{"weight_decay": 0.1, "block_size": 256, "density": 1 / 64, "window": 10, **options})
    for _ in range(steps):
        param.grad = torch.randn(size)
        optimizer.step()
    param.grad = torch.randn(size)
    return param, optimizer


def refused(param, optimizer, match, do=None):
    """``do``, or a step, is refused in these words, and parameter and state are as they were."""
    before, state = param.detach().clone(), copy.deepcopy(dict(optimizer.state[param]))
    with pytest.raises(InputError, match=match):
        (do or optimizer.step)()
    assert torch.equal(before, param)
    assert optimizer.state[param].keys() == state.keys()
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.device.type != "meta":
            assert torch.equal(optimizer.state[param][name], value), name


CHANGES = {
    "bucket_size": 2,
    "quantize": False,
    "error_feedback": False,
    "window_dtype": torch.float32,
    "density": 0.5,
    "window": 3,
    "block_size": 128,  # as many coordinates are kept, 4 in each of 4 blocks instead of 2 in each of 8: all shapes agree
    "scope": "tensor",
    "rounding": "stochastic",
}


@BOTH_PATHS
@pytest.mark.parametrize("option", CHANGES)
def test_an_option_that_shapes_the_state_cannot_change_in_mid_run(option, fused):
    param, optimizer = trained(size=1024, fused=fused, seed=1)
    before = optimizer.param_groups[0][option]
    optimizer.param_groups[0][option] = CHANGES[option]
    words = f"created with {option} = {re.escape(repr(before))}; its group now has {re.escape(repr(CHANGES[option]))}"
    refused(param, optimizer, words)
    optimizer.param_groups[0][option] = before
    optimizer.step()
    assert int(optimizer.state[param]["step"]) == 4


@BOTH_PATHS
def test_buckets_of_another_size_are_refused_also_where_shapes_agree(fused):
    param, optimizer = trained(fused=fused, block_size=128 * 126, bucket_size=128)
    optimizer.param_groups[0]["bucket_size"] = 126
    refused(param, optimizer, "created with bucket_size = 128; its group now has 126")


@pytest.mark.parametrize(
    "bad", [{"block_size": 1 << 20}, {"bucket_size": 0}, {"window": 0}, {"lr": float("nan")}, {"eps": 0.0}]
)
@pytest.mark.parametrize("steps", [0, 3])
def test_options_set_past_the_constructor_are_checked_as_if_given_to_it(bad, steps):
    param, optimizer = trained(steps=steps)
    optimizer.param_groups[0].update(bad)
    refused(param, optimizer, f"{next(iter(bad))} is ")


def broken(name, value):
    """Ways to spoil an entry of a state."""
    yield "missing", None
    yield "on another device", value.to("meta")
    yield "of another type", value.to(torch.float64)
    yield "a list", value.tolist()
    if value.dim():
        yield "too short", value.flatten()[1:].clone()
        yield "too long", torch.cat([value, value])
    if value.dim() and value.numel() > 1:
        yield (
            "expanded",
            value.flatten()[:1].expand(value.numel()).view(value.shape) if value.dim() == 1 else value.mT.contiguous().mT,
        )


@BOTH_PATHS
@pytest.mark.parametrize(
    "options", [{}, {"quantize": False}, {"rounding": "stochastic", "seed": 3}, {"scope": "tensor"}], ids=str
)
def test_every_entry_of_a_state_is_compared_before_anything_moves(options, fused):
    names = trained(**options)[1].state_dict()["state"][0].keys()
    assert {"step", "indices", "values"} <= names
    for name in names:
        value = trained(**options)[1].state_dict()["state"][0][name]
        for what, spoilt in broken(name, value):
            param, optimizer = trained(fused=fused, **options)
            if spoilt is None:
                del optimizer.state[param][name]
            else:
                optimizer.state[param][name] = spoilt
            with pytest.raises(InputError, match=name):
                optimizer.step()
            assert torch.equal(param, trained(**{**options, "fused": fused})[0]), f"{name} {what}"


def test_an_entry_that_nobody_asked_for_is_refused():
    param, optimizer = trained()
    optimizer.state[param]["momentum"] = torch.zeros(1000)
    refused(param, optimizer, "has an unexpected momentum in its state")


@BOTH_PATHS
def test_indices_outside_of_their_block_are_refused_where_torch_saw_them_written(fused):
    param, optimizer = trained(fused=fused)
    optimizer.state[param]["indices"][1, 2] = 256
    refused(param, optimizer, "index 256 in its state, in a block of 256 coordinates")
    optimizer.state[param]["indices"][1, 2] = -1
    refused(param, optimizer, "index -1 in its state")


@BOTH_PATHS
def test_a_parameter_that_lost_a_coordinate_is_refused_though_shapes_agree(fused):
    param, optimizer = trained(size=1000, fused=fused, block_size=32_768, bucket_size=128)
    param.data = param.data[:999].clone()
    param.grad = torch.randn(999)
    refused(param, optimizer, "has 999 coordinates, but its state has 1000")


def stale_gradient(param):
    param.data = torch.zeros(3000)


def freed(param):
    param.untyped_storage().resize_(0)


def expanded(param):
    param.data = torch.zeros(1).expand(1000)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (stale_gradient, r"has a gradient of shape \(1000,\) on cpu; it must have the shape \(3000,\)"),
        (freed, "has no storage"),
        (expanded, "is an expanded tensor"),
        (lambda param: setattr(param, "data", torch.zeros(1000).to(torch.float8_e5m2)), "float8_e5m2; MicroAdam takes dense"),
    ],
    ids=["stale gradient", "freed", "expanded", "float8"],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_parameters_and_gradients_that_do_not_belong_together_are_refused(change, words, steps):
    param, optimizer = trained(steps=steps)
    change(param)
    state = copy.deepcopy(dict(optimizer.state.get(param, {})))
    with pytest.raises(InputError, match=words):
        optimizer.step()
    assert all(torch.equal(optimizer.state[param][name], value) for name, value in state.items())


@BOTH_PATHS
@pytest.mark.parametrize("kind", ["every second", "a column", "one number", "lazy minus"])
def test_gradients_are_read_as_numbers_whatever_their_memory_looks_like(kind, fused):
    torch.manual_seed(1)
    given = {
        "every second": torch.randn(2000)[::2],
        "a column": torch.view_as_real(torch.randn(1000, dtype=torch.complex64))[:, 1],
        "one number": torch.ones(1).expand(1000),
        "lazy minus": torch._neg_view(torch.randn(1000)),
    }[kind]
    (one, first), (other, second) = trained(fused=fused), trained(fused=fused)
    one.grad, other.grad = given, torch.tensor(given.tolist())
    first.step()
    second.step()
    assert torch.equal(one, other)
    assert torch.equal(first.state[one]["values"], second.state[other]["values"])


def test_insisting_on_the_kernel_is_refused_before_anything_moves():
    param, optimizer = trained(scope="tensor")
    optimizer.param_groups[0]["fused"] = True
    refused(param, optimizer, "fused is True, but scope is 'tensor'")


@pytest.mark.parametrize("other", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("steps", [0, 2])
def test_checkpoints_of_other_optimizers_are_refused(other, steps):
    param, optimizer = trained()
    twin = torch.nn.Parameter(torch.zeros(1000))
    foreign = other([twin], lr=0.5)
    for _ in range(steps):
        twin.grad = torch.ones(1000)
        foreign.step()
    refused(param, optimizer, "it is from another optimizer", lambda: optimizer.load_state_dict(foreign.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 1e-3
    disguised = {**optimizer.state_dict(), "state": foreign.state_dict()["state"]}
    if steps and other is not torch.optim.SGD:  # without momentum SGD keeps nothing worth a refusal
        refused(param, optimizer, "needs step, indices", lambda: optimizer.load_state_dict(disguised))


def tampered(state):
    yield "has an index 9999", lambda: state["indices"].__setitem__((0, 0), 9999)
    yield "has an index -5", lambda: state["indices"].__setitem__((9, 15), -5)
    yield "has an index 240 in its state, in a block of 232", lambda: state["indices"].__setitem__((0, -1), 240)
    yield "has a duplicate index in a block", lambda: state["indices"].__setitem__((0, 0), int(state["indices"][0, 1]))
    yield "has step -3", lambda: state["step"].fill_(-3)
    yield "values in its state that are not finite", lambda: state["values"].__setitem__((0, 0), float("nan"))
    yield "bounds in its state that are not finite", lambda: state["bounds"].__setitem__((1, 1), float("inf"))
    yield "lower end is above", lambda: state["bounds"].copy_(state["bounds"].flip(0) + torch.tensor([[1.0], [0.0]]))
    yield "has codes of shape", lambda: state.update(codes=state["codes"][1:])
    yield "has indices of shape .* and torch.int32", lambda: state.update(indices=state["indices"].int())
    yield "has no bounds", lambda: state.pop("bounds")
    yield "has second_moment -1.0", lambda: state["second_moment"].fill_(-1.0)
    yield "has an unexpected extra", lambda: state.update(extra=torch.zeros(3))


@BOTH_PATHS
@pytest.mark.parametrize("number", range(13))
def test_a_damaged_checkpoint_is_refused_and_nothing_is_loaded(number, fused):
    param, optimizer = trained(fused=fused)
    saved = copy.deepcopy(optimizer.state_dict())
    cases = list(tampered(saved["state"][0]))
    assert len(cases) == 13
    words, spoil = cases[number]
    spoil()
    saved["param_groups"][0]["lr"] = 7.0
    refused(param, optimizer, words, lambda: optimizer.load_state_dict(saved))
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_a_checkpoint_whose_group_says_something_else_is_refused():
    for option, value in CHANGES.items():
        if option not in ("block_size", "scope"):  # only the group knows what blocks were, where all shapes agree
            param, optimizer = trained(size=1024, seed=1)
            saved = copy.deepcopy(optimizer.state_dict())
            saved["param_groups"][0][option] = value
            refused(param, optimizer, "nothing was loaded", lambda o=optimizer, s=saved: o.load_state_dict(s))


def test_what_is_loaded_may_not_change_its_options_before_the_next_step():
    param, optimizer = trained(size=1024)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["block_size"] = 128
    refused(param, optimizer, "created with block_size = 256")


def test_a_saved_state_that_is_not_contiguous_is_loaded_in_order():
    (one, first), (other, second) = trained(), trained()
    saved = copy.deepcopy(first.state_dict())
    saved["state"][0]["values"] = saved["state"][0]["values"].mT.contiguous().mT
    first.load_state_dict(saved)
    first.step()
    second.step()
    assert torch.equal(one, other)


@pytest.mark.parametrize("option", ["bias_correction", "rounding", "seed", "fused", "error_feedback"])
def test_options_that_an_old_checkpoint_or_pickle_lacks_are_filled_in(option):
    # What the first version that had the option did without it.
    (one, first), (other, second) = (trained(fused=None, second_moment="coordinate", bias_correction="paper") for _ in range(2))
    buffer = io.BytesIO()
    saved = first.state_dict()
    del saved["param_groups"][0][option]
    torch.save(saved, buffer)
    buffer.seek(0)
    first.load_state_dict(torch.load(buffer, weights_only=True))
    old = copy.deepcopy(second)
    del old.param_groups[0][option], old.defaults[option]
    unpickled = pickle.loads(pickle.dumps(old))
    third = unpickled.param_groups[0]["params"][0]
    third.grad = other.grad.clone()
    for optimizer in (first, second, unpickled):
        assert optimizer.param_groups[0][option] == second.defaults[option]
        optimizer.step()
    assert torch.equal(one, other)
    assert torch.equal(third, other)
    unpickled.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


def test_what_an_old_version_did_is_not_overruled_by_this_optimizer_s_own_choice():
    saved = trained(second_moment="coordinate")[1].state_dict()
    del saved["param_groups"][0]["bias_correction"], saved["param_groups"][0]["second_moment"]
    _, optimizer = trained(second_moment="coordinate", bias_correction="window")
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["bias_correction"] == "paper"


def test_one_pool_of_threads_serves_steps_of_every_size():
    sizes = (200_000, 140_000, 300_000, 70_000)
    params = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    optimizer = MicroAdam([{"params": [param]} for param in params])
    for param in params:
        param.grad = torch.ones_like(param)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        optimizer.step()
        pool = micro_adam_fused._pool()
        before = {thread.ident for thread in threading.enumerate() if thread.name.startswith("micro_adam")}
        for _ in range(3):
            optimizer.step()
        after = {thread.ident for thread in threading.enumerate() if thread.name.startswith("micro_adam")}
    finally:
        torch.set_num_threads(threads)
    assert micro_adam_fused._pool() is pool
    assert before
    assert before <= after
    assert len(after) <= 3


def test_an_interrupted_step_waits_for_its_threads():
    running, finished = threading.Event(), []

    def share(low, high):
        if low == 0:
            running.wait(5)
            raise KeyboardInterrupt
        running.set()
        threading.Event().wait(0.2)
        finished.append(low)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            micro_adam_fused._share_out(share, 1 << 20)
    finally:
        torch.set_num_threads(threads)
    assert finished == [1 << 19]


def test_making_an_optimizer_draws_from_torch_s_generator_only_for_stochastic_rounding():
    def params():
        return [torch.nn.Parameter(torch.zeros(3))]

    def draws(make):
        before = torch.get_rng_state()
        make()
        return not torch.equal(before, torch.get_rng_state())

    assert not draws(lambda: MicroAdam(params()))
    assert not draws(lambda: MicroAdam(params(), rounding="stochastic", seed=3))
    assert not draws(lambda: MicroAdam(params()).add_param_group({"params": params()}))
    assert draws(lambda: MicroAdam(params(), rounding="stochastic"))
    assert draws(lambda: MicroAdam([{"params": params(), "rounding": "stochastic"}]))


def test_groups_that_round_at_random_share_one_drawn_seed_and_no_random_numbers():
    def group():
        return {"params": [torch.nn.Parameter(torch.zeros(500))], "rounding": "stochastic"}

    optimizer = MicroAdam([group(), group()])
    assert optimizer.param_groups[0]["seed"] == optimizer.param_groups[1]["seed"]
    for each in optimizer.param_groups:
        each["params"][0].grad = torch.linspace(-1, 1, 500)
    optimizer.step()
    keys = [int(optimizer.state[each["params"][0]]["rounding_key"]) for each in optimizer.param_groups]
    assert keys[0] != keys[1]


def test_a_parameter_named_twice_is_refused():
    param = torch.nn.Parameter(torch.zeros(3))
    with pytest.warns(UserWarning, match="duplicate parameters"), pytest.raises(InputError, match="contains a parameter twice"):
        MicroAdam([param, param])


def test_threads_that_share_an_optimizer_step_one_after_the_other():
    # With constant gradients it does not matter who steps first, only that steps do not overlap.
    def run(workers, each):
        param = torch.nn.Parameter(torch.zeros(300_000))
        optimizer = MicroAdam([param], density=0.2)
        param.grad = torch.linspace(-1, 1, 300_000)
        threads = [threading.Thread(target=lambda: [optimizer.step() for _ in range(each)]) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return param, optimizer.state[param]

    (one, alone), (other, shared) = run(1, 12), run(4, 3)
    assert int(shared["step"]) == 12
    assert torch.equal(one, other)
    assert all(torch.equal(alone[name], shared[name]) for name in alone)


def run_guarded(*arguments, timeout):
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", str(GUARDED), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guard pages are made with Linux' mprotect")
def test_the_kernel_stays_within_its_tensors_whatever_is_done_to_them():
    cases = 150 if THOROUGH else 20
    done = run_guarded("fuzz", 0, cases, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{cases} cases" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guard pages are made with Linux' mprotect")
@pytest.mark.parametrize("seed", range(1, 5))
def test_the_kernel_stays_within_its_tensors_in_thousands_of_cases(seed):
    done = run_guarded("fuzz", seed * 1_000_000, 2500, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guard pages are made with Linux' mprotect")
@pytest.mark.parametrize("where", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_guard_pages_see_a_single_byte_outside(where):
    assert run_guarded(where, timeout=120).returncode == -11
