"""One contract that every optimizer of ours keeps, as torch's own do."""

import copy
import io
import pickle

import pytest
import torch

from dp_microadam import InputError, MicroAdam, ThresholdAdam
from dp_microadam.optimizers.adam_bc import AdamBC
from dp_microadam.optimizers.micro_adam_reference import MicroAdamReference
from dp_microadam.optimizers.tensor_adam import TensorAdam


def dense(optimizer, **options):
    """Makes an optimizer that has no density; it moves every coordinate."""
    return lambda params, density=None, **more: optimizer(params, **options, **{"lr": 1e-3, **more})


OPTIMIZERS = {
    "MicroAdam": lambda params, **more: MicroAdam(params, **more),
    "plain": lambda params, **more: MicroAdam(params, fused=False, **more),
    "tensor scope": lambda params, **more: MicroAdam(params, scope="tensor", **more),
    "dense error": lambda params, **more: MicroAdam(params, quantize=False, **more),
    "steady": lambda params, **more: MicroAdam(params, bias_correction="steady", **more),
    "AdamBC": dense(AdamBC),
    "SGD": dense(torch.optim.SGD),
    "SGD with momentum": dense(torch.optim.SGD, momentum=0.9),
    "Adam": dense(torch.optim.Adam),
    "AdamW": dense(torch.optim.AdamW, weight_decay=0.0),
    "TensorAdam": dense(TensorAdam),
    "ThresholdAdam": dense(ThresholdAdam, threshold=0.5),
    "reference": lambda params, **more: MicroAdamReference(params, **more),
}
DENSE = ("AdamBC", "SGD", "SGD with momentum", "Adam", "AdamW", "TensorAdam", "ThresholdAdam")
TRAINABLE = {name: make for name, make in OPTIMIZERS.items() if name != "reference"}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_trainable = pytest.mark.parametrize("make", TRAINABLE.values(), ids=TRAINABLE)


def tensors(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(30, 11), (200,), (), (4, 3, 3, 3)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(params, seed):
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def take_steps(optimizer, params, steps):
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


@every_optimizer
def test_it_descends(make):
    param = torch.nn.Parameter(torch.full((64,), 3.0))
    optimizer = make([param], lr=0.05, density=0.1)
    for _ in range(800):
        optimizer.zero_grad()
        (param.square().sum() / 2).backward()
        optimizer.step()
    assert float(param.detach().abs().mean()) < 0.5


@every_trainable
def test_state_dict_round_trip_is_exact_to_the_bit(make):
    params = tensors()
    optimizer = make(params)
    take_steps(optimizer, params, range(12))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    restored = make(others)
    restored.load_state_dict(torch.load(buffer, weights_only=True))
    for one, other in zip(params, others, strict=True):
        assert optimizer.state[one].keys() == restored.state[other].keys()
        for key, value in optimizer.state[one].items():
            assert value.dtype == restored.state[other][key].dtype
            assert torch.equal(value, restored.state[other][key])
    take_steps(optimizer, params, range(12, 24))
    take_steps(restored, others, range(12, 24))
    for one, other in zip(params, others, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_loading_keeps_the_dtypes_of_packed_state_and_does_not_alias_it(dtype):
    params = tensors(dtype=dtype)
    optimizer = MicroAdam(params)
    take_steps(optimizer, params, range(3))
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved["state"])
    others = tensors(dtype=dtype)
    restored = MicroAdam(others)
    restored.load_state_dict(saved)
    for number, param in enumerate(others):
        for key, value in restored.state[param].items():
            assert value.dtype == kept[number][key].dtype
            assert torch.equal(value, kept[number][key])
    take_steps(restored, others, range(3, 6))
    assert all(torch.equal(value, kept[name][key]) for name, state in saved["state"].items() for key, value in state.items())


def test_hooks_around_loading_still_run():
    params = tensors()
    optimizer = MicroAdam(params)
    take_steps(optimizer, params, range(2))
    restored = MicroAdam(params)
    seen = []

    def before(_, state_dict):
        changed = copy.deepcopy(state_dict)
        changed["state"][0]["values"].fill_(7.0)
        return changed

    restored.register_load_state_dict_pre_hook(before)
    restored.register_load_state_dict_post_hook(lambda opt: seen.append(opt.state[params[0]]["codes"].dtype))
    restored.load_state_dict(optimizer.state_dict())
    assert seen == [torch.uint8]
    assert (restored.state[params[0]]["values"] == 7.0).all()


@every_trainable
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))], ids=["copy", "pickle"])
def test_a_copy_continues_on_its_own(make, copier):
    params = tensors()
    optimizer = make(params)
    take_steps(optimizer, params, range(4))
    twin = copier(optimizer)
    others = twin.param_groups[0]["params"]
    assert all(one is not other for one, other in zip(params, others, strict=True))
    take_steps(optimizer, params, range(4, 8))
    take_steps(twin, others, range(4, 8))
    for one, other in zip(params, others, strict=True):
        assert torch.equal(one, other)


