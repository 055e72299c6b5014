"""Sampling, noise and the digests and checksums of data and weights are those of the CPU, wherever the tensors are."""

from __future__ import annotations

import copy
from functools import partial
from unittest.mock import patch

import pytest
import torch
from pretend_cuda.cases.comparison import agree, all_agree, moved, placed
from pretend_cuda.cases.optimizers import SHAPES, group_of_one
from pretend_cuda.watch import Watch
from torch import nn

from dp_microadam import MicroAdam, PrivacyPlan
from dp_microadam.errors import PrivacyError
from dp_microadam.noise.mechanism import GaussianMechanism
from dp_microadam.noise.randomness import Randomness
from dp_microadam.sampling.poisson import PoissonSampler
from dp_microadam.training import distributed, same_examples

CPU = torch.device("cpu")


def sums_of(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {f"p{number}": torch.randn(shape).to(dtype) for number, shape in enumerate(SHAPES)}


def noise(secure: bool, dtype: torch.dtype, device: torch.device) -> None:
    """The noise of a seed is the same on every device, to the bit where the CPU's kernels add it."""
    sums = sums_of(dtype)
    make = partial(GaussianMechanism, 1.3, 0.7, 64, randomness=Randomness.seeded(5, secure=secure))
    expected, found = make().privatize(sums, step=0), make().privatize(moved(sums, device), step=0)
    all_agree(expected, found, device, "privatized", tolerance=1e-6)
    assert all(found[name].dtype == value.dtype for name, value in expected.items())


def noise_on_several_devices(device: torch.device) -> None:
    """A model may be spread over devices: each sum gets its noise where it is, and all are checked."""
    sums = sums_of()
    spread = {name: total.to(device) if number % 2 else total for number, (name, total) in enumerate(sums.items())}
    made = GaussianMechanism(1.0, 1.0, 8, randomness=Randomness.seeded(1))
    for name, found in made.privatize(spread, step=0).items():
        placed(found, spread[name].device, name)
    spread["p1"].view(-1)[3] = float("inf")
    with pytest.raises(PrivacyError, match="not finite"):
        made.privatize(spread, step=1)


def correlated_noise(history: str, device: torch.device) -> None:
    """Six steps of three bands are the CPU's; the noise that is kept is where it was asked for, and nobody waits for it."""
    plan = PrivacyPlan(60, 6, 1.0, 9, 1e-2, bands=3)
    given, found = [sums_of() for _ in range(6)], []
    for where in (CPU, device):
        chain = GaussianMechanism.from_plan(plan, 0.7, randomness=Randomness.seeded(5), noise_history=history)
        steps, waits = [], []
        for step, sums in enumerate(given):
            here = moved(sums, where)
            with Watch() as watch:
                steps.append(chain.privatize(here, step=step))
            waits.append(sum(watch.synchronisations.values()))
        for name, kept in chain._correlation._kept.items():
            placed(kept, CPU if history == "cpu" else where, f"the noise of {name} that is kept")
        if where != CPU and history == "device":
            assert set(waits[1:]) == {1}, "a step waits to learn whether its sums are finite, and for nothing else"
        found.append(steps)
    for one, other in zip(*found, strict=True):
        all_agree(one, other, device, "privatized", tolerance=1e-5)


def sampling(device: torch.device) -> None:
    data = torch.randn(50, 3), torch.arange(50)
    for given in (data, {"x": data[0], "y": data[1]}, data[1]):
        found = []
        for where in (CPU, device):
            sampler = PoissonSampler(50, 10, steps=3, randomness=Randomness.seeded(2), physical_batch_size=4)
            found.append([chunk for step in sampler.load(moved(given, where)) for chunk in step.chunks])
        flat = [torch.utils._pytree.tree_leaves(one) for one in found]
        for one, other in zip(*flat, strict=True):
            agree(one, other, device, "sample", 0.0)


def digests(device: torch.device) -> None:
    """Data on a device has the digest of the same data on the CPU, also where only some of its rows are read."""
    data = torch.randn(100, 7)
    for whole in (same_examples._WHOLE, 64):
        with patch.object(same_examples, "_WHOLE", whole), patch.object(same_examples, "_SAMPLE", 10):
            assert same_examples.data_digest(data) == same_examples.data_digest(data.to(device))


def checksums(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.float64):
        tensor = (100 * torch.randn(70, 3).abs()).to(dtype)
        with patch.object(distributed, "_CHECKSUM_CHUNK", 64):
            agree(distributed.checksum(tensor), distributed.checksum(tensor.to(device)), device, f"checksum of {dtype}", 0.0)


def ranks(device: torch.device) -> None:
    """What several processes say to each other, by a process alone: start, comparison and sums of tensors on the device."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(device)
    optimizer = MicroAdam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    before = copy.deepcopy(model)
    with group_of_one():
        members = distributed.Ranks.of_torch()
        members._group_of = lambda tensor: members._messages  # gloo instead of NCCL
        distributed.refuse_diverged(members, model, optimizer, 1)
        assert members.alike([parameter.detach() for parameter in model.parameters()])
    for one, other in zip(before.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


CASES = {
    "noise": partial(noise, False, torch.float32),
    "noise in double precision": partial(noise, False, torch.float64),
    "noise for half precision": partial(noise, False, torch.bfloat16),
    "secure noise": partial(noise, True, torch.float32),
    "correlated noise": partial(correlated_noise, "device"),
    "correlated noise, kept in main memory": partial(correlated_noise, "cpu"),
    "noise on several devices": noise_on_several_devices,
    "sampling": sampling,
    "digests": digests,
    "checksums": checksums,
    "ranks": ranks,
}
