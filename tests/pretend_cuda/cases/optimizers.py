"""Every optimizer takes the CPU's steps on the device, keeps its state there, and continues from the CPU's state."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from pretend_cuda.cases.comparison import agree, all_agree, existing, moved, placed
from torch import distributed as dist
from torch import nn

from dp_microadam import MicroAdam
from dp_microadam.methods.registry import build
from dp_microadam.methods.table import METHODS
from dp_microadam.training.diagnostics import MicroAdamDiagnostics

SHAPES = ((70_000,), (64, 3, 3, 3), (10,), (1,), (33, 7))
"""More than two blocks, and blocks that are not full."""

STEPS = 11
"""One more than the window is long."""

CPU = torch.device("cpu")
_TABLE = existing("optimizers/test_contract.py").OPTIMIZERS
# The reference is what the CPU's results are compared with.
OPTIMIZERS = {name: make for name, make in _TABLE.items() if name != "reference"}


def parameters(device: torch.device, dtype: torch.dtype = torch.float32, shapes: tuple = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param)


def take_steps(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def steps_of(make: Callable, dtype: torch.dtype, shapes: tuple, device: torch.device) -> None:
    host, here = parameters(CPU, dtype, shapes), parameters(device, dtype, shapes)
    one, other = _in_plain_torch(make, host), make(here)
    take_steps(one, host, range(STEPS))
    take_steps(other, here, range(STEPS))
    for number, (param, twin) in enumerate(zip(host, here, strict=True)):
        agree(param, twin, device, f"parameter {number}", 1e-4 if dtype == torch.float32 else 1e-2)
        for key, value in other.state[twin].items():
            if isinstance(value, torch.Tensor) and value.dim():
                placed(value, device, f"{key} of parameter {number}")
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    take_steps(other, here, range(STEPS, STEPS + 1))


def _in_plain_torch(make: Callable, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer without compiled kernels, whose compilation would take most of the time."""
    try:
        return make(params, fused=False)
    except TypeError:  # it has none, or asks for this itself
        return make(params)


def accessors(device: torch.device, **options: object) -> None:
    host, here = parameters(CPU), parameters(device)
    one, other = MicroAdam(host, fused=False, **options), MicroAdam(here, **options)
    take_steps(one, host, range(STEPS))
    take_steps(other, here, range(STEPS))
    for param, twin in zip(host, here, strict=True):
        for what, expected, found in (
            ("residual", one.residual(param), other.residual(twin)),
            ("second moment", one.second_moment(param), other.second_moment(twin)),
            ("window's values", one.window(param)[1], other.window(twin)[1]),
            ("window's coordinates", one.window(param)[0], other.window(twin)[0]),
        ):
            agree(expected, found, device, what, 1e-2 if what == "residual" else 1e-4)


def odd_layouts(device: torch.device) -> None:
    """Parameters and gradients that are not contiguous, in half precision, or views."""
    results = []
    for where in (CPU, device):
        weight = nn.Parameter(parameters(where, shapes=((40, 30),))[0].detach().t())
        optimizer = MicroAdam([weight], fused=False)
        for step in range(3):
            weight.grad = torch.randn(40, 30, generator=torch.Generator().manual_seed(step)).to(where).t()
            optimizer.step()
        results.append(weight)
    agree(*results, device, "transposed parameter", 1e-4)


def diagnostics(device: torch.device) -> None:
    found = []
    for where in (CPU, device):
        params = parameters(where)
        optimizer = MicroAdam(params, fused=False)
        watched = MicroAdamDiagnostics(optimizer, 2)
        take_steps(optimizer, params, range(4))
        found.append({key: torch.tensor(float(value)) for key, value in watched.take()[0].items()})
    for key, value in found[0].items():
        agree(value, found[1][key], CPU, key, 1e-3)


@contextmanager
def group_of_one() -> Iterator[None]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(device: torch.device, **options: object) -> None:
    """Parameters divided as FSDP2 does it, on a mesh of one device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    with group_of_one():
        if device.index is not None:
            torch.cuda.set_device(device)
        meshes = {where: init_device_mesh(where.type, (1,)) for where in (CPU, device)}
        found = {}
        for where, mesh in meshes.items():
            params = [nn.Parameter(DTensor.from_local(p.detach(), mesh, [Shard(0)])) for p in parameters(where)]
            optimizer = MicroAdam(params, fused=False, **options)
            for step in range(STEPS):
                give_gradients(whole := [p.to_local().detach() for p in params], step)
                for param, part in zip(params, whole, strict=True):
                    param.grad = DTensor.from_local(part.grad, mesh, [Shard(0)])
                optimizer.step()
            for param in params:
                placed(optimizer.residual(param), where, "residual")
                placed(optimizer.state[param]["indices"].to_local(), where, "indices")
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            found[where] = {str(number): param.to_local() for number, param in enumerate(params)}
        torch.cuda.set_device(0)
    all_agree(found[CPU], found[device], device, "sharded parameter", tolerance=1e-4)


def method_of_the_table(name: str, device: torch.device) -> None:
    """The method's optimizer, as the registry builds it, moves the parameters as on the CPU."""
    found = {}
    for where in (CPU, device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 5)).to(where)
        method = build(name, model, 0.05, {})
        named = dict(model.named_parameters())
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            means = {key: torch.randn(p.shape, generator=generator) for key, p in named.items()}
            for key, mean in moved(means, where).items():
                named[key].grad = mean
            method.optimizer.step()
        found[where] = named
    all_agree(found[CPU], found[device], device, name, tolerance=1e-4)


CASES = {
    **{f"{name}, float32": partial(steps_of, make, torch.float32, SHAPES) for name, make in OPTIMIZERS.items()},
    **{f"{name}, bfloat16": partial(steps_of, make, torch.bfloat16, SHAPES[1:]) for name, make in OPTIMIZERS.items()},
    **{f"table: {name}": partial(method_of_the_table, name) for name in METHODS if name != "sparta"},
    "accessors": accessors,
    "accessors, dense error": partial(accessors, quantize=False),
    "odd layouts": odd_layouts,
    "diagnostics": diagnostics,
    "sharded": sharded,
    "sharded, whole tensors": partial(sharded, scope="tensor", weight_decay=0.1),
}