@every_optimizer
def test_groups_have_their_own_options(make):
    slow, fast = torch.nn.Parameter(torch.zeros(50)), torch.nn.Parameter(torch.zeros(50))
    optimizer = make([{"params": [slow]}, {"params": [fast], "lr": 0.1, "density": 1.0}], lr=1e-3)
    slow.grad, fast.grad = torch.ones(50), torch.ones(50)
    optimizer.step()
    assert int((slow != 0).sum()) == (50 if make in [OPTIMIZERS[name] for name in DENSE] else 1)
    assert int((fast != 0).sum()) == 50
    assert float(fast.detach().abs().max()) > 50 * float(slow.detach().abs().max())
    later = torch.nn.Parameter(torch.zeros(20))
    optimizer.add_param_group({"params": [later]})
    later.grad = torch.ones(20)
    optimizer.step()
    assert later.any()


@every_optimizer
def test_frozen_parameters_and_missing_gradients_are_left_alone(make):
    trained = torch.nn.Parameter(torch.ones(5))
    frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
    unused = torch.nn.Parameter(torch.ones(5))
    optimizer = make([trained, frozen, unused])
    optimizer.step()
    assert torch.equal(trained, torch.ones(5)), "without any gradient there is no step"
    trained.sum().backward()
    optimizer.step()
    assert not torch.equal(trained, torch.ones(5))
    assert torch.equal(frozen, torch.ones(5))
    assert torch.equal(unused, torch.ones(5))
    assert not optimizer.state[frozen]
    assert not optimizer.state[unused]


@every_optimizer
def test_a_closure_is_evaluated_with_gradients(make):
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = make([param])

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 5.0
    assert not torch.equal(param, torch.ones(5))


