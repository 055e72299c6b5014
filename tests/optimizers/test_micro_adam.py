"""MicroAdam against the paper, against its reference, and against what its documentation says."""

import copy
import math

import numpy as np
import pytest
import torch

from dp_microadam import InputError, MicroAdam
from dp_microadam.optimizers import micro_adam
from dp_microadam.optimizers.micro_adam_reference import MicroAdamReference
from dp_microadam.optimizers.quantization import dequantize, quantize

SHAPES = ((70_000,), (33, 7), (3,), (), (32_768,))
"""Two blocks and a part of one, a bucket and a part of one, fewer than a bucket, a single number, exactly one block."""

VARIANTS = {
    "kernel": {},
    "kernel, density 0.3, window 3": {"density": 0.3, "window": 3},
    "plain": {"fused": False},
    "plain, density 0.3, window 3": {"fused": False, "density": 0.3, "window": 3},
    "float32": {"quantize": False},
    "whole tensors": {"scope": "tensor"},
    "whole tensors, float32": {"scope": "tensor", "quantize": False},
    "steady": {"bias_correction": "steady"},
    "plain, steady": {"bias_correction": "steady", "fused": False},
    "window": {"bias_correction": "window"},
}
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def parameters(shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give(params, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param)


def steps(optimizer, params, count, first=0):
    for step in range(first, first + count):
        give(params, step)
        optimizer.step()


def algorithm_1(theta, gradients, eta=1e-3, beta_1=0.9, beta_2=0.999, eps=1e-8, density=0.01, m=10):
    """Algorithm 1 of the paper with an exact error, transcribed line by line in float64 for one tensor of one block."""
    d = theta.size
    error = np.zeros(d)
    buffer = []  # 𝒢: the last m selections, each with the time at which it was made
    for t, g in enumerate(gradients, start=1):
        a = g + error
        selected = np.argsort(-np.abs(a), kind="stable")[: math.ceil(density * d)]
        buffer = [*buffer, (t, selected, a[selected].copy())][-m:]
        a[selected] = 0
        error = a
        m_hat, v_hat = np.zeros(d), np.zeros(d)
        for made, where, values in buffer:
            m_hat[where] += beta_1 ** (t - made) * values
            v_hat[where] += beta_2 ** (t - made) * values**2
        m_hat *= (1 - beta_1) / (1 - beta_1**t)
        v_hat *= (1 - beta_2) / (1 - beta_2**t)
        theta = theta - eta * m_hat / (eps + np.sqrt(v_hat))
    return theta


def test_as_it_comes_with_an_exact_residual_it_is_algorithm_1_of_the_paper():
    """Thirty steps of an independent transcription: three windows, and a thousand selections that all agree."""
    rng = np.random.default_rng(0)
    start, gradients = rng.standard_normal(3_000), rng.standard_normal((30, 3_000))
    param = torch.nn.Parameter(torch.tensor(start))
    optimizer = MicroAdam([param], quantize=False)
    for gradient in gradients:
        param.grad = torch.tensor(gradient)
        optimizer.step()
    expected = algorithm_1(start, gradients)
    assert np.abs(expected - start).max() > 5e-3
    np.testing.assert_allclose(param.detach().numpy(), expected, rtol=0, atol=2e-8)


@every_variant
def test_it_steps_as_the_reference_does(options):
    """Gradients of fresh noise have no ties, so that the two stay together: what differs is the order of float32 sums."""
    params, twins = parameters(), parameters()
    optimizer = MicroAdam(params, lr=0.01, weight_decay=0.1, **options)
    same = {name: value for name, value in options.items() if name != "fused"}
    reference = MicroAdamReference(twins, lr=0.01, weight_decay=0.1, **same)
    for step in range(13):
        steps(optimizer, params, 1, step)
        steps(reference, twins, 1, step)
        for param, twin in zip(params, twins, strict=True):
            # A code on the edge between two levels may be rounded to either; it shows where it is selected later.
            assert ((param - twin).abs() > 1e-5).float().mean() < 2e-4
    for param, twin in zip(params, twins, strict=True):
        residual, expected = optimizer.residual(param), reference._error(reference.state[twin], reference.param_groups[0])
        if residual is not None:
            assert ((residual - expected).abs() > 1e-4).float().mean() < 1e-3


def test_threads_do_not_change_the_result(monkeypatch):
    from dp_microadam.optimizers import micro_adam_kernel

    monkeypatch.setattr(micro_adam_kernel, "_WORTH_A_THREAD", 1000)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        params = parameters(((200_000,), (5,), (40_000,)))
        optimizer = MicroAdam(params)
        assert micro_adam._kernel_for(params[0], optimizer.param_groups[0]) is micro_adam_kernel
        steps(optimizer, params, 4)
        found.append(params)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_blocks_updated_one_by_one_and_together_agree(monkeypatch):
    found = []
    for at_once in (1024, 2):
        monkeypatch.setattr(micro_adam, "_ROWS_AT_ONCE", at_once)
        micro_adam._layout.cache_clear()
        params = parameters(((200_000,),))
        optimizer = MicroAdam(params, fused=False)
        steps(optimizer, params, 4)
        found.append((params[0], optimizer.residual(params[0]), optimizer.second_moment(params[0])))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["ties", "zero", "one large", "subnormal", "ascending"])
