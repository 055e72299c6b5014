"""MicroAdam on memory that ends where a forbidden page begins; ``test_state_check.py`` starts it and looks at how it ends.

python guarded_worker.py fuzz SEED CASES     random options, sizes and mischief; a byte touched outside kills the process
python guarded_worker.py before|after        touches such a byte on purpose
"""

import copy
import ctypes
import mmap
import pickle
import random
import sys

import torch

from dp_microadam import InputError, MicroAdam
from dp_microadam.optimizers.bias import CORRECTIONS

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
FORBIDDEN = 0  # PROT_NONE


def guarded(tensor, end):
    """A copy that touches a forbidden page with its last byte or, if ``end`` is False, with its first."""
    size = tensor.numel() * tensor.element_size()
    pages = max(1, -(-size // PAGE))
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        if LIBC.mprotect(ctypes.c_void_p(start + page * PAGE), PAGE, FORBIDDEN):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = PAGE + (pages * PAGE - size if end else 0)
    copied = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
    return copied.copy_(tensor.detach())


def guard(optimizer, end):
    """Put parameters, gradients and states that are in order between forbidden pages."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.device.type == "cpu" and param.is_contiguous():
                param.data = guarded(param, end)
            gradient = param.grad
            stale = gradient is None or gradient.shape != param.shape or gradient.dtype != param.dtype
            if not stale and gradient.layout is torch.strided and gradient.is_contiguous() and not gradient.is_neg():
                param.grad = None
                param.grad = guarded(gradient, end)
            state = optimizer.state.get(param, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.device.type == "cpu" and value.is_contiguous():
                    state[name] = guarded(value, end)


def options(draw):
    bucket = draw.choice([2, 4, 64, 126, 128])
    return {
        "lr": 0.01,
        "weight_decay": draw.choice([0.0, 0.1]),
        "density": draw.choice([0.001, 1 / 64, 0.1, 0.5, 1.0]),
        "window": draw.choice([1, 2, 3, 10]),
        "scope": draw.choice(["block", "block", "block", "tensor"]),
        "quantize": draw.random() < 0.7,
        "error_feedback": draw.random() < 0.8,
        "bucket_size": bucket,
        "block_size": bucket * draw.choice([1, 2, 16, 200]),
        "window_dtype": draw.choice([torch.bfloat16, torch.float32]),
        **draw.choice([{}, *({"second_moment": "coordinate", "bias_correction": one} for one in CORRECTIONS)]),
        "rounding": draw.choice(["nearest", "stochastic"]),
        "seed": 5,
    }


def size(draw):
    return draw.choice([1, 2, 3, 63, 64, 65, 127, 999, 1000, 1024, 4097, 40_000])


def made(draw):
    dtypes = [torch.float32] * 4 + [torch.bfloat16, torch.float64]
    groups = [
        {"params": [torch.nn.Parameter(torch.randn(size(draw)).to(draw.choice(dtypes)))], **options(draw)}
        for _ in range(draw.choice([1, 1, 2]))
    ]
    return MicroAdam(groups)


def give(optimizer):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape).to(param.dtype)


def nothing(draw, optimizer):
    pass


def change_options(draw, optimizer):
    group, wanted = draw.choice(optimizer.param_groups), options(draw)
    for name in draw.sample(sorted(wanted), draw.choice([1, 1, 2, 4])):
        group[name] = wanted[name]


def set_nonsense(draw, optimizer):
    name, value = draw.choice(
        [("block_size", 1 << 20), ("bucket_size", 0), ("bucket_size", 3), ("window", 0), ("window", -2), ("density", 2.0)]
    )
    draw.choice(optimizer.param_groups)[name] = value


def entry(draw, optimizer):
    state = draw.choice([state for state in optimizer.state.values() if state])
    return state, draw.choice(sorted(state))


def spoilt(draw, value):
    if not isinstance(value, torch.Tensor):
        return value
    flat = value.flatten()
    return draw.choice(
        [
            lambda: flat[: draw.randrange(len(flat) + 1)].clone(),
            lambda: torch.cat([value.view(-1, *value.shape[1:])] * 2) if value.dim() else value.expand(3).clone(),
            lambda: value.to(draw.choice([torch.int8, torch.int16, torch.int32, torch.uint8, torch.float32, torch.float64])),
            lambda: value.to("meta"),
            lambda: flat[:1].expand(value.numel()).view(value.shape) if value.numel() else value,
            lambda: value.mT.contiguous().mT if value.dim() == 2 else value,
            lambda: None,
            lambda: value.tolist(),
            lambda: torch.zeros_like(value),
        ]
    )()


def spoil_state(draw, optimizer):
    state, name = entry(draw, optimizer)
    if draw.random() < 0.15:
        del state[name]
    elif draw.random() < 0.1:
        state["exp_avg"] = torch.zeros(7)
    else:
        state[name] = spoilt(draw, state[name])


def swap_data(draw, optimizer):
    """As code does that moves a state to another device and back: the tensor stays, its memory does not."""
    state, name = entry(draw, optimizer)
    other = spoilt(draw, state[name])
    if isinstance(other, torch.Tensor) and other.device.type == "cpu" and other.dtype == state[name].dtype:
        state[name].data = other


def write_indices(draw, optimizer):
    state = draw.choice([state for state in optimizer.state.values() if state])
    state["indices"].view(-1)[draw.randrange(state["indices"].numel())] = draw.choice([-1, -32_768, 32_767, 1000, 64, 2])


def write_indices_unseen(draw, optimizer):
    state = draw.choice([state for state in optimizer.state.values() if state])
    if optimizer.param_groups[0]["scope"] == "block":
        state["indices"].numpy().reshape(-1)[draw.randrange(state["indices"].numel())] = draw.choice([-1, -32_768, 32_767, 64])
    optimizer.unseen = True


def change_parameter(draw, optimizer):
    param = draw.choice([param for group in optimizer.param_groups for param in group["params"]])
    number = draw.choice([param.numel(), max(1, param.numel() - 1), param.numel() + 1, size(draw)])
    param.data = draw.choice(
        [
            lambda: torch.randn(number).to(param.dtype),
            lambda: torch.randn(2 * number).to(param.dtype)[::2],
            lambda: torch.randn(number, dtype=torch.float64),
            lambda: torch.randn(1).to(param.dtype).expand(number),
            lambda: torch.randn(number).to(param.dtype).unsqueeze(0),
        ]
    )()
    if draw.random() < 0.7:
        param.grad = None
        param.grad = torch.randn(param.shape).to(param.dtype)


def change_gradient(draw, optimizer):
    param = draw.choice([param for group in optimizer.param_groups for param in group["params"]])
    twice = torch.randn(2 * param.numel()).to(param.dtype)
    param.grad = None
    param.grad = draw.choice(
        [
            lambda: twice[::2].view(param.shape),
            lambda: torch._neg_view(twice[: param.numel()].view(param.shape)),
            lambda: twice[:1].expand(param.shape),
            lambda: torch.full(param.shape, float("nan"), dtype=param.dtype),
            lambda: twice[: param.numel()].view(param.shape).to_sparse(),
        ]
    )()


def load(draw, optimizer):
    saved = copy.deepcopy(optimizer.state_dict())
    kind = draw.randrange(4)
    if kind == 0:
        params = [[torch.nn.Parameter(torch.randn(p.shape)) for p in group["params"]] for group in optimizer.param_groups]
        other = draw.choice([torch.optim.Adam, torch.optim.SGD])([{"params": each} for each in params], lr=0.1)
        give(other)
        other.step()
        saved = {"state": other.state_dict()["state"], "param_groups": draw.choice([other.state_dict(), saved])["param_groups"]}
    elif kind == 1:
        groups = [{**options(draw), "params": [torch.nn.Parameter(torch.randn(size(draw)))]} for _ in optimizer.param_groups]
        other = MicroAdam(groups)
        give(other)
        other.step()
        saved = {"state": other.state_dict()["state"], "param_groups": draw.choice([other.state_dict(), saved])["param_groups"]}
    elif kind == 2:
        state = draw.choice(list(saved["state"].values()))
        name = draw.choice(sorted(state))
        state[name] = spoilt(draw, state[name])
    else:
        state = draw.choice(list(saved["state"].values()))
        name = draw.choice(sorted(state))
        if state[name].dtype in (torch.int16, torch.int32, torch.uint8, torch.int64):
            top = torch.iinfo(state[name].dtype)
            state[name].random_(max(top.min, -40_000), min(top.max, 40_000))
    optimizer.load_state_dict(saved)


def copied(draw, optimizer):
    """What follows happens to a copy."""
    return copy.deepcopy(optimizer) if draw.random() < 0.5 else pickle.loads(pickle.dumps(optimizer))


MISCHIEF = [
    nothing,
    change_options,
    change_options,
    set_nonsense,
    spoil_state,
    spoil_state,
    swap_data,
    write_indices,
    write_indices_unseen,
    change_parameter,
    change_gradient,
    load,
    load,
    copied,
]


def snapshot(optimizer):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [
        [param.detach().clone(), *[v.clone() for v in optimizer.state.get(param, {}).values() if isinstance(v, torch.Tensor)]]
        for param in params
    ]


def same(one, other):
    return all(
        len(a) == len(b)
        and all(x.device.type == "meta" or torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))
        for a, b in zip(one, other, strict=True)
    )


def twin(optimizer):
    """A copy on memory of its own, gradients included, that computes in plain torch."""
    other = copy.deepcopy(optimizer)
    for group, source in zip(other.param_groups, optimizer.param_groups, strict=True):
        group["fused"] = False
        for param, original in zip(group["params"], source["params"], strict=True):
            param.grad = None if original.grad is None else original.grad.clone()
    return other


def comparable(optimizer):
    """Whether gradients have no two equal magnitudes: which of such is selected is open."""
    params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    return all(
        param.grad.layout is torch.strided
        and (param.grad.shape, param.grad.dtype) == (param.shape, param.dtype)
        and len(param.grad.abs().unique()) == param.numel()
        for param in params
    )


def case(seed):
    """Steps, mischief, steps: each is taken as plain torch takes it, or refused with nothing changed."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(draw.choice([1, 1, 3]))
    optimizer = made(draw)
    for _ in range(draw.choice([1, 2, 12])):
        give(optimizer)
        optimizer.step()
    optimizer.unseen = False
    taken = 0
    for _ in range(4):
        give(optimizer)
        before = None
        try:
            mischief = draw.choice(MISCHIEF)
            optimizer = mischief(draw, optimizer) or optimizer
            give_again = mischief is copied
            optimizer.unseen = getattr(optimizer, "unseen", False)
            if give_again:
                give(optimizer)
            guard(optimizer, draw.random() < 0.7)
            plain = twin(optimizer) if not optimizer.unseen and comparable(optimizer) else None
            before = snapshot(optimizer)
            optimizer.step()
        except (InputError, ValueError):
            if before is not None:
                assert same(before, snapshot(optimizer)), f"seed {seed}: {mischief.__name__} was refused too late"
            return taken
        taken += 1
        if plain is not None:
            plain.step()
            ours, theirs = snapshot(optimizer), snapshot(plain)
            for one, other in zip(ours, theirs, strict=True):
                assert torch.allclose(one[0].float(), other[0].float(), rtol=1e-5, atol=1e-6, equal_nan=True), (
                    f"seed {seed}: after {mischief.__name__} the kernel and plain torch differ"
                )
    return taken


def main(what, *arguments):
    if what == "fuzz":
        first, cases = map(int, arguments)
        taken = sum(case(seed) for seed in range(first, first + cases))
        print(f"{cases} cases, {taken} steps taken")
        assert taken > cases / 2, "most mischief is refused, but not everything"
    else:
        tensor = guarded(torch.zeros(1000), end=what == "after")
        ctypes.memset(tensor.data_ptr() + (4000 if what == "after" else -1), 0, 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