@every_optimizer
def test_tensors_of_one_element_and_none(make):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in [(), (1,), (0,), (3, 0)]]
    optimizer = make(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert float(params[0]) < 1.0
    assert float(params[1]) < 1.0


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_follow_float32(make, dtype):
    if dtype == torch.float16 and make in (OPTIMIZERS["Adam"], OPTIMIZERS["AdamW"]):
        pytest.skip("torch keeps their moments in the parameter's own type, in which squares of small gradients vanish")
    if make in (OPTIMIZERS["MicroAdam"], OPTIMIZERS["steady"]):
        pytest.skip("of equal gradients the kernel, which is for float32, selects others than the plain path")
    narrow, wide = tensors(dtype=dtype), tensors()
    with torch.no_grad():
        for one, other in zip(narrow, wide, strict=True):
            other.copy_(one)
    optimizers = make(narrow, lr=0.01), make(wide, lr=0.01)
    for step in range(4):
        give_gradients(narrow, step)
        for one, other in zip(narrow, wide, strict=True):
            other.grad = one.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(narrow, wide, strict=True):
        assert one.dtype == dtype
        # Four steps, each rounded once to the parameter's own precision.
        tolerance = 4 * torch.finfo(dtype).eps * float(other.abs().max()) + 1e-6
        assert torch.allclose(one.float(), other, rtol=0, atol=tolerance)


def test_float64_parameters_keep_their_precision():
    param = torch.nn.Parameter(torch.full((10,), 1.0, dtype=torch.float64) + 1e-12)
    param.grad = torch.zeros(10, dtype=torch.float64)
    param.grad[0] = 1.0
    MicroAdam([param], lr=1e-3).step()
    assert (param[1:] == 1.0 + 1e-12).all()
    assert float(param[0]) == pytest.approx(1.0 - 1e-3, abs=1e-9)


@every_optimizer
def test_non_contiguous_parameters_step_like_contiguous_ones(make):
    values = torch.randn(6, 5, 3, 3, generator=torch.Generator().manual_seed(0))
    plain = torch.nn.Parameter(values.clone())
    last = torch.nn.Parameter(values.clone().to(memory_format=torch.channels_last))
    turned = torch.nn.Parameter(values.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0))
    optimizer = make([plain]), make([last]), make([turned])
    for step in range(3):
        gradient = torch.randn(6, 5, 3, 3, generator=torch.Generator().manual_seed(step))
        plain.grad, last.grad, turned.grad = gradient, gradient.to(memory_format=torch.channels_last), gradient.clone()
        for one in optimizer:
            one.step()
    assert torch.allclose(plain, last, rtol=1e-6, atol=1e-8)
    assert torch.allclose(plain, turned, rtol=1e-6, atol=1e-8)
    assert last.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("one_cycle", [False, True])
def test_schedulers_of_torch_drive_it(one_cycle):
    param = torch.nn.Parameter(torch.zeros(300))
    optimizer = MicroAdam([param], lr=1e-3)
    schedulers = torch.optim.lr_scheduler
    scheduler = schedulers.OneCycleLR(optimizer, 0.1, total_steps=10) if one_cycle else schedulers.StepLR(optimizer, 2)
    rates = set()
    for step in range(6):
        before = param.detach().clone()
        give_gradients([param], step)
        optimizer.step()
        rates.add(round(float(optimizer.param_groups[0]["lr"]), 12))
        assert not torch.equal(before, param)
        scheduler.step()
    assert len(rates) > 1


BAD_OPTIONS = [
    *((kind, {"lr": -1.0}, "lr is -1.0") for kind in (MicroAdam, AdamBC, TensorAdam, ThresholdAdam)),
    *((kind, {"weight_decay": float("nan")}, "weight_decay is nan") for kind in (MicroAdam, AdamBC, TensorAdam, ThresholdAdam)),
    *((kind, {"eps": 0.0}, "eps is 0.0") for kind in (MicroAdam, TensorAdam, ThresholdAdam)),
    *((kind, {"beta": 1.0}, "beta is 1.0") for kind in (TensorAdam, ThresholdAdam)),
    (MicroAdam, {"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
    (AdamBC, {"betas": (1.0, 0.9)}, r"betas\[0\] is 1.0"),
    (AdamBC, {"floor": 0.0}, "floor is 0.0"),
    (AdamBC, {"noise_variance": -1e-9}, "noise_variance is -1e-09"),
    (ThresholdAdam, {"threshold": 0.0}, "threshold is 0.0"),
    (MicroAdam, {"density": 0.0}, "density is 0.0"),
    (MicroAdam, {"density": 1.5}, "density is 1.5"),
    (MicroAdam, {"window": 0}, "window is 0"),
    (MicroAdam, {"scope": "layer"}, "scope is 'layer'"),
    (MicroAdam, {"bias_correction": "none"}, "bias_correction is 'none'"),
]


@pytest.mark.parametrize(("kind", "bad", "message"), BAD_OPTIONS, ids=str)
def test_bad_options_are_refused_by_name_and_value(kind, bad, message):
    with pytest.raises(InputError, match=message):
        kind(tensors(), **bad)
    with pytest.raises(InputError, match=message):
        kind([{"params": tensors(), **bad}])