def test_gradients_that_are_hard_to_select_from(kind, fused):
    given = {
        "ties": torch.ones(40_000),
        "zero": torch.zeros(40_000),
        "one large": torch.zeros(40_000).index_fill_(0, torch.tensor([39_999]), 5.0),
        "subnormal": torch.randn(40_000, generator=torch.Generator().manual_seed(0)) * 1e-42,
        "ascending": torch.arange(40_000).float(),
    }[kind]
    param = torch.nn.Parameter(torch.zeros(40_000))
    optimizer = MicroAdam([param], fused=fused)
    for _ in range(3):
        param.grad = given.clone()
        optimizer.step()
        coordinates, values = optimizer.window(param)
        assert len(coordinates[0].unique()) == 328 + 73
        assert values[0].abs().max() >= given.abs().max().bfloat16()
    assert param.isfinite().all()


def test_at_full_density_with_an_exact_window_longer_than_the_run_it_is_adam():
    params, twins = parameters(((50,), (4, 5))), parameters(((50,), (4, 5)))
    steps(MicroAdam(params, lr=0.01, density=1.0, window=20, quantize=False), params, 15)
    steps(torch.optim.Adam(twins, lr=0.01), twins, 15)
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=0, atol=2e-6)


@pytest.mark.parametrize("options", [VARIANTS[name] for name in ("kernel", "plain", "float32", "whole tensors")], ids=str)
def test_what_is_not_selected_is_not_lost(options):
    """All gradients so far are in the window's values of all steps, or in the residual, but for what four bits round."""
    (param,) = parameters(((5_000,),))
    optimizer = MicroAdam([param], **options)
    gathered, selected = torch.zeros(5_000), torch.zeros(5_000)
    for step in range(40):
        steps(optimizer, [param], 1, step)
        gathered += param.grad
        coordinates, values = optimizer.window(param)
        selected[coordinates[0]] += values[0]
    lost = gathered - selected - optimizer.residual(param)
    # A level is about 2·9.4/15 of the deviation and rounding errs by u/√12 a step at most, so √40 steps by 2.3.
    assert lost.abs().mean() < (2e-5 if options.get("quantize") is False else 2.3)


@pytest.mark.parametrize("correction", ["paper", "steady", "window"])
def test_bias_correction_settles_where_the_docs_say(correction):
    """A constant gradient at full density: m̂/√v̂ is (1 − β₁ᵐ)/√(1 − β₂ᵐ) = 6.53 in the end, from 1 on, or 1 throughout."""
    param = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = MicroAdam([param], lr=1.0, density=1.0, bias_correction=correction)
    moved = []
    for step in range(12):
        if step == 11:
            optimizer.state[param]["step"].fill_(9_999)
        before = param.item()
        param.grad = torch.ones(1, dtype=torch.float64)
        optimizer.step()
        moved.append(before - param.item())
    limit = (1 - 0.9**10) / math.sqrt(1 - 0.999**10)
    assert limit == pytest.approx(6.53, abs=0.01)
    expected = {"paper": [1.0, limit], "steady": [limit, limit], "window": [1.0, 1.0]}[correction]
    assert [moved[0], moved[-1]] == pytest.approx(expected, rel=1e-3)


def test_state_takes_under_a_byte_per_parameter():
    (param,) = parameters(((1000, 100),))
    optimizer = MicroAdam([param])
    assert optimizer.state_bytes() == 0
    steps(optimizer, [param], 1)
    assert 0.95 < optimizer.state_bytes() / param.numel() < 0.97
    assert set(optimizer.state[param]) == {"step", "indices", "values", "codes", "bounds"}


@every_variant
def test_window_and_second_moment_are_what_the_step_was_computed_from(options):
    params = parameters(((40_000,),))
    optimizer = MicroAdam(params, lr=1.0, **{**options, "eps": 1e-3})
    steps(optimizer, params, 12)
    before = params[0].detach().clone()
    steps(optimizer, params, 1, 12)
    coordinates, values = optimizer.window(params[0])
    first = torch.zeros(40_000)
    terms = 13 if options.get("bias_correction", "paper") == "paper" else len(values)
    for age, (where, what) in enumerate(zip(coordinates, values, strict=True)):
        first[where] += 0.9**age * what * 0.1 / (1 - 0.9**terms)
    if options.get("bias_correction") == "steady":
        first *= 1 - 0.9 ** len(values)
    expected = first / (optimizer.second_moment(params[0]).sqrt() + 1e-3)
    torch.testing.assert_close(before - params[0], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_a_parameter_that_skips_a_step_keeps_its_own_ages(fused):
    params, alone = parameters(((300,), (200,))), parameters(((300,), (200,)))[:1]
    optimizer, twin = MicroAdam(params, fused=fused), MicroAdam(alone, fused=fused)
    for step in range(15):
        give(params, step)
        give(alone, step)
        alone[0].grad = params[0].grad.clone()
        if step % 3 == 1:
            params[0].grad = None
        else:
            twin.step()
        optimizer.step()
    assert torch.equal(params[0], alone[0])
    assert (int(optimizer.state[params[0]]["step"]), int(optimizer.state[params[1]]["step"])) == (10, 15)


@pytest.mark.parametrize("options", [{}, {"quantize": False}, {"scope": "tensor"}], ids=str)
def test_the_plain_path_s_launches_do_not_grow_with_the_number_of_tensors(options, launches_of):
    """A few short ones and one larger than a block, or twenty times as many of other sizes, each at an age of its own."""
    counts = []
    for shapes in (
        [(7,), (1_500,), (45_000,)],
        [shape for i in range(20) for shape in ((3, 5 + i), (1_000 + 50 * i,), (45_000 + 100 * i,))],
    ):
        params = parameters(shapes)
        optimizer = MicroAdam(params, fused=False, weight_decay=0.1, **options)
        steps(optimizer, params, 1)
        for age, state in enumerate(optimizer.state.values(), start=1):
            state["step"].fill_(age)
        counts.append(launches_of(optimizer))
    assert counts[0] == counts[1] <= 400


@pytest.mark.parametrize("options", [{}, {"quantize": False}, {"scope": "tensor"}], ids=str)
def test_tensors_updated_together_and_one_by_one_agree(options):
    together, apart = parameters(), parameters()
    optimizer = MicroAdam(together, fused=False, **options)
    others = [MicroAdam([param], fused=False, **options) for param in apart]
    for step in range(12):
        give(together, step)
        for param, twin, other in zip(together, apart, others, strict=True):
            twin.grad = param.grad = None if (step + len(param.shape)) % 5 == 0 else param.grad
            other.step()
        optimizer.step()
    for param, twin, other in zip(together, apart, others, strict=True):
        torch.testing.assert_close((param, optimizer.state[param]), (twin, other.state[twin]), rtol=0, atol=0)


def test_sparse_gradients_and_complex_parameters_are_refused():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(InputError, match="sparse"):
        MicroAdam(embedding.parameters()).step()
    number = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    number.grad = torch.zeros_like(number)
    with pytest.raises(InputError, match="real parameters"):
        MicroAdam([number]).step()


@pytest.mark.parametrize("change", [{"density": 0.5}, {"window": 3}, {"scope": "tensor"}, {"quantize": False}], ids=str)
def test_an_option_that_shapes_the_state_cannot_change_in_mid_run(change):
    params = parameters(((40_000,), (7,)))
    optimizer = MicroAdam(params)
    steps(optimizer, params, 2)
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    optimizer.param_groups[0].update(change)
    with pytest.raises(InputError, match=r"set back|stay as they were"):
        optimizer.step()
    torch.testing.assert_close((params, optimizer.state_dict()["state"]), before, rtol=0, atol=0)


DAMAGE = {
    "no codes": lambda state: state.pop("codes"),
    "an entry too many": lambda state: state.update(more=torch.zeros(3)),
    "short window": lambda state: state.update(indices=state["indices"][:, :-1]),
    "wide values": lambda state: state.update(values=state["values"].float()),
    "codes as float": lambda state: state.update(codes=state["codes"].float()),
    "an index above": lambda state: state["indices"].view(-1)[3:4].fill_(30_000),
    "an index below": lambda state: state["indices"].view(-1)[3:4].fill_(-1),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_loaded(damage):
    params = parameters(((700,),))
    optimizer = MicroAdam(params)
    steps(optimizer, params, 3)
    saved, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state[params[0]])
    damage(saved["state"][0])
    with pytest.raises(InputError):
        optimizer.load_state_dict(saved)
    assert all(torch.equal(value, optimizer.state[params[0]][name]) for name, value in before.items())


def test_checkpoints_of_other_optimizers_are_refused():
    params = parameters(((700,),))
    first = torch.optim.Adam(params)
    steps(first, params, 1)
    with pytest.raises(InputError, match="from another optimizer"):
        MicroAdam(params).load_state_dict(first.state_dict())


@pytest.mark.parametrize("length", [7, 128, 32_768, 33_000])
def test_the_kernel_stays_within_its_tensors_whatever_their_memory_holds(length):
    """Indices are overwritten behind MicroAdam's back; weights and state lie between guards, which stay as they are."""
    guarded = torch.full((length + 80_000,), 7.0)
    param = torch.nn.Parameter(guarded[40_000 : 40_000 + length])
    optimizer = MicroAdam([param])
    give([param], 0)
    optimizer.step()
    state = optimizer.state[param]
    walls = {}
    for name in ("codes", "bounds", "indices", "values"):
        value = state[name]
        walls[name] = torch.full((value.numel() + 80_000,), 3).to(value.dtype)
        inside = walls[name][40_000 : 40_000 + value.numel()].view(value.shape)
        state[name] = inside.copy_(value)
    generator = torch.Generator().manual_seed(length)
    for step in range(12):
        state["indices"].random_(-(2**15), 2**15, generator=generator)
        give([param], step)
        optimizer.step()
    assert (guarded[:40_000] == 7).all()
    assert (guarded[40_000 + length :] == 7).all()
    for name, wall in walls.items():
        assert (wall[:40_000] == 3).all(), name
        assert (wall[40_000 + state[name].numel() :] == 3).all(), name


@pytest.mark.parametrize("kind", ["normal", "constant", "one number"])
def test_rounding_to_four_bits_errs_by_at_most_half_a_level_and_keeps_the_ends(kind):
    sizes = torch.tensor([1e-20, 1e-3, 1, 1e3, 1e20]).view(5, 1)
    values = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)) * sizes
    values = {
        "normal": values,
        "constant": values[:, :1].expand(5, 128),
        "one number": values.masked_fill(values < 0, 0),
    }[kind]
    codes, bounds = quantize(values)
    decoded = dequantize(codes, bounds).view(values.shape)
    level = (values.amax(1) - values.amin(1)) / 15
    assert codes.shape == (5, 64)
    assert ((decoded - values).abs() <= level.unsqueeze(1) * 0.5001).all()
    torch.testing.assert_close(decoded.amin(1), values.amin(1))
    torch.testing.assert_close(decoded.amax(1), values.amax(1), rtol=1e-5, atol=0)
